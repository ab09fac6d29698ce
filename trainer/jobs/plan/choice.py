"""Which row of a plan a run should use, and why."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from math import inf
from typing import Any, NamedTuple

from trainer.jobs.plan.trial import EVALUATION
from trainer.messages import Refusal, format_seconds

PlanRow = Mapping[str, Any]  # as it stands in plan.json
TIME_ERROR = 0.3  # of a step's time: the largest errors that docs/plan.md has
WITHIN = "no other is faster by more than a plan may be wrong"


class RowChoice(NamedTuple):
    """The row to use, the next best one, and one line for people."""

    row: PlanRow
    second: PlanRow | None
    reason: str


def choose_row(
    rows: Sequence[PlanRow], free: float, spare: float, margin: float = TIME_ERROR, kept: str = ""
) -> RowChoice:
    """The row with the shortest step of those that leave this part of the memory; else of those that fit.

    margin: copies that divide nothing but the samples go before a row that is not quicker by more than this; infinity
    where times are not known. kept: a strategy that goes before all others. Refusal where none fits.
    """
    # what was only computed is not sure to fit; and another global batch would be another curve
    tried = [row for row in rows if row["how"] == "simulated"]
    same = [row for row in tried if "loop.global_batch=" not in row["words"]] or tried
    fitting = [row for row in same if row["fits"]]
    untried = [row for row in rows if row["how"] != "simulated" and row["fits"]]
    if not fitting and untried:
        promising = describe_row(min(untried, key=lambda row: float(row["step_s"])))
        raise Refusal(
            f"nothing that was tried fits into {format_mib(free)} a process, and there was no time to try {promising},"
            " which may fit: give the plan more (job.seconds), or name this strategy"
        )
    if not tried:
        raise Refusal("is not known, as no strategy could be planned")
    if not fitting:
        least = min(same, key=lambda row: int(row["peak"]))
        nearest = f"nearest: {describe_row(least)}. {least['advice']}"
        raise Refusal(f"nothing fits into {format_mib(free)} a process; {nearest}")
    spacious = [row for row in fitting if row["peak"] <= (1 - spare) * free]
    ordered = sorted(spacious or fitting, key=lambda row: float(row["step_s"]))
    chosen, why = ordered[0], ""
    # smaller differences than a plan's error are none
    if copies := [row for row in ordered if not row["divides"] and row["step_s"] <= (1 + margin) * chosen["step_s"]]:
        chosen = copies[0]
        if chosen is not ordered[0]:
            why = "the times of this device are not sure enough to choose by" if margin == inf else WITHIN
    if same_again := [row for row in ordered if row["strategy"] == kept]:
        chosen, why = same_again[0], "the run began with it"
    second = next((row for row in ordered if row is not chosen), None)
    evaluates = str(chosen["when"]).startswith(EVALUATION)
    notes = [
        f"{describe_row(chosen)}, of {format_mib(free)} a process, as planned",
        *([] if spacious else [f"less than {100 * spare:g} % of it is left"]),
        # a plan's reader can change this at no cost
        *(["most of it in evaluations, where a smaller loop.eval_batch takes less"] if evaluates else []),
        *([why] if why else []),
        *([f"second: {describe_row(second)}"] if second else []),
    ]
    return RowChoice(chosen, second, "; ".join(notes))


def describe_row(row: PlanRow) -> str:
    """The strategy of a row, what it holds and how long it takes."""
    words = row["words"].removeprefix("strategy=") or row["strategy"]
    return f"{words} ({format_mib(row['peak'])}, {format_seconds(row['step_s'])} a step)"


def format_mib(size: float) -> str:
    """Bytes, for people."""
    return f"{size / 2**20:,.0f} MiB"
