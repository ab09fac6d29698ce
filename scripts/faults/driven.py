"""The same command, again and again, until the run is complete; and faults that strike it meanwhile."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from random import Random
from typing import Any, TypeVar

from scripts.faults.blow import Blow, Survived
from scripts.faults.command import LOOK, Command, gone
from scripts.faults.disk import Disk
from scripts.faults.left import Left
from scripts.faults.plan import Fault
from scripts.faults.strikes import CHECKPOINTS, MAY_GO_ON, STRIKES, Scene
from trainer.messages import Refusal

T = TypeVar("T")
PATIENCE = 300.0  # seconds for anything that is waited for
MOMENT = 5.0  # seconds, at most, from the line of a step to the fault after it
TRIES = 3  # starts in a row that may end without a new step


class Over(Exception):
    """The run is complete."""


class Stuck(Exception):
    """The same command does not get the run any further; the message holds what it said last."""


@dataclass
class Driven:
    """One run: how it is started, and what became of it."""

    start: Callable[[int], Command]  # the number of the start, from 0 → the command under way
    left: Left
    disk: Disk = field(default_factory=Disk)
    inside: Path = Path()
    random: Random = field(default_factory=Random)
    starts: int = 0
    blows: list[Blow | Survived] = field(default_factory=list)
    outlived: int = 0  # processes that had to be killed, because they did not end with their command
    seconds: float = 0.0  # from the first command to the end of the last
    workers: bool = False  # were there data workers after the first step?
    _reached: int = -1  # the step at the end of the command before
    _fruitless: int = 0  # commands in a row that have ended without a new step

    def run(self, faults: Sequence[Fault] = ()) -> None:
        """Go on until the run is complete, while every fault strikes once. Stuck where it does not get there."""
        began = time.monotonic()
        self._start()
        try:
            self._until(lambda: self.left.step() or None, "the first step")
            self.workers = bool(self.command.workers())
            for fault in faults:
                self._suffer(fault)
            self._until(lambda: None, "the end of the run")
        except Over:
            self.seconds = time.monotonic() - began
        finally:
            self.command.kill()

    def _suffer(self, fault: Fault) -> None:
        """Let one fault strike, and wait until the run is further than before."""
        left, wanted = self.left, CHECKPOINTS.get(fault.kind, 0)
        self._until(lambda: left.step() >= fault.step or None, f"step {fault.step}")
        self._until(lambda: len(left.checkpoints()) >= wanted or None, f"{wanted} checkpoints")
        # at any moment of a step, which may be one of a save: lines are always written at the same one
        time.sleep(self.random.random() * min(MOMENT, left.pace()))
        ranks, attempt = list(self.command.ranks().values()), left.status()["attempt"]
        struck = time.time()
        STRIKES[fault.kind](Scene(self.command, left, self.disk, self.inside, self.random))
        over = time.time()
        ended = self._until(lambda: self._answer(fault.kind, ranks, over), f"what follows from {fault.kind}")
        if not ended:
            self.blows.append(Survived(fault))
            return
        reached = left.step()
        # what each phase ends with, by the run's own clock
        status = self._until(lambda: self._attempt(attempt + 1), "the next attempt")
        resumed, joined = status["resume_step"], status["time"]
        first = self._until(lambda: self._line(resumed + 1, joined), "its first line")
        caught_up = self._until(lambda: self._line(reached, joined), f"step {reached} again")
        self.blows.append(Blow(fault, reached, struck, ended, resumed, joined, first, caught_up))

    def _answer(self, kind: str, ranks: Sequence[int], since: float) -> float | None:
        """When all ranks have ended; 0 where they go on, which some faults let them; None: not known yet."""
        if all(map(gone, ranks)):
            return time.time()
        return 0.0 if kind in MAY_GO_ON and self._line(0, since) else None

    def _attempt(self, number: int) -> dict[str, Any] | None:
        """What status.json says as soon as this attempt runs."""
        said = self.left.status()
        return said if said.get("attempt", 0) >= number and said["state"] == "running" else None

    def _line(self, step: int, since: float) -> float | None:
        """When the first line of this step or a later one was logged, of those that are not older than that."""
        times = (line["time"] for line in self.left.lines() if line["step"] >= step and line["time"] >= since)
        return next(times, None)

    def _until(self, look: Callable[[], T | None], what: str) -> T:
        """Look until there is something to see; where the command ends meanwhile, the same command again."""
        deadline = time.monotonic() + PATIENCE
        while True:
            if ended := self.command.code is not None:
                self.outlived += len(self.command.leave())
            if (found := look()) is not None:
                return found
            if ended:
                self._again()
            if time.monotonic() > deadline:
                raise Stuck(f"{what} did not come within {PATIENCE:g} s; it says:\n{self.command.said()}")
            time.sleep(LOOK)

    def _again(self) -> None:
        """What a user does. Refusal where the run says that it cannot work."""
        if self.left.status().get("state") == "completed":
            raise Over
        if self.command.code == 2:
            raise Refusal(self.command.said().strip())
        further, self._reached = self.left.step() > self._reached, max(self._reached, self.left.step())
        self._fruitless = 0 if further else self._fruitless + 1
        if self._fruitless >= TRIES:
            raise Stuck(f"{TRIES} starts without a new step; the last one says:\n{self.command.said()}")
        self._start()

    def _start(self) -> None:
        self.command: Command = self.start(self.starts)
        self.starts += 1
