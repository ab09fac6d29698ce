"""What stands on the screen while the runs of a sweep are under way."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager
from pathlib import Path
from typing import IO, Protocol

from trainer.configuration.multirun import Trial
from trainer.launch.safe_files import make_folder, open_file
from trainer.messages import format_duration, format_number
from trainer.sweeps.device_shares import DeviceShare
from trainer.sweeps.results import Outcome

OUTPUT_FOLDER = "output"  # folder of what the runs say, where several are under way


class SweepScreen(Protocol):
    """Hears when a run is started, and how it ended."""

    def started(self, trial: Trial, share: DeviceShare) -> AbstractContextManager[IO[bytes] | None]:
        """Inside, the file that the run is to speak into; None: the screen."""

    def ended(self, outcome: Outcome) -> None:
        """A run has ended."""


class SequentialScreen:
    """One run at a time has the screen for itself."""

    def __init__(self, total: int) -> None:
        self._total, self._count = total, 0

    @contextmanager
    def started(self, trial: Trial, share: DeviceShare) -> Iterator[None]:
        """A heading."""
        self._count += 1
        print(f"\nrun {self._count} of {self._total}   {trial.name}", flush=True)
        yield None  # it speaks where this process does

    def ended(self, outcome: Outcome) -> None:
        """It has said so itself."""


class ParallelScreen:
    """Several at once: each speaks into a file, and the screen has a line as it is started and one as it ends."""

    def __init__(self, folder: Path, at_once: int) -> None:
        self._folder = folder / OUTPUT_FOLDER
        make_folder(self._folder)
        print(f"            {at_once} at the same time; their output is in {self._folder}", flush=True)

    @contextmanager
    def started(self, trial: Trial, share: DeviceShare) -> Iterator[IO[bytes]]:
        """A file that goes on where an earlier start of this run stopped."""
        where = f"   on {share.label}" if share.label else ""
        print(f"started     {trial.name}{where}", flush=True)
        # the run keeps it open by itself
        with open_file(self._folder / f"{trial.name}.log", "ab") as file:
            yield file

    def ended(self, outcome: Outcome) -> None:
        """How, with the figure that counts."""
        best = f"   {outcome.name} {format_number(outcome.best)}" if outcome.best is not None else ""
        why = f"   {outcome.reason}" if outcome.reason else ""
        print(f"{outcome.state:<12}{outcome.folder}{best}   {format_duration(outcome.seconds)}{why}", flush=True)
