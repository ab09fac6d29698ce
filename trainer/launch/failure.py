"""How a process ends: refused (2), failed (1), or as it meant to. The cause is the last thing on the screen."""

from __future__ import annotations

import contextlib
import json
import logging
import os
import re
import signal
import socket
import sys
import threading
import time
import traceback
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass
from datetime import timedelta
from pathlib import Path
from typing import TYPE_CHECKING, NoReturn, TypeVar

from trainer.launch.launch import Launch
from trainer.launch.rendezvous import say_goodbye
from trainer.launch.screen import note, say
from trainer.launch.status import mark_failed
from trainer.refusal import Refusal

if TYPE_CHECKING:
    from torch.distributed import Store

T = TypeVar("T")
_PATIENCE = 2.0  # seconds a rank waits to learn whether another failed before it
_MAIN_PATIENCE = 5.0  # seconds another rank gives the main one to print a refusal; their imports take differently long
_END = 10.0  # seconds after which a failed process is gone, whatever holds it up

# What a rank sees when the fault is another's: gloo's, NCCL's and the store's words for a connection that broke.
_ECHO = re.compile(
    r"connection (was )?(closed|reset|refused)|closed by peer|broken pipe|socket (timeout|closed)|connectFullMesh"
    r"|remote process exited|pair closure|NCCL|ProcessGroup|failed to (send|recv)|timed out( waiting|!)",
    re.IGNORECASE,
)
_GONE = re.compile(r"closed by peer|connection (was )?(closed|reset)|broken pipe|remote process exited", re.IGNORECASE)
_SILENT = re.compile(r"timed out|timeout", re.IGNORECASE)


@dataclass(frozen=True)
class Failure:
    """Who failed, when (seconds since the epoch of the clock) and why, in one line."""

    rank: int
    time: float
    reason: str


def refuse(message: str, launch: Launch) -> NoReturn:
    """Exit 2 with one sentence: printed once, by one rank, not again by a restarted attempt. Needs no torch.

    Every rank leaves the sentence where torchrun finds it, so it stands in torchrun's last block as well.
    """
    _no_more_requests()
    # the main rank's file first, in every attempt: the launcher ends the others as soon as one is gone
    if (launch.is_main or not _main_has_spoken(launch)) and not _refused_before(message, launch):
        say(message if launch.rank == launch.local_rank else f"{socket.gethostname()}: {message}")
    _leave_for_launcher(message, message, time.time() + (not launch.is_main))
    exit_process(2)


def fail(
    error: BaseException, launch: Launch, folder: Path | None = None, step: int | None = None, remedy: str = ""
) -> NoReturn:
    """Exit 1. The rank that failed first prints its own traceback; the others, whose errors follow, stay silent.

    `remedy`: what to try, a line below the traceback.
    """
    _no_more_requests()
    end = threading.Timer(_END, os._exit, (1,))
    end.daemon = True
    end.start()
    trace = f"{''.join(traceback.format_exception(error)).rstrip()}\n{remedy}".rstrip()
    with contextlib.suppress(OSError, RuntimeError):  # a full disk; a store that went with its launcher
        _account(error, launch, folder, step, trace)
    exit_process(1)


def exit_process(code: int) -> NoReturn:
    """End the process now. What would run at an ordinary exit can hang or abort once processes have been grouped."""
    for stream in (sys.stdout, sys.stderr):
        with contextlib.suppress(OSError, ValueError):
            stream.flush()
    logging.shutdown()
    if code != 1:  # a failed rank waits for nobody
        say_goodbye()
    if code == 0:
        _clear_launcher_folders()
    os._exit(code)


def _clear_launcher_folders() -> None:
    """torchrun makes a folder for each rank's error and leaves them all, empty, in the temporary directory."""
    path = _error_file()
    own = path and next((parent for parent in path.parents if parent.name.startswith("torchelastic_")), None)
    while path and own and path != own:
        path = path.parent
        try:
            path.rmdir()
        except OSError:  # not empty: other ranks' folders
            return


def _account(error: BaseException, launch: Launch, folder: Path | None, step: int | None, trace: str) -> None:
    """Find out who failed first, and speak or be silent accordingly."""
    store = _store(launch)
    echo = _is_echo(error) and launch.world_size > 1
    first = _wait_for(lambda: claimed(store)) if echo else None
    if first is None:
        plain = _about_peer(error) if echo else ""
        reason = plain or traceback.format_exception_only(error)[-1].strip()
        first = claim(store, launch, reason)
        if first.rank == launch.rank:
            _speak(first, launch, folder, step, f"{trace}\n{plain}".rstrip(), late=5 if plain else 0)
            if store is not None:
                store.set("failure-told", "yes")
            return
    note(f"rank {first.rank} failed first ({first.reason}); this followed here:\n{trace}", folder, launch.rank)
    if folder is not None and launch.is_main:
        mark_failed(folder, first.reason, first.rank)
    summary = f"rank {first.rank} failed first: {first.reason}"
    _leave_for_launcher(summary, summary, first.time + 1)
    _wait_for(lambda: store is None or store.check(["failure-told"]) or None)


def _store(launch: Launch) -> Store | None:
    """The store where failures are claimed; without it (others never came, it went with its launcher) each speaks."""
    try:
        return launch.store(patience=timedelta(seconds=_MAIN_PATIENCE))
    except Refusal:
        return None


def _speak(first: Failure, launch: Launch, folder: Path | None, step: int | None, trace: str, late: int) -> None:
    """Print the traceback, and leave it in the log, in status.json and for the launcher."""
    who = f"rank {launch.rank} of {launch.world_size}" if launch.world_size > 1 else "the run"
    text = f"{who} failed{'' if step is None else f' at step {step}'}:\n{trace}"
    say(text)
    note(text, folder, launch.rank)
    # of a process that was killed torchrun itself knows more than its peers: their word comes later
    _leave_for_launcher(first.reason, text, first.time + late)
    if folder is not None:
        mark_failed(folder, first.reason, launch.rank if not late else None)


def _is_echo(error: BaseException) -> bool:
    """May this be what another rank's end looks like from here?"""
    return any(isinstance(one, RuntimeError | OSError) and _ECHO.search(str(one)) for one in chain(error))


def _about_peer(error: BaseException) -> str:
    """What an error says about another rank that never said anything itself; empty where it may be one's own."""
    if any(_GONE.search(str(one)) for one in chain(error)):
        return "Another process of the run disappeared without a word: killed from outside, or for want of memory."
    if any(_SILENT.search(str(one)) for one in chain(error)):
        return "Another process of the run stopped answering: it hangs, or does something else than this one."
    return ""


def chain(error: BaseException) -> Iterator[BaseException]:
    """An error and what it followed from."""
    seen: set[int] = set()
    one: BaseException | None = error
    while one is not None and id(one) not in seen:
        seen.add(id(one))
        yield one
        one = one.__cause__ or one.__context__


def _wait_for(look: Callable[[], T | None], patience: float = _PATIENCE) -> T | None:
    deadline = time.monotonic() + patience
    while (found := look()) is None and time.monotonic() < deadline:
        time.sleep(0.02)
    return found


def _no_more_requests() -> None:
    """The launcher sends SIGTERM as soon as one rank is gone; the account of what happened comes first."""
    with contextlib.suppress(ValueError):  # not in the main thread
        for number in (signal.SIGTERM, signal.SIGUSR1):
            signal.signal(number, signal.SIG_IGN)


def _error_file() -> Path | None:
    name = os.environ.get("TORCHELASTIC_ERROR_FILE", os.devnull)
    return None if name == os.devnull else Path(name)


def _leave_for_launcher(message: str, trace: str, when: float) -> None:
    """In torchrun's format: of all ranks' files it shows the one with the smallest time as the root cause."""
    path = _error_file()
    if path is not None:
        said = {"message": message, "extraInfo": {"timestamp": str(int(when)), "py_callstack": trace}}
        with contextlib.suppress(OSError):
            path.write_text(json.dumps({"message": said}), encoding="utf-8")


def _main_has_spoken(launch: Launch) -> bool:
    """Wait until the main rank has printed its refusal. Its error file, beside this one, tells."""
    path = _error_file()
    if path is None or launch.rank != launch.local_rank:  # another machine: torchrun shows it there, srun nowhere
        time.sleep(1)  # mpirun, and srun if told so, have ended all by then
        return path is not None or launch.local_rank > 0
    main = path.parent.parent / "0" / path.name
    return bool(_wait_for(lambda: main.is_file() or None, _MAIN_PATIENCE))


def _refused_before(message: str, launch: Launch) -> bool:
    """Did an earlier attempt under the same launcher end with this very sentence?"""
    path = _error_file()
    if not launch.attempt or not launch.restarts or path is None:  # a requeued job speaks into a file of its own
        return launch.attempt > 0 and launch.restarts
    for file in path.parent.parent.parent.glob(f"attempt_*/*/{path.name}"):
        with contextlib.suppress(OSError, ValueError, KeyError, TypeError):
            if json.loads(file.read_text(encoding="utf-8"))["message"]["message"] == message:
                return True
    return False


def claim(store: Store | None, launch: Launch, reason: str) -> Failure:
    """Claim to be the first that failed; what is returned is the failure that was first."""
    mine = Failure(launch.rank, time.time(), reason[:500])
    if store is None:
        return mine
    return Failure(**json.loads(store.compare_set("failure", "", json.dumps(asdict(mine)))))


def claimed(store: Store | None) -> Failure | None:
    """The failure that was claimed in this round, if any. Never waits."""
    if store is None or not store.check(["failure"]):
        return None
    return Failure(**json.loads(store.get("failure")))
