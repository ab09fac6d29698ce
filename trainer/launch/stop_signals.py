"""Requests to stop: SIGTERM, SIGINT and SIGUSR1 raise a flag, and the loop decides what follows."""

from __future__ import annotations

import contextlib
import math
import os
import select
import signal
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any

from trainer.launch.failure import read_first_failure
from trainer.launch.polling import poll
from trainer.launch.rank_output import say
from trainer.launch.rendezvous import Launch
from trainer.launch.run_status import mark_failed

if TYPE_CHECKING:
    from torch.distributed import Store

STOP_SIGNALS = (signal.SIGTERM, signal.SIGINT, signal.SIGUSR1)
_SAME_SIGNAL = 0.5  # seconds in which one Ctrl-C may come twice, from a terminal and from a launcher
_STORE_INTERVAL = 0.25  # seconds between two looks at the store
_PARENT_INTERVAL = 1.0  # seconds between two looks whether the launcher still lives
_REQUEST_SPREAD = 2.0  # seconds in which a request that is meant for all machines reaches the last of them
_current: StopRequest | None = None


class StopRequest:
    """Says whether somebody asked this process to stop; a context, which restores the handlers at its end.

    A second SIGINT ends the process at once. So does a SIGTERM that comes because another rank failed, even while the
    main thread is stuck in a collective: a thread of its own hears the signals too. In a program of somebody's own,
    where no other ranks can hold it up, the second SIGINT is a KeyboardInterrupt.
    """

    def __init__(self, launch: Launch | None = None, folder: Path | None = None):
        self.raised = False
        self.reason = ""  # the signal's name, or that the launcher is gone
        self._launch, self._folder = launch or Launch(), folder
        self._store: Store | None = None
        self._may_end = self._launch.owns_process or self._launch.world_size > 1
        self._interrupted, self._terminated = math.inf, False  # when first by SIGINT; ever by SIGTERM
        # the launcher: one that is killed signals nobody. It may be gone already, and getppid() another process by now
        self._parent = self._launch.waiting_parent or (os.getppid() if self._launch.restarted_by_launcher else None)

    def __enter__(self) -> StopRequest:
        """Listen from now on. Only the main thread can; in others nothing is ever raised."""
        global _current
        if threading.current_thread() is not threading.main_thread():
            return self
        store = self._launch.store()
        self._store = store.clone() if store is not None else None  # the main thread may be waiting at the other one
        # the kernel's side of a handler writes the number of every signal into the pipe, whatever Python is doing
        self._reader, self._writer = os.pipe()
        os.set_blocking(self._writer, False)
        self._woken_before = signal.set_wakeup_fd(self._writer, warn_on_full_buffer=False)
        # in the main thread as well: a flag is then raised before its next instruction
        self._before = {number: signal.signal(number, self._handle) for number in STOP_SIGNALS}
        self._thread = threading.Thread(target=self._listen, name="stop requests", daemon=True)
        self._thread.start()
        _current = self
        return self

    def __exit__(self, error: Any, *_: Any) -> None:
        """Put everything back as it was; but after an error a rank of several is not ended before it has told of it."""
        global _current
        if _current is not self:
            return
        _current = None
        signal.set_wakeup_fd(self._woken_before)
        for number, handler in self._before.items():
            # the launcher ends all ranks as soon as one has failed, and this one has still to write what it saw
            is_awaited = error is not None and self._store is not None and number == signal.SIGTERM
            signal.signal(number, signal.SIG_IGN if is_awaited else handler)
        # 0 is the number of no signal: it ends the thread
        os.write(self._writer, b"\0")
        self._thread.join()
        os.close(self._reader)
        os.close(self._writer)

    def _handle(self, number: int, _: object) -> None:
        self.ask(_signal_name(number))
        if not self._may_end and number == signal.SIGINT and self._again():
            raise KeyboardInterrupt("interrupted twice: stopped at once, without a new checkpoint")

    def ask(self, reason: str) -> None:
        """Raise the flag; the first reason stays."""
        if not self.raised:
            self.reason, self.raised = reason, True

    def _listen(self) -> None:
        """In a thread of its own: hear signals while the main thread is stuck, and what no signal tells."""
        poll = select.poll()  # not select(): it knows 1024 files and no more
        poll.register(self._reader, select.POLLIN)
        while True:
            # where nothing else is to be looked at, only a signal wakes it
            pause = _STORE_INTERVAL if self._terminated else None if self._parent is None else _PARENT_INTERVAL
            numbers = os.read(self._reader, 64) if poll.poll(None if pause is None else 1000 * pause) else b""
            if self._parent not in (None, os.getppid()):
                self.ask("the launcher is gone")
                self._parent = None
            if 0 in numbers:
                return
            for number in numbers:
                if number in STOP_SIGNALS:
                    self._hear(number)
            if self._terminated:
                self._leave_if_another_failed()

    def _hear(self, number: int) -> None:
        self.ask(_signal_name(number))
        self._terminated = self._terminated or (number == signal.SIGTERM and self._store is not None)
        if self._may_end and number == signal.SIGINT and self._again():
            if self._launch.is_main:
                say("interrupted twice: stopped at once, without a new checkpoint")
            self._quit("interrupted twice", self._launch.rank)

    def _again(self) -> bool:
        """Is this SIGINT a second one, and not the first that was delivered twice?"""
        # within half a second it is the same Ctrl-C, delivered by a terminal and by a launcher
        now, first = time.monotonic(), self._interrupted
        self._interrupted = min(first, now)
        return now - first > _SAME_SIGNAL

    def _leave_if_another_failed(self) -> None:
        """The launcher ends all ranks when one has failed; there is nobody left to save with."""
        try:
            failure = read_first_failure(self._store)
        except RuntimeError:  # the store is gone, and with it the launcher: nothing more will be heard
            self._terminated = False
            return
        if failure is not None and failure.reporter != self._launch.rank:
            self._quit(failure.reason, failure.rank)

    def _quit(self, reason: str, root_rank: int | None) -> None:
        """End the process from this thread: the main one may never come back."""
        if self._folder is not None and self._launch.is_main:
            with contextlib.suppress(OSError):
                mark_failed(self._folder, reason, root_rank)
        os._exit(1)


def _signal_name(number: int) -> str:
    return signal.Signals(number).name


def stopped_elsewhere_only(
    launch: Launch, request: StopRequest, share: Callable[[Any], list[Any]], spread: float = _REQUEST_SPREAD
) -> bool:
    """Collective: has another machine been asked to stop, and this one not? Then the run is to go on without it.

    Each machine has a torchrun of its own. One that ends (a spot machine that is taken back, a killed torchrun) takes
    its processes along; those of the other machines stop with them, since no collective works any more, but are not
    done: only if they say so with their exit code does their torchrun start them again, with the machines that are
    left. Where nobody was asked (`run.stop_after`), nobody is left behind.
    """
    if not launch.restarted_by_launcher or launch.local_world_size == launch.world_size:
        return False
    poll(lambda: request.raised or None, spread)
    machine = launch.rank - launch.local_rank  # torchrun counts one machine through before the next
    # all ranks; each hears every rank's machine, and what that rank was asked
    asked = {other for other, reason in share([machine, request.reason]) if reason}
    return bool(asked) and machine not in asked


def ignore_stop_signals() -> None:
    """Ignore every request to stop: launchers signal whole process groups."""
    for number in STOP_SIGNALS:
        signal.signal(number, signal.SIG_IGN)


def obey_parent_only() -> None:
    """For a decoding process: only its parent decides when it ends, and may do so by SIGTERM."""
    ignore_stop_signals()
    if hasattr(signal, "sigwaitinfo"):  # not on macOS
        # blocked in every thread it stays pending, for one that can see who sent it
        signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGTERM})
        signal.signal(signal.SIGTERM, signal.SIG_DFL)
        threading.Thread(
            target=_exit_when_parent_asks, args=(os.getppid(),), name="parent's request", daemon=True
        ).start()


def _exit_when_parent_asks(parent: int) -> None:
    while signal.sigwaitinfo({signal.SIGTERM}).si_pid != parent:
        pass
    os._exit(0)  # as torch's own handler ends such a process


def _forget_in_forked_child() -> None:
    """In a forked child: its signals must not be heard in the parent."""
    global _current
    if _current is not None:
        _current = None
        with contextlib.suppress(ValueError):  # forked by another thread than the main one
            signal.set_wakeup_fd(-1)  # the pipe is the parent's, too
            ignore_stop_signals()
            signal.signal(signal.SIGTERM, signal.SIG_DFL)


os.register_at_fork(after_in_child=_forget_in_forked_child)
