"""A plan as a picture: what each strategy holds on the most processes, and its time on each number of them."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from math import ceil, floor, log2, log10
from typing import Any

from trainer.jobs.plan.choice import PlanRow
from trainer.jobs.plan.ledger import KINDS
from trainer.messages import format_count

_MIB = 2**20
_WIDTH, _MARGIN, _RIGHT = 1100, 20, 90  # pixels
_BAR, _GAP, _TEXT, _PANEL = 20, 8, 14, 360  # heights: of a bar, between two, of a font, of the plot of times
_PAPER, _INK, _FAINT, _LIMIT = (255, 255, 255), (30, 36, 46), (226, 230, 236), (200, 48, 44)
# colours that also people tell apart who do not see red and green
_COLOURS = (
    *((0, 114, 178), (230, 159, 0), (0, 158, 115), (86, 180, 233), (204, 121, 167), (213, 94, 0), (90, 90, 90)),
    *((150, 120, 60), (110, 60, 160), (60, 160, 160), (0, 0, 0), (160, 160, 160)),
)


def plot_plan(rows: Sequence[PlanRow], device: str, free: float) -> Any:
    """The picture (PIL): bars of memory by kind above, lines of the time of a step below. free: bytes of a device."""
    from PIL import Image, ImageDraw

    most = max(row["processes"] for row in rows)
    bars = [row for row in rows if row["processes"] == most]
    top = 3 * _MARGIN + 2 * _TEXT  # below the title and the names of the kinds
    height = top + len(bars) * (_BAR + _GAP) + 3 * _MARGIN + _PANEL
    paper = Image.new("RGB", (_WIDTH, height), _PAPER)
    draw = ImageDraw.Draw(paper)
    _write(draw, (_MARGIN, _MARGIN), f"{format_count(most, 'process')} on {device}: MiB of the rank that holds most")
    left = _MARGIN
    for kind, colour in zip(KINDS, _COLOURS, strict=False):  # the legend
        y = _MARGIN + _TEXT + _GAP
        draw.rectangle((left, y, left + _TEXT, y + _TEXT), colour)
        left = _write(draw, (left + _TEXT + 6, y), kind) + _MARGIN
    below = _draw_memory(draw, bars, free, top)
    _draw_times(draw, rows, below + 2 * _MARGIN, height - 2 * _MARGIN)
    return paper


def _draw_memory(draw: Any, bars: Sequence[PlanRow], free: float, top: int) -> int:
    """A bar for each row, of its kinds; a line where the memory ends. Where the bars end, in pixels from the top."""
    names = [_name(row) for row in bars]
    left = _MARGIN + int(max(_font().getlength(name) for name in names)) + _GAP
    span = max(row["peak"] for row in bars)
    # a limit far to the right would leave no room for the bars: then it is said in words
    span = max(span, free) if free < 3 * span else span
    scale = (_WIDTH - _RIGHT - left) / span  # pixels a byte
    for number, (name, row) in enumerate(zip(names, bars, strict=True)):
        y, x = top + number * (_BAR + _GAP), float(left)
        draw.text((left - _GAP, y + _BAR / 2), name, _INK, _font(), anchor="rm")
        for kind, colour in zip(KINDS, _COLOURS, strict=False):
            wide = row["by_kind"][kind] * scale
            draw.rectangle((x, y, x + max(wide - 1, 0), y + _BAR), colour)
            x += wide
        _write(draw, (x + 4, y + 3), f"{row['peak'] / _MIB:,.0f}")
    bottom = top + len(bars) * (_BAR + _GAP)
    text = f"memory: {free / _MIB:,.0f} MiB"
    if free > span:
        _write(draw, (left, bottom + 2), f"{text}, far to the right", _LIMIT)
    else:
        x = left + free * scale
        draw.line((x, top - 4, x, bottom), _LIMIT, 2)
        draw.text((x, bottom + 2), text, _LIMIT, _font(), anchor="ma")
    return bottom


def _draw_times(draw: Any, rows: Sequence[PlanRow], top: int, bottom: int) -> None:
    """Seconds of a step against the number of processes, both logarithmic: the quickest row of each strategy."""
    lines: dict[str, dict[int, float]] = {}  # strategy → processes → seconds
    for row in rows:
        line = lines.setdefault(row["strategy"], {})
        line[row["processes"]] = min(row["step_s"], line.get(row["processes"], row["step_s"]))
    counts = sorted({row["processes"] for row in rows})
    seconds = [time for line in lines.values() for time in line.values()]
    low, high = floor(log10(min(seconds)) * 3) / 3, ceil(log10(max(seconds)) * 3 + 0.01) / 3
    left, right, first, last = _MARGIN + 80, _WIDTH - 220, log2(counts[0]), log2(counts[-1])

    def place(count: int, time: float) -> tuple[float, float]:
        part = (log2(count) - first) / (last - first) if last > first else 0.5
        return left + (right - left) * part, bottom - (bottom - top) * (log10(time) - low) / (high - low)

    _write(draw, (_MARGIN, top - _MARGIN), "time of a step, by number of processes")
    for tick in _ticks(10**low, 10**high):
        _, y = place(counts[0], tick)
        draw.line((left, y, right, y), _FAINT)
        label = f"{tick:g} s" if tick >= 1 else f"{tick * 1e3:g} ms"
        draw.text((left - _GAP, y), label, _INK, _font(), anchor="rm")
    for count in counts:
        draw.text((place(count, 10**low)[0], bottom + 4), f"{count:,}", _INK, _font(), anchor="ma")
    for number, (name, line) in enumerate(lines.items()):
        colour = _COLOURS[number % len(_COLOURS)]
        points = [place(count, time) for count, time in sorted(line.items())]
        draw.line(points, colour, 2)
        for x, y in points:
            draw.ellipse((x - 4, y - 4, x + 4, y + 4), colour)
        y = top + number * (_TEXT + _GAP)
        draw.rectangle((right + 40, y, right + 40 + _TEXT, y + _TEXT), colour)
        _write(draw, (right + 46 + _TEXT, y), name)


def _ticks(low: float, high: float) -> Iterator[float]:
    """1, 2 and 5 times the powers of ten between these."""
    for power in range(floor(log10(low)), ceil(log10(high)) + 1):
        yield from (tick for factor in (1, 2, 5) if low <= (tick := factor * 10.0**power) <= high * 1.001)


def _name(row: PlanRow) -> str:
    words = [word.removeprefix("strategy=").removeprefix("strategy.") for word in row["words"].split()]
    return " ".join(words) or row["strategy"]


def _write(draw: Any, at: tuple[float, float], text: str, colour: tuple[int, int, int] = _INK) -> int:
    """Where the text ends, in pixels from the left."""
    draw.text(at, text, colour, _font())
    return int(at[0] + _font().getlength(text))


def _font() -> Any:
    from PIL import ImageFont

    return ImageFont.load_default(_TEXT)
