"""sweep.jsonl: how each run of a sweep ended; and the table of them, the best first."""

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
from trainer.launch.typed_values import DamagedFile, read_json
from trainer.messages import format_count, format_duration, format_number
from trainer.records.metrics_reader import metric_rank, metric_score, metrics_of, read_lines, tie_break_loss
from trainer.records.start_files import EnvironmentFields

if TYPE_CHECKING:
    from rich.table import Table


RESULTS_FILE = "sweep.jsonl"
_STATES = {0: "completed", STOPPED: "preempted"}  # as in status.json; whatever else a run ends with: failed


@dataclass(frozen=True)
class Outcome:
    """How one run ended last. Its fields are the keys of a line."""

    folder: str  # its name in the sweep's folder
    words: list[str]  # the command line, without the folder
    values: dict[str, str]  # those of them that differ
    state: str  # completed, preempted or failed
    exit_code: int
    figure: str | None  # the metric that marks the best checkpoint; a minus sign: smaller is better
    best: float | None  # of all evaluations
    best_step: int | None
    last: dict[str, float]  # the metrics of the last evaluation
    seconds: float  # from start to end, starts before this one included
    reason: str | None  # why it failed
    best_loss: float | None = None  # of the best evaluation; it decides between runs of equal metrics

    @property
    def name(self) -> str:
        """The name of the metric, without a sign."""
        return (self.figure or "").removeprefix("-")

    @property
    def rank(self) -> tuple[float, float]:
        """Larger is better, of runs with the same metric; then the loss, which decides where metrics are equal."""
        metric = self.figure or ""
        return metric_rank({tie_break_loss(metric): self.best_loss, self.name: self.best}, metric)


class SweepResults:
    """All outcomes of a sweep, in the folder's file, which each `add` replaces in one step: it is never torn."""

    def __init__(self, folder: Path) -> None:
        self.folder, self._path = folder, folder / RESULTS_FILE
        self._outcomes: dict[str, Outcome] = {}
        for line in read_lines(self._path):
            with contextlib.suppress(TypeError):  # written by hand, or by another version
                outcome = Outcome(**line)
                self._outcomes[outcome.folder] = outcome

    def of(self, trial: Trial) -> Outcome | None:
        """How a run ended; None where it has not yet, or where a run of other overrides ended in its folder."""
        outcome = self._outcomes.get(trial.name)
        return outcome if outcome is not None and outcome.words == list(trial.words) else None

    def left(self, trials: Iterable[Trial]) -> list[Trial]:
        """Those that are not completed."""
        return [trial for trial in trials if (outcome := self.of(trial)) is None or outcome.state != "completed"]

    def forget(self, trials: Iterable[Trial]) -> None:
        """Remove the outcomes of these runs, so that they begin anew."""
        forgotten = [self._outcomes.pop(trial.name, None) for trial in trials]
        if any(forgotten):
            self._write()

    def add(self, trial: Trial, code: int, seconds: float, reason: str | None) -> Outcome:
        """Write down how a run ended, with the metrics that it has left in its folder."""
        before = self.of(trial)  # its seconds count too: the run has gone on from there
        metric, best, last = _read_metrics(self.folder / trial.name)
        outcome = Outcome(
            folder=trial.name,
            words=list(trial.words),
            values=trial.values,
            state=_STATES.get(code, "failed"),
            exit_code=code,
            figure=metric,
            best=best.get((metric or "").removeprefix("-")),
            best_step=best.get("step"),
            last=last,
            seconds=round(seconds + (before.seconds if before else 0.0), 2),
            reason=reason,
            best_loss=best.get(tie_break_loss(metric or "")),
        )
        self._outcomes.pop(trial.name, None)  # so that it comes to the end of the file: it has ended last
        self._outcomes[trial.name] = outcome
        self._write()
        return outcome

    def _write(self) -> None:
        lines = [json.dumps(asdict(outcome), ensure_ascii=False) + "\n" for outcome in self._outcomes.values()]
        replace_file(self._path, "".join(lines))


def _read_metrics(run: Path) -> tuple[str | None, dict[str, Any], dict[str, float]]:
    """The metric that marks the best checkpoint of a run, its best evaluation, and the metrics of the last one."""
    metric = None
    with contextlib.suppress(OSError, DamagedFile):  # it was refused before it had one
        metric = read_json(run / "environment.json", EnvironmentFields)[0].get("best")
    best: dict[str, Any] = {}
    last: dict[str, Any] = {}
    sign_and_name = metric or ""
    for line in read_lines(run / "metrics.jsonl", needle=b'"eval"'):
        if line.get("kind") == "eval":
            last, has_score = line, metric_score(line, sign_and_name) > -math.inf
            # of equal ones the newer
            if has_score and metric_rank(line, sign_and_name) >= metric_rank(best, sign_and_name):
                best = line
    return metric, best, metrics_of(last)


_MAX_ROWS = 30  # that are shown
_MAX_WIDTH = 24  # characters of a value
_STATE_CELLS = {"preempted": "stopped", "completed": ""}  # the state of most runs would only fill the screen


def format_table(outcomes: Sequence[Outcome]) -> str:
    """The runs as lines, as wide as the terminal is: values, best metric, time, folder."""
    from rich.console import Console

    # the best first; those without a metric last
    ranked = sorted(outcomes, key=lambda outcome: (outcome.figure or "~", *(-value for value in outcome.rank)))
    console = Console(highlight=False, emoji=False, markup=False)
    # rich lays the table out for the width of this terminal; the caller prints it
    with console.capture() as captured:
        metrics = {outcome.figure for outcome in ranked if outcome.figure}
        console.print(_make_table(ranked[:_MAX_ROWS], one_metric=len(metrics) == 1))
    lines = [line.rstrip() for line in captured.get().splitlines()]
    more = (
        [f"  … and {format_count(len(ranked) - _MAX_ROWS, 'run')} more, in {RESULTS_FILE}"]
        if len(ranked) > _MAX_ROWS
        else []
    )
    return "\n".join([*lines, *more])


def _make_table(ranked: Sequence[Outcome], one_metric: bool) -> Table:
    """A row for each run. one_metric: all runs are compared by the same metric, as a rule."""
    from rich.table import Table
    from rich.text import Text

    table = Table(box=None, pad_edge=False, padding=(0, 2, 0, 0))
    # where the terminal ends, values may be cut; measurements may not
    keys = list(dict.fromkeys(key for outcome in ranked for key in outcome.values))
    for heading in short_headings(keys):
        table.add_column(heading, overflow="ellipsis", max_width=_MAX_WIDTH)
    table.add_column(ranked[0].name if one_metric else "best metric", justify="right", no_wrap=True)
    for heading in ("time", "folder", ""):
        table.add_column(heading, justify="right" if heading == "time" else "left", no_wrap=True)
    for place, outcome in enumerate(ranked):
        # where runs are compared by several metrics, none is the best of all
        is_best = place == 0 and one_metric and outcome.best is not None
        metric = "" if one_metric else f"{outcome.name} "
        best = "–" if outcome.best is None else f"{metric}{format_number(outcome.best)}"
        state = "best" if is_best else _STATE_CELLS.get(outcome.state, outcome.state)
        cells = [*(shorten(shorten_floats(outcome.values.get(key, ""))) for key in keys), best]
        cells += [format_duration(outcome.seconds), f"{outcome.folder.split('_')[0]}_*", state]
        table.add_row(*map(Text, cells), style="bold" if is_best else "")
    return table


def format_best(outcomes: Sequence[Outcome], folder: Path) -> list[str]:
    """A line with the folder of the best run; nothing where none has a metric, or where they have several."""
    best = max(outcomes, key=lambda outcome: outcome.rank, default=None)
    if best is None or best.best is None or len({outcome.figure for outcome in outcomes if outcome.figure}) > 1:
        return []
    return [f"best        {best.name} {format_number(best.best)} at step {best.best_step}: {folder / best.folder}"]


def short_headings(keys: Sequence[str]) -> list[str]:
    """The last part of each key where no other ends so: `lr` for optimizer.lr."""
    # optimizer.lr and schedule.lr keep their whole names beside each other
    names = [key.rpartition(".")[2] for key in keys]
    times = Counter(names)
    return [name if times[name] == 1 else key for name, key in zip(names, keys, strict=True)]


def shorten(value: str) -> str:
    """A value of at most 24 characters: of a longer one the beginning and the end, which says more of a path."""
    return value if len(value) <= _MAX_WIDTH else f"{value[:7]}…{value[-_MAX_WIDTH + 8 :]}"
