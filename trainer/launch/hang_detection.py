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
import time
from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path
from time import monotonic
from typing import TYPE_CHECKING, NoReturn, Self

from trainer.launch import failure
from trainer.launch.failure import Failure
from trainer.launch.main_thread_watchdog import INTERVAL, RankProgress, Watchdog, current_line
from trainer.launch.polling import poll, with_timeout
from trainer.launch.rendezvous import Launch
from trainer.launch.run_status import mark_failed, read_status
from trainer.launch.stop_signals import StopRequest
from trainer.launch.store_collectives import machine_id

if TYPE_CHECKING:
    from torch.distributed import Store

_MOST_RANKS = 16  # that a report names
_LEAVE_TIMEOUT = 2.0  # seconds in which every rank that runs has heard of the end
_ASLEEP_AFTER = 2.5  # seconds between two looks of a process that was stopped meanwhile
_CATCH_UP_TIMEOUT = 30.0  # seconds after which such a process knows all that the others did meanwhile
_PROMPT_TIMEOUT = 1.5 * INTERVAL  # seconds in which all ranks answer a roll call, unless one cannot
_ANSWER_TIMEOUT = 5.0  # seconds in which a process that runs answers a roll call
_STORE_TIMEOUT = 7.0  # seconds for all of that, at a store that answers
_FAREWELL_TIMEOUT = 3.0  # seconds for the last words there
_OWN_REPORT_TIMEOUT = 5.0  # seconds in which a main thread reports by itself, once another rank has failed
_EXIT_TIMEOUT = 12.0  # seconds after which a rank that leaves is gone, whatever holds it up
_NO_REPORTER = -1  # no rank: the failure is reported already


@dataclass(frozen=True)
class RollCallAnswer:
    """One rank's answer to a roll call."""

    step: int  # that is under way, or was done last
    phases: int  # of steps that were done: a rank that has done fewer is behind
    line: str  # that its main thread is at
    waits: bool  # for other ranks or its device, as far as that line tells


class RollCall:
    """One rank's side of the roll calls. Each thread needs its own: a connection answers one question at a time."""

    def __init__(self, launch: Launch, store: Store) -> None:
        self.launch, self.store = launch, store.clone()

    def register(self) -> None:
        """Write into the store which process this rank is."""
        self.store.set(f"process-{self.launch.rank}", json.dumps([_process_namespace(), os.getpid()]))

    def call(self, number: int) -> bool:
        """Ask all ranks to answer; is this the first rank that asks? It is the one to read the answers."""
        first = self.store.add(f"callers-{number}", 1) == 1
        if first:
            self.store.set("call", str(number))
        return first

    def last_call(self) -> int:
        """The number of the last call, from 1 on; 0: no rank has called."""
        return int(self.store.get("call")) if self.store.check(["call"]) else 0

    def answer(self, number: int, answer: RollCallAnswer) -> None:
        """Answer a call."""
        self.store.set(f"present-{number}-{self.launch.rank}", json.dumps(asdict(answer)))
        self.store.add(f"present-{number}", 1)

    def collect(self, number: int, seconds: float) -> dict[int, RollCallAnswer]:
        """The answer of each rank that gives one within so long. Ranks that are stopped are not waited for."""
        keys = [f"present-{number}-{rank}" for rank in range(self.launch.world_size)]

        def all_others_stopped() -> bool | None:
            missing = [rank for rank, key in enumerate(keys) if not self.store.check([key])]
            return all(self.is_stopped(rank) for rank in missing) or None

        # one number tells whether all have; only who waits in vain looks for each of them, and not often
        in_time = min(seconds, _PROMPT_TIMEOUT)
        if not poll(lambda: self.store.add(f"present-{number}", 0) == len(keys) or None, in_time):
            poll(all_others_stopped, seconds - in_time, most=INTERVAL)
        answered = [rank for rank, key in enumerate(keys) if self.store.check([key])]
        answers = self.store.multi_get([keys[rank] for rank in answered]) if answered else []
        return {rank: RollCallAnswer(**json.loads(text)) for rank, text in zip(answered, answers, strict=True)}

    def is_stopped(self, rank: int) -> bool:
        """Is it certain that the rank's process is stopped? Only of one on this machine, and on Linux."""
        with suppress(OSError):
            return _process_state(self._pid(rank)) == "T"
        return False

    def leave(self, blamed: int | None) -> None:
        """Before the end: a rank that serves the store waits for the others; one that is stopped is woken up."""
        if self.launch.rank != blamed:
            self.store.add("parted", 1)
        if self.launch.rank0_serves_store and self.launch.is_main:
            count = self.launch.world_size - (blamed is not None)  # with this rank
            poll(lambda: self.store.add("parted", 0) >= count or None, _LEAVE_TIMEOUT)
        # last of all, so that it finds nobody to go on with: it hears that the run is over, and ends. It may be gone
        # already, or another user's; to a process that runs the signal means nothing
        with suppress(ProcessLookupError, PermissionError):
            if blamed is not None and (pid := self._pid(blamed)):
                os.kill(pid, signal.SIGCONT)

    def _pid(self, rank: int) -> int:
        """The process id of a rank on this machine; 0: it is on another one, or has never come."""
        if not self.store.check([f"process-{rank}"]):
            return 0
        namespace, pid = json.loads(self.store.get(f"process-{rank}"))
        return pid if namespace == _process_namespace() else 0


def _process_namespace() -> str:
    """The same text in all processes that can see each other: containers on one machine may not."""
    try:
        return f"{machine_id()} {os.readlink('/proc/self/ns/pid')}"
    except OSError:
        return machine_id()


def _process_state(pid: int) -> str:
    """The state of a process, as Linux' letter: R runs, S sleeps, T was stopped by a signal."""
    return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] if pid else ""


def find_blocking_ranks(answers: Mapping[int, RollCallAnswer], size: int) -> tuple[list[int], str]:
    """Which ranks hold the others up, and how that is known; none where all wait for each other."""
    silent = [rank for rank in range(size) if rank not in answers]
    if silent:
        return silent, "does not answer: its process is stopped, or its machine is gone"
    furthest = max(answer.phases for answer in answers.values())
    if behind := [rank for rank, answer in answers.items() if answer.phases < furthest]:
        return behind, "is behind the others"
    # in the same phase of the same step: some wait in it, and some do something else
    busy = [rank for rank, answer in answers.items() if not answer.waits]
    return (busy, "does not come to where the others wait") if len(busy) < size else ([], "")


def describe_blocking_rank(answers: Mapping[int, RollCallAnswer], size: int) -> tuple[int | None, str]:
    """The first of those ranks, and the sentence about them."""
    ranks, why = find_blocking_ranks(answers, size)
    if not ranks:
        return None, "no rank gets further, and none is behind: the network between them, or a device"
    others = f", and so rank {', '.join(map(str, ranks[1:_MOST_RANKS]))}" if len(ranks) > 1 else ""
    line = f" ({answers[ranks[0]].line})" if ranks[0] in answers else ""
    return ranks[0], f"rank {ranks[0]} of {size} {why}{line}{others}"


def format_answers(answers: Mapping[int, RollCallAnswer], size: int, blamed: int | None) -> str:
    """A line for each rank, the blamed one first."""
    order = sorted(range(size), key=lambda rank: (rank != blamed, rank in answers, rank))[:_MOST_RANKS]
    lines = {rank: f"step {answer.step}, {answer.line}" for rank, answer in answers.items()}
    return "\n".join(f"  rank {rank}: {lines.get(rank, 'no answer')}" for rank in order)


class RankWatchdog(Watchdog):
    """Watches one of several ranks: answers the others, and ends the process where one of them hangs."""

    def __enter__(self) -> Self:
        store = self._launch.store()
        assert store is not None
        # a connection answers one question at a time, and each of three threads may wait at its own
        self._listening, self._calling = RollCall(self._launch, store), RollCall(self._launch, store)
        self._listening.register()
        self._answered, self._store_lives = 0, True
        self._listened_at, self._woke_at = monotonic(), -math.inf
        self._status_before = read_status(self._folder)  # of an earlier start, until this one has begun
        return super().__enter__()

    def _loops(self) -> list[Callable[[], None]]:
        return [self._watch, self._listen]

    def __exit__(self, kind: object, error: object, trace: object) -> None:
        """The same; but a rank that was stopped until the others had gone has nothing to report or to save."""
        super().__exit__(kind, error, trace)
        if error is not None and self._was_asleep() and (first := self._run_failure()) is not None:
            self._leave(first, self._listening)

    def _listen(self) -> None:
        """In a thread of its own: answer the others' roll calls, and leave once the run has ended without this rank."""
        while not self._over.wait(INTERVAL):
            asleep, self._listened_at = self._was_asleep(), monotonic()
            if (first := self._run_failure()) is not None:
                # a main thread to which an error comes reports it by itself; one that hangs, or was stopped until
                # now, must do nothing more
                if asleep or self._answered or not self._over.wait(_OWN_REPORT_TIMEOUT):
                    self._leave(first, self._listening)
                return
            with suppress(RuntimeError):  # the store has gone just now: the next look tells
                if self._store_lives and (number := self._listening.last_call()) != self._answered:
                    self._answer(number)
                    self._answered = number  # only now: where the store goes meanwhile, no stacks were written

    def _was_asleep(self) -> bool:
        """Has this process not run for a while, so lately that the others may have ended the run without it?"""
        now = monotonic()
        self._woke_at = now if now - self._listened_at > _ASLEEP_AFTER else self._woke_at
        return now - self._woke_at < _CATCH_UP_TIMEOUT

    def _run_failure(self) -> Failure | None:
        """How the run ended without this rank; None: it goes on, as far as this rank can know."""
        try:
            if self._store_lives and (first := failure.read_first_failure(self._listening.store)) is not None:
                return first
        except RuntimeError:
            if self._launch.rank0_serves_store:
                return Failure(None, time.time(), "rank 0 is gone, and the store that it served", _NO_REPORTER)
            self._store_lives = False  # the launcher is gone with it, but not the ranks: they save and stop
        # the store that a stopped process serves takes no claim meanwhile; the run's folder does
        return self._failure_in_folder() if self._was_asleep() else None

    def _failure_in_folder(self) -> Failure | None:
        """The failure of this start in status.json, if any; the rank that wrote it has reported it."""
        status = read_status(self._folder)
        if status is None or status["state"] != "failed" or status == self._status_before:
            return None
        return Failure(status["root_rank"], status["time"], str(status["reason"]), _NO_REPORTER)

    def _answer(self, number: int) -> None:
        progress, (line, waits) = self._progress(), current_line(self._main_thread)
        self._listening.answer(number, RollCallAnswer(progress.step, progress.phases, line, waits))
        self._log_stacks("the ranks ask each other who holds up the run")

    def _report_after(self, progress: RankProgress, reports: int) -> float:
        """When to ask the others: now and then, and when the time is up."""
        return min(progress.timeout, progress.ask_after * (reports + 1))

    def _report_idle(self, progress: RankProgress, seconds: float) -> None:
        self._call_roll(f"; nothing has gone on for {seconds:.0f} s", seconds > progress.timeout)

    def _report_ignored_stop(self) -> None:
        self._call_roll(f"; {self._stop.reason}, and nothing could be saved", over=False)

    def _call_roll(self, when: str, over: bool) -> None:
        """Find out which rank hangs; leave if one does. The store may hang as well, and the disk: none is waited for.

        over: the time is up, and the run ends whoever it was; else only where a rank is certain to be stopped.
        """
        if over:
            failure.exit_after(_EXIT_TIMEOUT)
        try:
            first = with_timeout(_STORE_TIMEOUT, partial(self._find_failure, when, over))
        except TimeoutError:  # a store answers even while a thread of its process is busy
            first = self._blame_store(when)
        except RuntimeError:  # the store went with the launcher: the run is asked to stop, and may still save
            first = None
        if over or first is not None:
            self._leave(first or self._blame_store(when), self._calling)

    def _find_failure(self, when: str, over: bool) -> Failure | None:
        """The failure with which the run ends, by the answers of all ranks; None: it goes on."""
        calling, size = self._calling, self._launch.world_size
        if not calling.call(number := self._answered + 1):
            # another rank reads the answers to this call: what it claims is the failure
            first = poll(lambda: failure.read_first_failure(calling.store), _ANSWER_TIMEOUT + INTERVAL)
        else:
            answers = calling.collect(number, _ANSWER_TIMEOUT)
            blamed, what = describe_blocking_rank(answers, size)
            # a rank that does not answer may hold the interpreter's lock for long, as it writes a large file
            if not over and not any(calling.is_stopped(rank) for rank in range(size) if rank not in answers):
                if self._stop.raised:
                    self._write_reason(what, blamed)
                return None
            first = failure.claim_first_failure(calling.store, self._launch, what + when, blamed)
            if first.reporter == self._launch.rank:
                lines = f"{format_answers(answers, size, blamed)}\nAll threads of each rank: logs/rank-N.log;"
                lines += " its last collectives: logs/collectives-N.json"
                failure.report_failure(first, f"{first.reason}\n{lines}", self._launch, self._folder)
        return first

    def _blame_store(self, when: str) -> Failure:
        """The failure where the store does not answer, or the rank that reads the answers does not."""
        # rank 0 may have reported one, and be gone with its store before this rank had asked all
        if (first := self._failure_in_folder()) is not None:
            return first
        rank, reporter = (0, 1) if self._launch.rank0_serves_store else (None, 0)
        whose = "the store does not answer" if rank is None else "rank 0 does not answer, nor the store that it serves"
        first = Failure(rank, time.time(), f"{whose}: its process is stopped, or its machine is gone{when}", reporter)
        if reporter == self._launch.rank:
            text = f"{first.reason}\n  rank {reporter}: {self._log_stacks(first.reason)}"
            failure.report_failure(first, text, self._launch, self._folder)
        return first

    def _leave(self, first: Failure, roll_call: RollCall) -> NoReturn:
        """End the process from this thread: the main one may never come back."""
        failure.exit_after(_EXIT_TIMEOUT)
        with suppress(OSError, RuntimeError):  # a full disk; a store that is gone, or does not answer
            if first.reporter == self._launch.rank:
                # the thread that answered may still be writing this rank's stacks
                poll(lambda: self._answered or None, INTERVAL)
            else:
                # stacks are in the log already where a call was answered
                line = current_line(self._main_thread)[0] if self._answered else self._log_stacks(first.reason)
                failure.log_followup(first, self._launch, self._folder, line)
            # the rank that reports may not have been able to; or a main thread has got further meanwhile
            if (read_status(self._folder) or {}).get("state") == "running":
                mark_failed(self._folder, first.reason, first.rank)
            with_timeout(_FAREWELL_TIMEOUT, partial(roll_call.leave, first.rank))
        failure.exit_process(1)


def make_watchdog(launch: Launch, folder: Path, stop: StopRequest, progress: Callable[[], RankProgress]) -> Watchdog:
    """The watchdog of the only process, or of this rank of several."""
    return (Watchdog if launch.world_size == 1 else RankWatchdog)(launch, folder, stop, progress)
