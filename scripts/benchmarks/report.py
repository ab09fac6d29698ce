"""Medians and ratios of what was measured, as tables in Markdown and a drawing."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from statistics import median
from typing import Any

from trainer.verify.loss_plot import DARK, LIGHT, svg_text

Row = Mapping[str, Any]  # work, peer, round, and figures or error

COLUMNS = {  # figure → its heading
    "step": "step, µs",
    "cpu": "step, µs of CPU",
    "evaluation": "evaluation, µs a batch",
    "first": "start to first step, s",
    "first_cpu": "start to first step, s of CPU",
    "memory": "peak memory, MiB",
}
WIDTH, LEFT, RIGHT, TOP, LINE = 880, 150, 40, 92, 34  # pixels
SHADES = ("#8a94a3", "#b3123f", "#4f9bea", "#e08a00", "#2f9e6e", "#8b5fd6")


def tables(rows: Sequence[Row]) -> str:
    """A table for each workload: medians over the rounds, and in brackets the ratio to raw."""
    return "\n\n".join(table(work, [row for row in rows if row["work"] == work]) for work in each(rows, "work"))


def table(work: str, rows: Sequence[Row]) -> str:
    """One workload."""
    head = ["", *COLUMNS.values(), "accuracy", "rounds"]
    lines = [f"### {work}", "", f"| {' | '.join(head)} |", "|" + " --- |" * len(head)]
    for peer in each(rows, "peer"):
        own = [row["figures"] for row in rows if row["peer"] == peer and "figures" in row]
        failed = sum("error" in row for row in rows if row["peer"] == peer)
        cells = [cell(rows, peer, name) for name in COLUMNS] if own else ["failed"] * len(COLUMNS)
        accuracy = f"{median(figures['accuracy'] for figures in own):.3f}" if own else ""
        lines.append(f"| {' | '.join([peer, *cells, accuracy])} | {len(own)}{f', {failed} failed' * bool(failed)} |")
    return "\n".join(lines)


def cell(rows: Sequence[Row], peer: str, name: str) -> str:
    """A median, and its ratio to raw."""
    value = median(row["figures"][name] for row in rows if row["peer"] == peer and "figures" in row)
    quotient = ratio(rows, peer, name)
    return f"{value:,.{2 if name.startswith('first') else 0}f}" + (f" ({quotient:.2f})" if quotient else "")


def ratio(rows: Iterable[Row], peer: str, name: str) -> float | None:
    """The median of the ratios to raw within a round: what the machine does meanwhile meets both."""
    figures = {(row["peer"], row["round"]): row["figures"][name] for row in rows if "figures" in row}
    found = [
        value / figures["raw", at] for (who, at), value in figures.items() if who == peer and ("raw", at) in figures
    ]
    return median(found) if found else None


def each(rows: Iterable[Row], key: str) -> list[str]:
    """The different values of a key, in the order in which they first come."""
    return list(dict.fromkeys(row[key] for row in rows))


def picture(rows: Sequence[Row]) -> str:
    """Each workload's time a step as a ratio to raw's, a dot for each program, on a logarithmic axis, as SVG."""
    works, peers = each(rows, "work"), [peer for peer in each(rows, "peer") if peer != "raw"]
    found = {(w, p): ratio([row for row in rows if row["work"] == w], p, "step") for w in works for p in peers}
    values = [value for value in found.values() if value] or [1.0]
    low, high = min(0.5, *values) / 1.1, max(2.0, *values) * 1.1
    bottom = TOP + LINE * len(works)

    def across(value: float) -> float:
        return LEFT + (WIDTH - LEFT - RIGHT) * math.log(value / low) / math.log(high / low)

    schemes = [" ".join(f"{name} {{ {what} }}" for name, what in colours.items()) for colours in (LIGHT, DARK)]
    parts = [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {bottom + 40}" width="{WIDTH}" role="img">',
        "<title>Time of a step as a ratio to the loop by hand</title><style>",
        "text { font-family: system-ui, sans-serif; font-size: 13px } text.title { font-size: 16px; font-weight: 600 }",
        f"{schemes[0]} @media (prefers-color-scheme: dark) {{ {schemes[1]} }}</style>",
        f'<rect class="card" width="{WIDTH}" height="{bottom + 40}" rx="8"/>',
        svg_text(LEFT, 30, "Time of a step, as a ratio to the loop by hand (raw = 1; left is faster)", "title"),
    ]
    for tick in (value for value in (0.1, 0.2, 0.5, 1, 2, 5, 10, 20) if low <= value <= high):
        x = across(tick)
        width = 3 if tick == 1 else 1
        parts.append(
            f'<line class="grid" stroke-width="{width}" x1="{x:.1f}" x2="{x:.1f}" y1="{TOP - 16}" y2="{bottom}"/>'
        )
        parts.append(svg_text(x, bottom + 20, f"{tick:g}", "faint", "middle"))
    for row, work in enumerate(works):
        y = TOP + LINE * row + 8
        parts.append(svg_text(LEFT - 14, y + 4, work, "", "end"))
        dots = [(found[work, peer], shade) for peer, shade in zip(peers, SHADES[1:], strict=False)]
        parts += [f'<circle cx="{across(value):.1f}" cy="{y}" r="6" fill="{shade}"/>' for value, shade in dots if value]
    for number, (peer, shade) in enumerate(zip(peers, SHADES[1:], strict=False)):
        parts.append(f'<circle cx="{LEFT + 120 * number + 6}" cy="52" r="6" fill="{shade}"/>')
        parts.append(svg_text(LEFT + 120 * number + 18, 56, peer))
    return "\n".join([*parts, "</svg>", ""])
