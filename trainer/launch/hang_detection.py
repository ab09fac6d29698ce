"""Finds the rank that hangs and holds up all others; they report it and end, also out of a collective.

A rank that gets no further calls the roll, through the store of the launch. On every rank a thread listens and answers,
whatever its main thread does: how far it is, and which line it is at. A rank that does not answer is stopped, or gone.
One rank reads the answers, claims the failure in the store and reports it; the others follow.
"""

from __future__ import annotations

import json
import math
import os
import signal
import threading
import time
from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path
from time import monotonic
from typing import TYPE_CHECKING, NoReturn, Self

from trainer.launch.failure import Failure, blame_rank, exit_process, log_followup, read_first_failure, report_failure
from trainer.launch.polling import poll, with_timeout
from trainer.launch.rendezvous import Launch
from trainer.launch.run_status import mark_failed, read_status
from trainer.launch.stop_signals import StopRequest
from trainer.launch.store_collectives import machine_id
from trainer.launch.watchdog import INTERVAL, RankProgress, Watchdog, current_line

if TYPE_CHECKING:
    from torch.distributed import Store

_MOST_RANKS = 16  # ranks that an account names
_LEAVE_TIMEOUT = 2.0  # seconds in which whoever runs has heard of the end
_ASLEEP_AFTER = 2.5  # seconds between two looks of a process that was stopped meanwhile
_CATCH_UP_TIMEOUT = 30.0  # seconds after which such a process has heard of all that the others did meanwhile
_ANSWER_TIMEOUT = 5.0  # seconds in which a process that runs answers a roll call
_STORE_TIMEOUT = 7.0  # seconds for all of that, at a store that answers
_FAREWELL_TIMEOUT = 3.0  # seconds for the last words there
_OWN_REPORT_TIMEOUT = 5.0  # seconds in which a main thread gives its own account, once another rank has failed
_EXIT_TIMEOUT = 12.0  # seconds after which a rank that leaves is gone, whatever holds it up
_NO_REPORTER = -1  # has told the failure here


@dataclass(frozen=True)
class RollCallAnswer:
    """One rank's answer."""

    step: int  # that is under way, or was done last
    laps: int  # phases of steps that were done: who has done fewer is behind
    line: str  # what its main thread is doing
    waits: bool  # for other ranks, as far as that line tells


class RollCall:
    """One rank's side of it. Each thread needs one of its own: a store's connection answers one question at a time."""

    def __init__(self, launch: Launch, store: Store) -> None:
        self.launch, self.store = launch, store.clone()

    def enter(self) -> None:
        """Say which process this rank is."""
        self.store.set(f"process-{self.launch.rank}", json.dumps([_process_namespace(), os.getpid()]))

    def call(self, number: int) -> bool:
        """Ask all ranks to answer; is this the first that does? It is the one to listen to the answers."""
        first = self.store.add(f"callers-{number}", 1) == 1
        if first:
            self.store.set("call", str(number))
        return first

    def heard(self) -> int:
        """The number of the last call, from 1 on; 0: nobody has called."""
        return int(self.store.get("call")) if self.store.check(["call"]) else 0

    def answer(self, number: int, present: RollCallAnswer) -> None:
        """Be there."""
        self.store.set(f"present-{number}-{self.launch.rank}", json.dumps(asdict(present)))

    def answers(self, number: int, seconds: float) -> dict[int, RollCallAnswer]:
        """Of each rank that answers within so long. Nobody waits for those that are stopped."""
        keys = [f"present-{number}-{rank}" for rank in range(self.launch.world_size)]

        def all_heard() -> bool | None:
            missing = [rank for rank, key in enumerate(keys) if not self.store.check([key])]
            return all(self.stopped(rank) for rank in missing) or None

        poll(all_heard, seconds)
        there = {rank: key for rank, key in enumerate(keys) if self.store.check([key])}
        return {rank: RollCallAnswer(**json.loads(self.store.get(key))) for rank, key in there.items()}

    def stopped(self, rank: int) -> bool:
        """Is it certain that the rank's process is stopped? Only of one on this machine, and on Linux."""
        with suppress(OSError):
            return _process_state(self._process(rank)) == "T"
        return False

    def part(self, blamed: int | None) -> None:
        """Be about to end. Who serves the store waits for the others; the blamed one, if stopped, is made to run."""
        self.store.set(f"parted-{self.launch.rank}", "")
        if self.launch.rank0_serves_store and self.launch.is_main:
            others = [f"parted-{rank}" for rank in range(1, self.launch.world_size) if rank != blamed]
            poll(lambda: not others or self.store.check(others) or None, _LEAVE_TIMEOUT)
        # last of all, so that it finds nobody to go on with: it hears that the run is over, and ends. It may be gone
        # already, or another user's; to a process that runs the signal means nothing
        with suppress(ProcessLookupError, PermissionError):
            if blamed is not None and (pid := self._process(blamed)):
                os.kill(pid, signal.SIGCONT)

    def _process(self, rank: int) -> int:
        """The process of a rank on this machine; 0: it is elsewhere, or has never come."""
        if not self.store.check([f"process-{rank}"]):
            return 0
        where, pid = json.loads(self.store.get(f"process-{rank}"))
        return pid if where == _process_namespace() else 0


def _process_namespace() -> str:
    """What processes have in common that can see each other: containers on one machine may not."""
    try:
        return f"{machine_id()} {os.readlink('/proc/self/ns/pid')}"
    except OSError:
        return machine_id()


def _process_state(pid: int) -> str:
    """How a process is, in Linux' letter: R runs, S sleeps, T was stopped by a signal."""
    return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] if pid else ""


def find_blocking_ranks(present: Mapping[int, RollCallAnswer], size: int) -> tuple[list[int], str]:
    """Which ranks hold the others up, and how that is known; none where all wait for each other."""
    silent = [rank for rank in range(size) if rank not in present]
    if silent:
        return silent, "does not answer: its process is stopped, or its machine is gone"
    furthest = max(one.laps for one in present.values())
    if behind := [rank for rank, one in present.items() if one.laps < furthest]:
        return behind, "is behind the others"
    # in the same phase of the same step: some wait in it, and some do something else
    busy = [rank for rank, one in present.items() if not one.waits]
    return (busy, "does not come to where the others wait") if len(busy) < size else ([], "")


def describe_blocking_rank(present: Mapping[int, RollCallAnswer], size: int) -> tuple[int | None, str]:
    """The first of those ranks, and the sentence about them."""
    ranks, why = find_blocking_ranks(present, size)
    if not ranks:
        return None, "no rank gets further, and none is behind: the network between them, or a device"
    others = f", and so rank {', '.join(map(str, ranks[1:_MOST_RANKS]))}" if len(ranks) > 1 else ""
    line = f" ({present[ranks[0]].line})" if ranks[0] in present else ""
    return ranks[0], f"rank {ranks[0]} of {size} {why}{line}{others}"


def format_answers(present: Mapping[int, RollCallAnswer], size: int, first: int | None) -> str:
    """A line for each rank, the blamed one first."""
    order = sorted(range(size), key=lambda rank: (rank != first, rank in present, rank))[:_MOST_RANKS]
    said = {rank: f"step {one.step}, {one.line}" for rank, one in present.items()}
    return "\n".join(f"  rank {rank}: {said.get(rank, 'no answer')}" for rank in order)


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
