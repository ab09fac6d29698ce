"""Which row of a plan a run should use, and why."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

from trainer.jobs.goodput_report import format_seconds
from trainer.messages import Refusal

PlanRow = Mapping[str, Any]  # as it stands in plan.json


class RowChoice(NamedTuple):
    """The row to use, the next best one, and one line for people."""

    row: PlanRow
    second: PlanRow | None
    reason: str


def choose_row(
    rows: Sequence[PlanRow],
    free: float,
    spare: float,
    preferred: str = "",
    why: str = "",
) -> RowChoice:
    """The row with the shortest step of those that leave this part of the memory; else of those that fit.

    preferred: a strategy whose rows go before faster ones; why: says so. Refusal where none fits.
    """
    # what was only computed is not sure to fit; and another global batch would be another curve
    tried = [row for row in rows if row["how"] == "simulated"]
    same = [row for row in tried if "loop.global_batch=" not in row["words"]] or tried
    fitting = [row for row in same if row["fits"]]
    if not fitting:
        least = min(same, key=lambda row: int(row["peak"]), default=None)
        nearest = f"; nearest: {describe_row(least)}. {least['advice']}" if least else ": no strategy can be used"
        raise Refusal(f"nothing fits into {format_mib(free)} a process{nearest}")
    spacious = [row for row in fitting if row["peak"] <= (1 - spare) * free]
    ordered = sorted(spacious or fitting, key=lambda row: (row["strategy"] != preferred, row["step_s"]))
    notes = [f"{describe_row(ordered[0])}, of {format_mib(free)} a process, as planned"]
    notes += [] if spacious else [f"less than {100 * spare:g} % of it is left"]
    notes += [why] if ordered[0]["strategy"] == preferred else []
    second = next(iter(ordered[1:]), None)
    notes += [f"second: {describe_row(second)}"] if second else []
    return RowChoice(ordered[0], second, "; ".join(notes))


def describe_row(row: PlanRow) -> str:
    """The strategy of a row, what it holds and how long it takes."""
    words = row["words"].removeprefix("strategy=") or row["strategy"]
    return f"{words} ({format_mib(row['peak'])}, {format_seconds(row['step_s'])} a step)"


def format_mib(size: float) -> str:
    """Bytes, for people."""
    return f"{size / 2**20:,.0f} MiB"
