"""sweep.jsonl: what became of each run of a sweep; and a table of them, the best first."""

from __future__ import annotations

import contextlib
import json
import math
from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from trainer.configuration.multirun import Trial, shorten_floats
from trainer.launch.failure import STOPPED
from trainer.launch.safe_files import replace_file
from trainer.launch.validation import DamagedFile, read_json
from trainer.messages import format_count, format_duration, format_number
from trainer.records.metrics_reader import metric_rank, metric_score, metrics_of, read_lines, tie_break_loss
from trainer.records.run_folder import EnvironmentFields

if TYPE_CHECKING:
    from rich.table import Table


RESULTS_FILE = "sweep.jsonl"
_STATES = {0: "completed", STOPPED: "preempted"}  # as in status.json; whatever else a run ends with: failed


@dataclass(frozen=True)
class Outcome:
    """How one run ended last. The keys of a line."""

    folder: str  # its name in the sweep's folder
    words: list[str]  # the command line, without the place
    values: dict[str, str]  # those of them that differ
    state: str  # completed, preempted or failed
    exit_code: int
    figure: str | None  # that marks the best checkpoint; a minus sign: smaller is better
    best: float | None  # of all evaluations
    best_step: int | None
    last: dict[str, float]  # the figures of the last evaluation
    seconds: float  # from start to end, starts before this one included
    reason: str | None  # why it failed
    best_loss: float | None = None  # of the best evaluation; it decides between runs of equal figures

    @property
    def name(self) -> str:
        """What the figure is called, without a sign."""
        return (self.figure or "").removeprefix("-")

    @property
    def score(self) -> float:
        """Larger is better, of runs with the same figure; minus infinity where there is none."""
        return self.rank[0]

    @property
    def rank(self) -> tuple[float, float]:
        """The same, and where it is equal the loss."""
        figure = self.figure or ""
        return metric_rank({tie_break_loss(figure): self.best_loss, self.name: self.best}, figure)


class SweepResults:
    """All outcomes of a folder. The file is replaced in one step at each, so that it is never torn."""

    def __init__(self, folder: Path) -> None:
        self.folder, self._path = folder, folder / RESULTS_FILE
        self._all: dict[str, Outcome] = {}
        for line in read_lines(self._path):
            with contextlib.suppress(TypeError):  # written by hand, or by another version
                outcome = Outcome(**line)
                self._all[outcome.folder] = outcome

    def all(self) -> list[Outcome]:
        """Every outcome, in the order in which they came."""
        return list(self._all.values())

    def of(self, trial: Trial) -> Outcome | None:
        """What became of a run; None where it has not ended yet, or where other words ended in its folder."""
        outcome = self._all.get(trial.name)
        return outcome if outcome is not None and outcome.words == list(trial.words) else None

    def left(self, trials: Iterable[Trial]) -> list[Trial]:
        """Those that are not completed."""
        return [trial for trial in trials if (outcome := self.of(trial)) is None or outcome.state != "completed"]

    def forget(self, trials: Iterable[Trial]) -> None:
        """As if these had never been run: they begin anew."""
        gone = [self._all.pop(trial.name, None) for trial in trials]
        if any(gone):
            self._write()

    def add(self, trial: Trial, code: int, seconds: float, reason: str | None) -> Outcome:
        """Write down how a run ended, with the figures that it has left in its folder."""
        before = self.of(trial)
        name, best, last = _read_metrics(self.folder / trial.name)
        outcome = Outcome(
            folder=trial.name,
            words=list(trial.words),
            values=trial.values,
            state=_STATES.get(code, "failed"),
            exit_code=code,
            figure=name,
            best=best.get((name or "").removeprefix("-")),
            best_step=best.get("step"),
            last=last,
            seconds=round(seconds + (before.seconds if before else 0.0), 2),
            reason=reason,
            best_loss=best.get(tie_break_loss(name or "")),
        )
        self._all.pop(trial.name, None)  # to the end: it has ended last
        self._all[trial.name] = outcome
        self._write()
        return outcome

    def _write(self) -> None:
        lines = [json.dumps(asdict(outcome), ensure_ascii=False) + "\n" for outcome in self._all.values()]
        replace_file(self._path, "".join(lines))


def _read_metrics(run: Path) -> tuple[str | None, dict[str, Any], dict[str, float]]:
    """The name of the figure that counts in a run, its best evaluation, and the figures of the last one."""
    name = None
    with contextlib.suppress(OSError, DamagedFile):  # it was refused before it had one
        name = read_json(run / "environment.json", EnvironmentFields)[0].get("best")
    figure = name or ""
    best: dict[str, Any] = {}
    last: dict[str, Any] = {}
    for line in read_lines(run / "metrics.jsonl", word=b'"eval"'):
        if line.get("kind") == "eval":
            last = line
            if metric_score(line, figure) > -math.inf and metric_rank(line, figure) >= metric_rank(
                best, figure
            ):  # of equals the newer
                best = line
    return name, best, metrics_of(last)


_MAX_ROWS = 30  # that are shown
_MAX_WIDTH = 24  # characters of a value
_STATE_WORDS = {"preempted": "stopped", "completed": ""}  # what is said of most would only fill the screen


def format_table(outcomes: Sequence[Outcome]) -> str:
    """The runs as lines for the terminal that is there, as wide as it is: values, best figure, time, folder."""
    from rich.console import Console

    # the best first; those without a figure last
    ranked = sorted(outcomes, key=lambda one: (one.figure or "~", *(-value for value in one.rank)))
    screen = Console(highlight=False, emoji=False, markup=False)
    with screen.capture() as captured:
        screen.print(_make_table(ranked[:_MAX_ROWS], {one.figure or "" for one in ranked} - {""}))
    lines = [line.rstrip() for line in captured.get().splitlines()]
    more = (
        [f"  … and {format_count(len(ranked) - _MAX_ROWS, 'run')} more, in {RESULTS_FILE}"]
        if len(ranked) > _MAX_ROWS
        else []
    )
    return "\n".join([*lines, *more])


def _make_table(ranked: Sequence[Outcome], names: set[str]) -> Table:
    """One row a run. names: the figures by which they are compared, as a rule one."""
    from rich.table import Table
    from rich.text import Text

    # the values may be cut where the terminal ends, what was measured may not
    drawn = Table(box=None, pad_edge=False, padding=(0, 2, 0, 0))
    keys, one_name = list(dict.fromkeys(key for one in ranked for key in one.values)), len(names) == 1
    for heading in short_headings(keys):
        drawn.add_column(heading, overflow="ellipsis", max_width=_MAX_WIDTH)
    drawn.add_column(ranked[0].name if one_name else "best figure", justify="right", no_wrap=True)
    for heading in ("time", "folder", ""):
        drawn.add_column(heading, justify="right" if heading == "time" else "left", no_wrap=True)
    for place, one in enumerate(ranked):
        # where runs of several figures stand together none is the best of all
        first = place == 0 and one_name and one.best is not None
        figure = "–" if one.best is None else f"{'' if one_name else one.name + ' '}{format_number(one.best)}"
        state = "best" if first else _STATE_WORDS.get(one.state, one.state)
        cells = [
            *(shorten(shorten_floats(one.values.get(key, ""))) for key in keys),
            figure,
            format_duration(one.seconds),
        ]
        cells += [f"{one.folder.split('_')[0]}_*", state]
        drawn.add_row(*map(Text, cells), style="bold" if first else "")
    return drawn


def format_best(outcomes: Sequence[Outcome], folder: Path) -> list[str]:
    """Where the best run lies; nothing where none has a figure, or where they have several."""
    best = max(outcomes, key=lambda one: one.rank, default=None)
    if best is None or best.best is None or len({one.figure for one in outcomes if one.figure}) > 1:
        return []
    return [f"best        {best.name} {format_number(best.best)} at step {best.best_step}: {folder / best.folder}"]


def short_headings(keys: Sequence[str]) -> list[str]:
    """The last part of each key where no other ends so: `lr` for optimizer.lr."""
    last = [key.rpartition(".")[2] for key in keys]
    seen = Counter(last)
    return [name if seen[name] == 1 else key for name, key in zip(last, keys, strict=True)]


def shorten(value: str) -> str:
    """A value of at most 24 characters: of a longer one the beginning and the end, which says more of a path."""
    return value if len(value) <= _MAX_WIDTH else f"{value[:7]}…{value[-_MAX_WIDTH + 8 :]}"
