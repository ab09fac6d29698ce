"""Which row of a plan a run should use, and why."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

from trainer.jobs.plan.trial import EVALUATION
from trainer.messages import Refusal, format_seconds

PlanRow = Mapping[str, Any]  # as it stands in plan.json
LATE = "not tried in time (job.seconds)"  # why a strategy has no row


class RowChoice(NamedTuple):
    """The row to use, the next best one, and one line for people."""

    row: PlanRow
    second: PlanRow | None
    reason: str


def choose_row(
    rows: Sequence[PlanRow], refused: Mapping[str, str], free: float, spare: float, kept: str = ""
) -> RowChoice:
    """The first row, because simple strategies come first, of those that leave this part of the memory; else that fit.

    refused: why other strategies have no row. kept: a strategy that goes before all others. Refusal where none fits.
    """
    # another global batch would be another curve
    same = [row for row in rows if "loop.global_batch=" not in row["words"]] or rows
    fitting = [row for row in same if row["fits"]]
    late = [words.removeprefix("strategy=") for words, reason in refused.items() if reason == LATE]
    if not rows:
        raise Refusal("is not known, as no strategy could be planned")
    if not fitting and late:
        raise Refusal(
            f"nothing that was tried fits into {format_mib(free)} a process, and there was no time to try"
            f" {', '.join(late)}, which may fit: give the plan more (job.seconds), or name one of them"
        )
    if not fitting:
        least = min(same, key=lambda row: int(row["peak"]))
        nearest = f"nearest: {describe_row(least)}. {least['advice']}"
        raise Refusal(f"nothing fits into {format_mib(free)} a process; {nearest}")
    spacious = [row for row in fitting if row["peak"] <= (1 - spare) * free]
    ordered = spacious or fitting
    same_again = [row for row in ordered if row["strategy"] == kept]
    chosen = (same_again or ordered)[0]
    second = next((row for row in ordered if row is not chosen), None)
    evaluates = str(chosen["when"]).startswith(EVALUATION)
    notes = [
        f"{describe_row(chosen)}, of {format_mib(free)} a process, as planned",
        *([] if spacious else [f"less than {100 * spare:g} % of it is left"]),
        # a plan's reader can change this at no cost
        *(["most of it in evaluations, where a smaller loop.eval_batch takes less"] if evaluates else []),
        *(["the run began with it"] if same_again else []),
        *([f"second: {describe_row(second)}"] if second else []),
    ]
    return RowChoice(chosen, second, "; ".join(notes))


def describe_row(row: PlanRow) -> str:
    """The strategy of a row, what it holds and about how long it takes."""
    words = row["words"].removeprefix("strategy=") or row["strategy"]
    time = f", about {format_seconds(row['step_s'])} a step" if row["step_s"] is not None else ""
    return f"{words} ({format_mib(row['peak'])}{time})"


def format_mib(size: float) -> str:
    """Bytes, for people."""
    return f"{size / 2**20:,.0f} MiB"
