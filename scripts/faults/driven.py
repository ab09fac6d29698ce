"""The same command, again and again, until the run is complete; and faults that strike it meanwhile."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from getpass import getuser
from pathlib import Path
from random import Random
from typing import Any, TypeVar

from scripts.faults.strikes import KILLS, LOOK, STRIKES, Scene, checkpoints, gone, workers
from tests.run import Command, lines, status
from trainer import Refusal

T = TypeVar("T")
PATIENCE = 300.0  # seconds for anything that is waited for
MOMENT = 5.0  # seconds, at most, from the line of a step to the fault after it
CACHE = f"torchinductor_{getuser()}"  # of torch, for all programs of this user; no run's own
TRIES = 3  # starts in a row that may end without a new step


class Over(Exception):
    """The run is complete."""


class Stuck(Exception):
    """The same command does not get the run any further; the message holds what it said last."""


@dataclass(frozen=True)
class Blow:
    """A fault that has struck."""

    kind: str
    lost: float  # seconds from the fault until the step that had been reached was reached again
    again: int  # steps that were done twice


@dataclass
class Driven:
    """One run: how it is started, and what became of it."""

    start: Callable[[], Command]
    processes: int
    folder: Path
    inside: Path
    random: Random
    starts: int = 0
    blows: list[Blow] = field(default_factory=list)
    outlived: int = 0  # processes that had to be killed, because they did not end with their command
    litter: list[str] = field(default_factory=list)  # temporary files that nobody who was killed can have left
    seconds: float = 0.0  # from the first command to the end of the last
    workers: bool = False  # were there data workers after the first step?
    _reached: int = -1  # the step at the end of the command before
    _fruitless: int = 0  # commands in a row that have ended without a new step
    _killed: bool = False  # was something of the present command killed? It cannot tidy up

    def run(self, faults: Sequence[tuple[int, str]] = ()) -> None:
        """Go on until the run is complete, while every fault strikes once. Stuck where it does not get there."""
        began = time.monotonic()
        self._start()
        try:
            self._until(lambda: self.step() or None, "the first step")
            self.workers = bool(workers(self.command))
            for step, kind in faults:
                self._suffer(step, kind)
            self._until(lambda: None, "the end of the run")
        except Over:
            self.seconds = time.monotonic() - began
        finally:
            self.command.kill()

    def step(self) -> int:
        """The last step that was logged."""
        return max((line["step"] for line in lines(self.folder, "train")), default=0)

    def status(self) -> dict[str, Any]:
        """status.json; empty while there is none."""
        try:
            return status(self.folder)
        except (OSError, ValueError):
            return {}

    def _suffer(self, step: int, kind: str) -> None:
        """Let one fault strike, and wait until the run is further than before."""
        self._until(lambda: self.step() >= step or None, f"step {step}")
        # the newest checkpoint is damaged, and the one before is used
        self._until(lambda: kind != "flip" or len(checkpoints(self.folder)) > 1 or None, "two checkpoints")
        # at any moment of a step, which may be one of a save: lines are always written at the same one
        times = [line["time"] for line in lines(self.folder, "train")][-2:]
        time.sleep(self.random.random() * min(MOMENT, max(0.0, times[-1] - times[0])))
        ranks = self._until(self._ranks, "all ranks")
        attempt, struck, self._killed = self.status()["attempt"], time.time(), kind in KILLS
        STRIKES[kind][1](Scene(self.command, ranks, self.folder, self.inside, self.random))
        self._until(lambda: all(map(gone, ranks)) or None, f"what follows from {kind}")
        reached = self.step()
        said = self._until(lambda: self._attempt(attempt + 1), "the next attempt")
        caught_up = self._until(lambda: self._line(reached, said["time"]), f"step {reached} again")
        self.blows.append(Blow(kind, caught_up - struck, reached - said["resume_step"]))

    def _ranks(self) -> list[int] | None:
        """The processes of all ranks, where all are there."""
        if self.processes == 1:
            return [self.command.pid] if self.command.process.poll() is None else None
        try:
            return [self.command.rank(rank) for rank in range(self.processes)]
        except (AssertionError, OSError):
            return None

    def _attempt(self, number: int) -> dict[str, Any] | None:
        """What status.json says as soon as this attempt runs."""
        said = self.status()
        return said if said.get("attempt", 0) >= number and said["state"] == "running" else None

    def _line(self, step: int, since: float) -> float | None:
        """When the line of this step or a later one was logged, of those that are not older than that."""
        times = (line["time"] for line in lines(self.folder, "train") if line["step"] >= step and line["time"] >= since)
        return next(times, None)

    def _until(self, look: Callable[[], T | None], what: str) -> T:
        """Look until there is something to see; where the command ends meanwhile, the same command again."""
        deadline = time.monotonic() + PATIENCE
        while True:
            ended = self.command.process.poll() is not None
            if (found := look()) is not None:
                return found
            if ended:
                self._again()
            if time.monotonic() > deadline:
                raise Stuck(f"{what} did not come within {PATIENCE:g} s; it says:\n{self.command.screen[-2000:]}")
            time.sleep(LOOK)

    def _again(self) -> None:
        """What a user does. Refusal where the run says that it cannot work."""
        ended = self.command.end()
        self.outlived += len(ended.left)
        own = [path.name for path in self.command.temporary.iterdir() if path.name != CACHE]
        self.litter += [] if self._killed else own
        if self.status().get("state") == "completed":
            raise Over
        if ended.code == 2:
            raise Refusal(ended.out.strip())
        further, self._reached = self.step() > self._reached, max(self._reached, self.step())
        self._fruitless = 0 if further else self._fruitless + 1
        if self._fruitless >= TRIES:
            raise Stuck(f"{TRIES} starts without a new step; the last one says:\n{ended.out[-2000:]}")
        self._start()

    def _start(self) -> None:
        self.command: Command = self.start()
        self.starts, self._killed = self.starts + 1, False
