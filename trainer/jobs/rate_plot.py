"""A range test as a picture: the loss of each step against its rate, on a logarithmic axis."""

from __future__ import annotations

from collections.abc import Sequence
from io import BytesIO
from math import ceil, floor, log10
from typing import Any

from trainer.messages import format_number

_IMAGE_WIDTH, _HEIGHT, _LEFT, _BORDER = 900, 480, 70, 40  # pixels
_BACKGROUND, _TEXT_COLOR, _GRID_COLOR, _RAW, _MARK = (
    (255, 255, 255),
    (30, 36, 46),
    (226, 230, 236),
    (150, 190, 225),
    (200, 48, 44),
)
_CURVE = (0, 90, 160)


def plot_rates(
    rates: Sequence[float], losses: Sequence[float], smoothed: Sequence[float], mark: float | None, title: str
) -> bytes:
    """The picture as PNG: each loss, the smoothed curve, and a line at the rate that is suggested."""
    from PIL import Image, ImageDraw, ImageFont

    paper = Image.new("RGB", (_IMAGE_WIDTH, _HEIGHT), _BACKGROUND)
    draw: Any = ImageDraw.Draw(paper)
    font = ImageFont.load_default(13)
    # above the smoothed curve there is room for noise, not for an explosion
    low, high = min(losses), max(smoothed) + 0.1 * ((max(smoothed) - min(losses)) or 1.0)
    first, last = log10(rates[0]), log10(rates[-1])

    def place(rate: float, loss: float) -> tuple[float, float]:
        across = (log10(rate) - first) / ((last - first) or 1.0)
        up = (min(loss, high) - low) / ((high - low) or 1.0)
        return _LEFT + (_IMAGE_WIDTH - _LEFT - _BORDER) * across, _HEIGHT - _BORDER - (_HEIGHT - 2 * _BORDER) * up

    draw.text((_LEFT, 12), title, _TEXT_COLOR, font)
    for power in range(ceil(first - 1e-9), floor(last + 1e-9) + 1):
        x, _ = place(10.0**power, low)
        draw.line((x, _BORDER, x, _HEIGHT - _BORDER), _GRID_COLOR)
        draw.text((x, _HEIGHT - _BORDER + 6), f"1e{power}", _TEXT_COLOR, font, anchor="ma")
    for part in range(5):
        loss = low + (high - low) * part / 4
        _, y = place(rates[0], loss)
        draw.line((_LEFT, y, _IMAGE_WIDTH - _BORDER, y), _GRID_COLOR)
        draw.text((_LEFT - 6, y), format_number(loss), _TEXT_COLOR, font, anchor="rm")
    draw.line([place(*point) for point in zip(rates, losses, strict=True)], _RAW, 1)
    draw.line([place(*point) for point in zip(rates, smoothed, strict=True)], _CURVE, 3)
    if mark is not None:
        x, _ = place(mark, low)
        draw.line((x, _BORDER, x, _HEIGHT - _BORDER), _MARK, 2)
        draw.text((x + 5, _BORDER + 2), f"optimizer.lr={mark:.2g}", _MARK, font)
    file = BytesIO()
    paper.save(file, "PNG")
    return file.getvalue()
