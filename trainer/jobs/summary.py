"""The table at the end of a run: its last and its best figures, and where the time of this start went."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from trainer.jobs.goodput_report import cost_lines, costs, spoken
from trainer.jobs.run_parts import PreparedRun
from trainer.launch.run_status import read_status
from trainer.loop.trainer import Trainer
from trainer.messages import format_count, format_number
from trainer.records.checkpoint.manager import Checkpoints
from trainer.records.checkpoint.store import committed, winner
from trainer.records.console import figure
from trainer.records.metrics_reader import figures, last_of
from trainer.strategies.step_timing import STEP_PHASES, StepTimer

_SHOWN = 12  # figures of an evaluation
_LABEL, _CELL = 24, 11  # columns of the screen; three cells behind a label fit into 80


def summary(run: PreparedRun, trainer: Trainer, whole: float) -> list[str]:
    """What the main rank says of the run; whole: seconds since this start of it began."""
    folder, watch, step = run.folder.path, trainer.placed.watch, trainer.progress.step
    # not the step less those that were done here: some may have been done twice
    before = (read_status(folder) or {}).get("resume_step", 0)
    return [
        *figure_lines(folder / "metrics.jsonl", trainer.checkpoints),
        *time_lines(watch, whole, before, step),
        *throughput_lines(watch, whole, trainer.stream.global_batch),
        *(cost_lines(said) if (said := costs(folder)) else []),
        *notes(before, ahead=run.strategy.device.type != "cpu"),
    ]


def figure_lines(path: Path, checkpoints: Checkpoints) -> list[str]:
    """The figures of the last evaluation, beside them those of the best checkpoint; and the last training loss."""
    last, best = last_of(path, ["train", "eval"]), winner(committed(checkpoints.folder), checkpoints.best)
    evaluated, chosen = last.get("eval", {}), best.figures if best else {}
    rows: list[Sequence[str]] = []
    if evaluated:
        rows.append(("  after step", str(evaluated["step"]), *([str(best.step)] if best else [])))
    names = list(figures(evaluated))
    for name in names[:_SHOWN]:
        rows.append((f"  {name}", *(figure(name, of[name]) for of in (evaluated, chosen) if name in of)))
    if len(names) > _SHOWN:
        rows.append((f"  and {len(names) - _SHOWN} more in metrics.jsonl",))
    if "train" in last:
        rows.append(("  training loss", format_number(last["train"]["loss_mean"])))
    return _aligned([("metrics", "last", *(["best"] if chosen else [])), *rows]) if rows else []


def time_lines(watch: StepTimer, whole: float, before: int, step: int) -> list[str]:
    """Where the time of this start went, which began after the step `before` and ends with this step."""
    # what no lap has taken is the beginning: data, network, joining, and the first step, which is like no other one
    spent = {"start": whole - sum(watch.laps.values()), **watch.laps}
    rows: list[Sequence[str]] = [
        (f"time, steps {before + 1}-{step}" if watch.steps else "time", "time", "share", "per step")
    ]
    for name, seconds in spent.items():
        # what is next to nothing is left out
        if seconds >= whole / 200:
            each = [spoken(seconds / watch.measured)] if name in STEP_PHASES else []
            rows.append((f"  {name}", spoken(seconds), f"{100 * seconds / whole:.0f} %", *each))
    return _aligned([*rows, ("  total", spoken(whole), "100 %")])


def throughput_lines(watch: StepTimer, whole: float, batch: int) -> list[str]:
    """Samples a second, over all ranks: of the steps alone, and of all the time."""
    if not watch.measured:
        return []
    # both are counted by the host: work that a GPU has still to do is seen by the second alone
    steady = watch.measured * batch / sum(watch.spent[name] for name in STEP_PHASES)
    return [f"throughput  {steady:,.0f} samples/s in the steps, {watch.steps * batch / whole:,.0f} overall"]


def notes(before: int, ahead: bool) -> list[str]:
    """What the times do not say. before: the steps of earlier starts; ahead: the host runs ahead of a GPU."""
    return [
        *(
            [
                "note        the table is of this start only;"
                f" earlier starts did the first {format_count(before, 'step')}"
            ]
            if before
            else []
        ),
        *(
            ["note        the time is the host's, which runs ahead of the GPU; profile=true shows both"]
            if ahead
            else []
        ),
    ]


def _aligned(rows: Sequence[Sequence[str]]) -> list[str]:
    """Rows with labels on the left, and their cells below each other."""
    width = max(_LABEL, *(len(row[0]) for row in rows))
    return ["".join([f"{row[0]:<{width}}", *(f"{cell:>{_CELL}}" for cell in row[1:])]).rstrip() for row in rows]
