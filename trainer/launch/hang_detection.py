"""A rank that hangs holds up all others. They find out which one, say so, and leave, also out of a collective.

A rank that gets no further calls the roll. Whoever answers says how far it is and what it does; who does not answer is
stopped, or gone. One rank listens, claims the failure in the store and gives the account; the others follow.
"""

from __future__ import annotations

import math
import os
import threading
import time
from collections.abc import Callable
from contextlib import suppress
from functools import partial
from pathlib import Path
from time import monotonic
from typing import NoReturn, Self

from trainer.launch.failure import Failure, blame_rank, exit_process, log_followup, read_first_failure, report_failure
from trainer.launch.polling import poll, with_timeout
from trainer.launch.rendezvous import Launch
from trainer.launch.rollcall import RollCall, RollCallAnswer, describe_blocking_rank, format_answers
from trainer.launch.run_status import mark_failed, read_status
from trainer.launch.stop_signals import StopRequest
from trainer.launch.watchdog import INTERVAL, RankProgress, Watchdog, current_line

_ASLEEP_AFTER = 2.5  # seconds between two looks of a process that was stopped meanwhile
_CATCH_UP_TIMEOUT = 30.0  # seconds after which such a process has heard of all that the others did meanwhile
_ANSWER_TIMEOUT = 5.0  # seconds in which a process that runs answers a roll call
_STORE_TIMEOUT = 7.0  # seconds for all of that, at a store that answers
_FAREWELL_TIMEOUT = 3.0  # seconds for the last words there
_OWN_REPORT_TIMEOUT = 5.0  # seconds in which a main thread gives its own account, once another rank has failed
_EXIT_TIMEOUT = 12.0  # seconds after which a rank that leaves is gone, whatever holds it up
_NO_REPORTER = -1  # has told the failure here


class RankWatchdog(Watchdog):
    """Watches over one of several ranks: hears of the others, and ends the process where one of them hangs."""

    def __enter__(self) -> Self:
        store = self._launch.store()
        assert store is not None
        # a connection answers one question at a time, and each of three threads may wait at its own
        self._listening, self._calling = RollCall(self._launch, store), RollCall(self._launch, store)
        self._listening.enter()
        self._answered, self._hears = 0, True
        self._listened, self._woke = monotonic(), -math.inf
        self._before = read_status(self._folder)  # of an earlier start, until this one has begun
        return super().__enter__()

    def _acts(self) -> list[Callable[[], None]]:
        return [self._watch, self._listen]

    def __exit__(self, kind: object, error: object, trace: object) -> None:
        """The same; but who was stopped until the others had gone has no account to give, and nothing to save."""
        super().__exit__(kind, error, trace)
        if error is not None and self._was_asleep() and (first := self._ended()) is not None:
            self._leave(first, self._listening)

    # What the others do.

    def _listen(self) -> None:
        """In a thread of its own: answer roll calls, and leave once the run has ended without this rank."""
        while not self._over.wait(INTERVAL):
            asleep, self._listened = self._was_asleep(), monotonic()
            if (first := self._ended()) is not None:
                # a main thread to which an error comes gives its own account; one that hangs, or was stopped until
                # now, must do nothing more
                if asleep or self._answered or not self._over.wait(_OWN_REPORT_TIMEOUT):
                    self._leave(first, self._listening)
                return
            with suppress(RuntimeError):  # the store has gone just now: the next look tells
                if self._hears and (number := self._listening.heard()) != self._answered:
                    self._answer(number)
                    self._answered = number  # only now: where the store goes meanwhile, no stacks were written

    def _was_asleep(self) -> bool:
        """Has this process not run for a while, so lately that the others may have ended the run without it?"""
        now = monotonic()
        self._woke = now if now - self._listened > _ASLEEP_AFTER else self._woke
        return now - self._woke < _CATCH_UP_TIMEOUT

    def _ended(self) -> Failure | None:
        """How the run ended without this rank; None: it goes on, as far as can be known."""
        try:
            if self._hears and (first := read_first_failure(self._listening.store)) is not None:
                return first
        except RuntimeError:
            if self._launch.rank0_serves_store:
                return Failure(None, time.time(), "rank 0 is gone, and the store that it served", _NO_REPORTER)
            self._hears = False  # the launcher is gone, but not the ranks: they save and stop
        # the store that a stopped process serves could hear of nothing; the folder could
        return self._written() if self._was_asleep() else None

    def _written(self) -> Failure | None:
        """The failure of this start that the run's folder tells of, if any; whoever wrote it has told it."""
        status = read_status(self._folder)
        if status is None or status["state"] != "failed" or status == self._before:
            return None
        return Failure(status["root_rank"], status["time"], str(status["reason"]), _NO_REPORTER)

    def _answer(self, number: int) -> None:
        pulse, (line, waits) = self._pulse(), current_line(self._main)
        self._listening.answer(number, RollCallAnswer(pulse.step, pulse.laps, line, waits))
        self._where("the ranks ask each other who holds up the run")

    # What this rank does.

    def _due(self, pulse: RankProgress, times: int) -> float:
        """When to ask the others: now and then, and when the time is up."""
        return min(pulse.patience, pulse.worry * (times + 1))

    def _late(self, pulse: RankProgress, seconds: float) -> None:
        """Find out who hangs; leave if somebody does. The store may hang as well, and the disk: none is waited for."""
        self._find_out(f"; nothing has gone on for {seconds:.0f} s", seconds > pulse.patience)

    def _asked_in_vain(self) -> None:
        self._find_out(f"; {self._stop.reason}, and nothing could be saved", over=False)

    def _find_out(self, when: str, over: bool) -> None:
        """`over`: the time is up, and the run ends whoever it was; else only where a rank is certain to be stopped."""
        if over:
            _exit_soon()
        try:
            first = with_timeout(_STORE_TIMEOUT, partial(self._judged, when, over))
        except TimeoutError:  # it answers even while a thread of its process is busy
            first = self._unheard(when)
        except RuntimeError:  # it went with the launcher: the run is asked to stop, and may still save
            first = None
        if over or first is not None:
            self._leave(first or self._unheard(when), self._calling)

    def _judged(self, when: str, over: bool) -> Failure | None:
        """With which failure the run ends, by the answers of all ranks or the one who heard them; None: it goes on."""
        calling, size = self._calling, self._launch.world_size
        if not calling.call(number := self._answered + 1):
            first = poll(lambda: read_first_failure(calling.store), _ANSWER_TIMEOUT + INTERVAL)
        else:
            present = calling.answers(number, _ANSWER_TIMEOUT)
            rank, what = describe_blocking_rank(present, size)
            # one that does not answer may hold the interpreter's lock for long, as it writes a large file
            if not over and not any(calling.stopped(one) for one in range(size) if one not in present):
                if self._stop.raised:
                    self._not_further(what, rank)
                return None
            first = blame_rank(calling.store, self._launch, what + when, rank)
            if first.teller == self._launch.rank:
                lines = f"{format_answers(present, size, rank)}\nAll threads of each rank: logs/rank-N.log"
                report_failure(first, f"{first.reason}\n{lines}", self._launch, self._folder)
        return first

    def _unheard(self, when: str) -> Failure:
        """The account where the store does not answer, or whoever listened to the ranks does not."""
        # rank 0 may have told it, and be gone with its store before this one had asked all
        if (first := self._written()) is not None:
            return first
        rank, teller = (0, 1) if self._launch.rank0_serves_store else (None, 0)
        whose = "the store does not answer" if rank is None else "rank 0 does not answer, nor the store that it serves"
        first = Failure(rank, time.time(), f"{whose}: its process is stopped, or its machine is gone{when}", teller)
        if teller == self._launch.rank:
            report_failure(
                first, f"{first.reason}\n  rank {teller}: {self._where(first.reason)}", self._launch, self._folder
            )
        return first

    def _leave(self, first: Failure, by: RollCall) -> NoReturn:
        """End the process from this thread: the main one may never come back."""
        _exit_soon()
        with suppress(OSError, RuntimeError):  # a full disk; a store that is gone, or does not answer
            if first.teller == self._launch.rank:
                # the thread that answered may still be writing where this rank stands
                poll(lambda: self._answered or None, INTERVAL)
            else:
                where = current_line(self._main)[0] if self._answered else self._where(first.reason)
                log_followup(first, self._launch, self._folder, where)
            # whoever was to say it may not have been able to; or a main thread has got further meanwhile
            if (read_status(self._folder) or {}).get("state") == "running":
                mark_failed(self._folder, first.reason, first.rank)
            with_timeout(_FAREWELL_TIMEOUT, partial(by.part, first.rank))
        exit_process(1)


def make_watchdog(launch: Launch, folder: Path, stop: StopRequest, pulse: Callable[[], RankProgress]) -> Watchdog:
    """What watches over this process, or over this rank of several."""
    return (Watchdog if launch.world_size == 1 else RankWatchdog)(launch, folder, stop, pulse)


def _exit_soon() -> None:
    """What follows asks a store and writes files, and either may hang by now."""
    end = threading.Timer(_EXIT_TIMEOUT, os._exit, (1,))
    end.name, end.daemon = "watchdog", True
    end.start()
