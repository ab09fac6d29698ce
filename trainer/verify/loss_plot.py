"""Loss curves drawn on each other, and how far they are apart: an SVG file."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence

WIDTH, LEFT, RIGHT = 880, 72, 24  # pixels; the margins hold the numbers of the axes
UPPER, LOWER = (118, 358), (428, 538)  # top and bottom of the two panels
BOTTOM = 588
_FIT = 108  # characters of a command
STROKES = [("c0", 10, ""), ("c1", 6, ""), ("c2", 3, ""), ("c3", 1.4, "5 4")]  # each lies on the one before
# CSS of the reader's light and dark scheme
LIGHT = {
    ".card": "fill: #ffffff",
    "text, .dot": "fill: #1c2430",
    "text.faint": "fill: #5b6675",
    ".grid": "stroke: #e3e7ec",
    ".floor": "stroke: #b3123f",
    ".c0": "stroke: #b9c3d0",
    ".c1": "stroke: #4f9bea",
    ".c2": "stroke: #ffd23f",
    ".c3": "stroke: #b3123f",
}
DARK = LIGHT | {
    ".card": "fill: #12171e",
    "text, .dot": "fill: #e8edf3",
    "text.faint": "fill: #9aa7b6",
    ".grid": "stroke: #2a323d",
    ".floor": "stroke: #e0447a",
    ".c0": "stroke: #566376",
    ".c3": "stroke: #e0447a",
}
SHAPES = """  text { font-family: system-ui, sans-serif; font-size: 13px }
  text.title { font-size: 16px; font-weight: 600 }
  text.code { font-family: monospace; font-size: 12px }
  .curve { fill: none; stroke-linecap: round; stroke-linejoin: round }
"""


def plot_curves(title: str, command: str, curves: Mapping[str, Sequence[float]], first: int, floor: float = 0.0) -> str:
    """The whole drawing, as SVG that follows the reader's light or dark scheme.

    command: what made it, in one line. curves: up to four, of equal length, by name; the others are compared with the
    first. first: the number of its first step. floor: a difference that means nothing, where one is known.
    """
    # one style sheet with both schemes, then the two panels from top to bottom
    schemes = [" ".join(f"{name} {{ {what} }}" for name, what in colours.items()) for colours in (LIGHT, DARK)]
    style = f"{SHAPES}  {schemes[0]}\n  @media (prefers-color-scheme: dark) {{ {schemes[1]} }}"
    parts = [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {BOTTOM}" width="{WIDTH}" role="img">',
        f"<title>Training loss: {_escape(', '.join(curves))}</title><style>\n{style}\n</style>",
        f'<rect class="card" width="{WIDTH}" height="{BOTTOM}" rx="8"/>',
        svg_text(LEFT, 30, title, "title"),
        svg_text(LEFT, 50, command if len(command) <= _FIT else f"{command[: _FIT - 1]}…", "faint code"),
        *_legend(list(curves)),
        *_losses(list(curves.values())),
        *_differences(list(curves.values()), next(iter(curves)), floor),
        *_steps(len(next(iter(curves.values()))), first),
        svg_text((LEFT + WIDTH - RIGHT) / 2, BOTTOM - 10, "optimizer step", "faint", "middle"),
        "</svg>",
    ]
    return "\n".join(parts) + "\n"


def largest_differences(curves: Sequence[Sequence[float]]) -> list[float]:
    """How far each step's losses are from the first curve's, at most."""
    return [max(abs(loss - losses[0]) for loss in losses) for losses in zip(*curves, strict=True)]


def _legend(names: Sequence[str]) -> Iterator[str]:
    """A sample of each stroke with its name."""
    for number, (name, (colour, width, dash)) in enumerate(zip(names, STROKES, strict=False)):
        x = LEFT + 200.0 * number
        yield _curve([(x, 73), (x + 34, 73)], colour, width, dash)
        yield svg_text(x + 44, 78, name)


def _losses(curves: Sequence[Sequence[float]]) -> Iterator[str]:
    """The curves on each other."""
    ticks = _round_numbers([loss for losses in curves for loss in losses if math.isfinite(loss)])
    span = ticks[0], ticks[-1]
    yield from _axis([(tick, f"{tick:g}") for tick in ticks], UPPER, "loss")
    for losses, (colour, width, dash) in zip(curves, STROKES, strict=False):
        points = [(_across(at, len(losses)), _height(loss, span, UPPER)) for at, loss in enumerate(losses)]
        yield _curve([point for point in points if math.isfinite(point[1])], colour, width, dash)


def _differences(curves: Sequence[Sequence[float]], first: str, floor: float) -> Iterator[str]:
    """The largest difference at each step, on a logarithmic axis; none at all is the lowest line."""
    apart = largest_differences(curves)
    powers = [math.log10(value) for value in [*apart, floor] if value and math.isfinite(value)] or [0.0]
    low, high = math.floor(min(powers)) - 1, math.ceil(max(powers))
    stride = -(-(high - low) // 8)  # between lines: a curve in fp64 is many powers away from one that is wrong
    yield from _axis([(low, "0"), *((power, f"1e{power}") for power in range(high, low, -stride))][::-1], LOWER, "")
    yield svg_text(LEFT, LOWER[0] - 14, f"largest difference to {first}", "faint")
    if floor:
        y = _height(math.log10(floor), (low, high), LOWER)
        ends = f'x1="{LEFT}" x2="{WIDTH - RIGHT}" y1="{y:.1f}" y2="{y:.1f}"'
        yield f'<line class="floor" {ends} stroke-dasharray="4 4"/>'
        yield svg_text(WIDTH - RIGHT, y - 5, "noise floor", "faint", "end")
    for at, value in enumerate(apart):
        if math.isfinite(value):
            y = _height(math.log10(value) if value else low, (low, high), LOWER)
            yield f'<circle class="dot" cx="{_across(at, len(apart)):.1f}" cy="{y:.1f}" r="2.6"/>'


def _steps(count: int, first: int) -> Iterator[str]:
    """Numbers below the lower panel."""
    stride = max(1, round(count / 40) * 4)
    for step in range(first, first + count):
        if step % stride == 0:
            yield svg_text(_across(step - first, count), LOWER[1] + 20, str(step), "faint", "middle")


def _round_numbers(values: Sequence[float]) -> list[float]:
    """Some five numbers, round ones, from below the smallest value, or 0, to above the largest."""
    low, high = min(0.0, *values, 0.0), max(1e-12, *values, 0.0)
    power = 10 ** math.floor(math.log10((high - low) / 4))
    stride = next(power * factor for factor in (1, 2, 5, 10) if (high - low) / (power * factor) <= 6)
    return [stride * number for number in range(math.floor(low / stride), math.ceil(high / stride) + 1)]


def _axis(ticks: Sequence[tuple[float, str]], panel: tuple[int, int], name: str) -> Iterator[str]:
    """Horizontal lines with their numbers, the lowest tick at the panel's bottom and the highest at its top."""
    if name:
        yield svg_text(LEFT, panel[0] - 4, name, "faint")
    values = [value for value, _ in ticks]
    for value, label in ticks:
        y = _height(value, (min(values), max(values)), panel)
        yield f'<line class="grid" x1="{LEFT}" x2="{WIDTH - RIGHT}" y1="{y:.1f}" y2="{y:.1f}"/>'
        yield svg_text(LEFT - 10, y + 4, label, "faint", "end")


def _across(at: int, count: int) -> float:
    """Where a step stands, in pixels from the left."""
    return LEFT + (WIDTH - LEFT - RIGHT) * at / max(count - 1, 1)


def _height(value: float, span: tuple[float, float], panel: tuple[int, int]) -> float:
    """Where a value stands, in pixels from the top."""
    return panel[1] - (panel[1] - panel[0]) * (value - span[0]) / max(span[1] - span[0], 1e-12)


def _curve(points: Sequence[tuple[float, float]], colour: str, width: float, dash: str) -> str:
    """One stroke through all points."""
    path = " ".join(f"{x:.1f},{y:.1f}" for x, y in points)
    dashes = f' stroke-dasharray="{dash}"' if dash else ""
    return f'<polyline class="curve {colour}" stroke-width="{width}"{dashes} points="{path}"/>'


def svg_text(x: float, y: float, text: str, kind: str = "", anchor: str = "start") -> str:
    """Text at a place."""
    return f'<text class="{kind}" x="{x:.1f}" y="{y:.1f}" text-anchor="{anchor}">{_escape(text)}</text>'


def _escape(text: str) -> str:
    """Text as it may stand between tags."""
    return text.replace("&", "&amp;").replace("<", "&lt;")
