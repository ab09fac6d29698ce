"""How a process ends: refused (2), failed (1), or as it meant to (0, 75); and which rank failed first.

The report of the first failure is the last thing on the screen.
"""

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
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass, replace
from datetime import timedelta
from pathlib import Path
from typing import TYPE_CHECKING, NoReturn

from trainer.launch.polling import poll
from trainer.launch.rank_output import append_to_log, say
from trainer.launch.rendezvous import Launch, say_goodbye
from trainer.launch.run_status import mark_failed, read_status
from trainer.messages import FatalRunError, Refusal

if TYPE_CHECKING:
    from torch.distributed import Store

STOPPED = 75  # exit code: stopped as asked and saved, run the same command again
_FIRST_FAILURE_TIMEOUT = 2.0  # seconds a rank waits to learn whether another failed before it
# the same where that one's connections are closed: it reported before, if at all; a restart waits for this
_PEER_GONE_TIMEOUT = 0.2
_MAIN_TIMEOUT = 5.0  # seconds another rank gives the main one to print a refusal; their imports take differently long
_EXIT_TIMEOUT = 10.0  # seconds after which a failed process is gone, whatever holds it up

# ------------------------------------------------------------------------------------------- errors, and whose they are

PEER_GONE = "Another process of the run ended without a message: it was killed, perhaps because memory ran out."
# What a rank sees when another one failed: gloo's, NCCL's and the store's messages about a connection that broke. With
# each, what to say of that other rank in case it never reports anything itself.
_SPEAKERS = re.compile("gloo|NCCL|c10d|TCPStore|SocketImpl|ProcessGroup|connectFullMesh", re.IGNORECASE)
_PEER_ERRORS = {
    r"connection (was )?(closed|reset)|closed by peer|broken pipe|remote process exited": PEER_GONE,
    r"socket timeout|timed out( waiting|!)|timeout[\s\S]*NCCL|(NCCL|ProcessGroup)[\s\S]*(timed out|timeout)": (
        "Another process of the run stopped answering: it hangs, or does something else than this one."
    ),
    r"connection refused|socket closed|connectFullMesh|pair closure|NCCL|ProcessGroup|failed to (send|recv)": "",
}


def peer_failure(error: BaseException) -> str | None:
    """What an error says about another rank, empty if nothing certain; None where it is this one's own.

    Of a bucket, a download or ffmpeg there are errors of the same words (Connection reset by peer).
    """
    of_ranks = filter(_is_of_torch_distributed, error_chain(error))
    text = "\n".join(map(str, of_ranks))
    matches = (message for pattern, message in _PEER_ERRORS.items() if re.search(pattern, text, re.IGNORECASE))
    return next(matches, None)


def _is_of_torch_distributed(error: BaseException) -> bool:
    """Has torch raised it for a connection between ranks?"""
    by_class = any(kind.__name__ == "DistError" for kind in type(error).__mro__)  # torch may not be imported
    return by_class or (isinstance(error, RuntimeError) and bool(_SPEAKERS.search(str(error))))


def error_chain(error: BaseException) -> Iterator[BaseException]:
    """An error and what it followed from."""
    cause: BaseException | None = error
    while cause is not None:
        yield cause
        cause = cause.__cause__ or cause.__context__


def error_summary(error: BaseException) -> str:
    """An error in one line."""
    text = str(error) if isinstance(error, FatalRunError) else traceback.format_exception_only(error)[-1].strip()
    # an error that a worker process passes on begins with that process, and ends with the error itself
    return text.splitlines()[-1 if "Original Traceback" in text else 0]


class RunFailed(Exception):
    """A run failed; the cause is the error itself. It has what the report needs beside it."""

    def __init__(self, folder: Path, step: int | None, remedy: str) -> None:
        super().__init__(f"a run failed: {folder}")
        self.folder, self.step, self.remedy = folder, step, remedy


@contextmanager
def sys_exit_as_error() -> Iterator[None]:
    """Inside, `sys.exit` of somebody's code is a RuntimeError that says with which code, and where.

    A process that simply ended would tell nobody: the other ranks could only say that it was gone.
    """
    try:
        yield
    except SystemExit as error:
        # the innermost frame is the one that called it
        place = traceback.extract_tb(error.__traceback__)[-1]
        code = "" if error.code is None else repr(error.code)
        message = f"this process left by sys.exit({code}), at {place.filename}:{place.lineno}, before the run was done"
        raise RuntimeError(message).with_traceback(error.__traceback__) from None


# ----------------------------------------------------------------------------------------------------- who failed first


@dataclass(frozen=True)
class Failure:
    """Who failed first, when (seconds since the epoch of the clock) and why, in one line."""

    rank: int | None  # None: nobody knows which
    time: float
    reason: str
    reporter: int  # the rank that claimed it and reports it: a rank that hangs cannot


def claim_first_failure(store: Store | None, launch: Launch, reason: str, rank: int | None) -> Failure:
    """Claim in the store that this rank was the first that failed; returned is the failure that was the first."""
    claim = Failure(rank, time.time(), reason[:500], launch.rank)
    if store is None:
        return claim
    # one atomic operation of the store: the first rank to come writes, all others read what it wrote
    return Failure(**json.loads(store.compare_set("failure", "", json.dumps(asdict(claim)))))


def read_first_failure(store: Store | None) -> Failure | None:
    """The failure that was claimed in this round, if any. Never waits."""
    if store is None or not store.check(["failure"]):
        return None
    return Failure(**json.loads(store.get("failure")))


# ---------------------------------------------------------------------------------------------------------- ways to end


def exit_refused(message: str, launch: Launch) -> NoReturn:
    """Exit 2 with one message: printed once, by one rank, not again by a restarted attempt. Needs no torch.

    Every rank leaves the message where torchrun finds it, so it stands in torchrun's last block as well.
    """
    _ignore_stop_signals()
    # the main rank's file first, in every attempt: the launcher ends the others as soon as one is gone
    if (launch.is_main or not _main_printed_refusal(launch)) and not _refused_in_earlier_attempt(message, launch):
        say(message if launch.rank == launch.local_rank else f"{socket.gethostname()}: {message}")
    _write_launcher_error_file(message, message, time.time() + (not launch.is_main))
    exit_process(2)


def exit_failed(
    error: BaseException, launch: Launch, folder: Path | None = None, step: int | None = None, remedy: str = ""
) -> NoReturn:
    """Exit 1. The rank that failed first prints its traceback and the `remedy`; others, which follow, stay silent."""
    _ignore_stop_signals()
    exit_after(_EXIT_TIMEOUT)
    # where the message says all, a traceback would only hide it
    text = str(error) if isinstance(error, FatalRunError) else "".join(traceback.format_exception(error)).rstrip()
    with contextlib.suppress(OSError, RuntimeError):  # a full disk; a store that went with its launcher
        _report_or_follow(error, launch, folder, step, f"{text}\n{remedy}".rstrip())
    exit_process(1)


def exit_after(seconds: float) -> None:
    """End the process after a while: its report asks a store and writes files, and either may hang by now."""
    timer = threading.Timer(seconds, os._exit, (1,))
    timer.name, timer.daemon = "watchdog", True
    timer.start()


def exit_code(done: bool, launch: Launch, lost: bool = False) -> int:
    """The exit code: 75 for a run that stopped as asked, but 0 where a launcher would restart anything else.

    `lost`: only other machines were asked, and the launcher is to start this one again. A script that must know all the
    same names a file in TRAINER_EXIT_FILE; the main rank writes the code there.
    """
    code = 0 if done else STOPPED
    if launch.is_main and (path := os.environ.get("TRAINER_EXIT_FILE")):
        Path(path).write_text(str(code))
    return 0 if launch.restarted_by_launcher and not lost else code


def exit_process(code: int) -> NoReturn:
    """End the process now. What would run at an ordinary exit can hang or abort once processes have been grouped."""
    for stream in (sys.stdout, sys.stderr):
        with contextlib.suppress(OSError, ValueError):  # nobody reads any more, or it was closed
            stream.flush()
    logging.shutdown()
    if code != 1:  # a failed rank waits for nobody
        say_goodbye()
    if code == 0:
        _clear_launcher_folders()
    os._exit(code)


def _clear_launcher_folders() -> None:
    """torchrun makes a folder for each rank's error and leaves them all, empty, in the temporary directory."""
    path = _launcher_error_file()
    with contextlib.suppress(OSError):  # not empty: other ranks' folders
        while path and any(parent.name.startswith("torchelastic_") for parent in path.parents):
            path = path.parent
            path.rmdir()


def _ignore_stop_signals() -> None:
    """The launcher sends SIGTERM as soon as one rank is gone; the report of what happened comes first."""
    with contextlib.suppress(ValueError):  # not in the main thread
        for number in (signal.SIGTERM, signal.SIGUSR1):
            signal.signal(number, signal.SIG_IGN)


# ----------------------------------------------------------------------------------------------------------- the report


def _report_or_follow(error: BaseException, launch: Launch, folder: Path | None, step: int | None, trace: str) -> None:
    """Find out who failed first: report it where that was this rank, and follow silently where it was another."""
    store = _failure_store(launch)
    peer = peer_failure(error) if launch.world_size > 1 else None
    try:
        # an error that may be the consequence of another rank's waits for that one, whose report is the better one
        timeout = _PEER_GONE_TIMEOUT if peer == PEER_GONE else _FIRST_FAILURE_TIMEOUT
        earlier = poll(lambda: read_first_failure(store), timeout) if peer is not None else None
        first = earlier or claim_first_failure(store, launch, peer or error_summary(error), launch.rank)
    except RuntimeError:
        # the main rank served the store, and is gone: where it could, it has written so into status.json
        if not launch.rank0_serves_store or folder is None or (read_status(folder) or {}).get("state") != "running":
            raise
        # it was killed: of those that are left the next rank reports
        store, earlier, first = None, None, Failure(None, time.time(), PEER_GONE, reporter=1)
    if earlier is None and first.reporter == launch.rank:
        _report_own_failure(first, launch, folder, step, trace, peer or "")
        if store is not None:
            store.set("failure-told", "yes")
        return
    log_followup(first, launch, folder, trace)
    # gone too soon, this rank would have its launcher end the first one before it has reported
    poll(lambda: store is None or store.check(["failure-told"]) or None, _FIRST_FAILURE_TIMEOUT)


def _failure_store(launch: Launch) -> Store | None:
    """The store where failures are claimed; without it (it went with its launcher, others never came) each reports."""
    try:
        return launch.store(timeout=timedelta(seconds=_MAIN_TIMEOUT))
    except Refusal:
        return None


def _report_own_failure(
    first: Failure, launch: Launch, folder: Path | None, step: int | None, trace: str, peer: str
) -> None:
    """Report this rank's error. peer: what it says about another rank."""
    who = f"rank {launch.rank} of {launch.world_size}" if launch.world_size > 1 else "the run"
    text = f"{who} failed{'' if step is None else f' at step {step}'}:\n{trace}\n{peer}".rstrip()
    # of a process that was killed torchrun itself knows more than its peers: the time puts their report after its own
    report_failure(replace(first, rank=None, time=first.time + 5) if peer else first, text, launch, folder)


def report_failure(first: Failure, text: str, launch: Launch, folder: Path | None) -> None:
    """Report a failure: on the screen, in the log, for the launcher and in status.json."""
    say(text)
    append_to_log(text, folder, launch.rank)
    _write_launcher_error_file(first.reason, text, first.time)
    if folder is not None:
        mark_failed(folder, first.reason, first.rank)


def log_followup(first: Failure, launch: Launch, folder: Path | None, trace: str) -> None:
    """Write into this rank's own log that another one's report is the one to read."""
    # a rank that hangs is reported by another one, whose message names it
    summary = f"rank {first.rank} failed first: {first.reason}" if first.rank == first.reporter else first.reason
    append_to_log(f"{summary}; this followed here:\n{trace}", folder, launch.rank)
    if folder is not None and launch.is_main:
        mark_failed(folder, first.reason, first.rank)
    _write_launcher_error_file(summary, summary, first.time + 1)


# ---------------------------------------------------------------------------- files for torchrun, and for `processes=N`


def _launcher_error_file() -> Path | None:
    name = os.environ.get("TORCHELASTIC_ERROR_FILE", os.devnull)
    return None if name == os.devnull else Path(name)


def _write_launcher_error_file(message: str, trace: str, when: float) -> None:
    """In torchrun's format: of all ranks' files it shows the one with the smallest time as the root cause."""
    path = _launcher_error_file()
    if path is not None:
        report = {"message": message, "extraInfo": {"timestamp": str(int(when)), "py_callstack": trace}}
        with contextlib.suppress(OSError):
            path.write_text(json.dumps({"message": report}), encoding="utf-8")


def _main_printed_refusal(launch: Launch) -> bool:
    """Wait until the main rank has printed its refusal: then its error file is there, beside this rank's."""
    path = _launcher_error_file()
    if path is None or launch.rank != launch.local_rank:  # another machine: torchrun shows it there, srun nowhere
        time.sleep(1)  # mpirun, and srun if told so, have ended all by then
        return path is not None or launch.local_rank > 0
    main = path.parent.parent / "0" / path.name
    # torchrun ends all soon after the first is gone; the parent of `processes=N` waits
    timeout = 4 * _MAIN_TIMEOUT if launch.is_local_child else _MAIN_TIMEOUT
    return poll(lambda: main.is_file() or None, timeout) is not None


def _refused_in_earlier_attempt(message: str, launch: Launch) -> bool:
    """Did an earlier attempt under the same launcher end with this very message?"""
    path = _launcher_error_file()
    if launch.attempt == 0 or launch.requeued or path is None:  # a requeued job prints into a file of its own
        return launch.attempt > 0 and not launch.requeued
    for file in path.parent.parent.parent.glob(f"attempt_*/*/{path.name}"):
        with contextlib.suppress(OSError, ValueError, KeyError, TypeError):
            if json.loads(file.read_text(encoding="utf-8"))["message"]["message"] == message:
                return True
    return False
