"""Pictures for people: a grid of small ones with words below them, and a confusion matrix."""

from __future__ import annotations

from collections.abc import Sequence
from functools import cache
from typing import TYPE_CHECKING, Any

from torch import Tensor
from torch.nn import functional

if TYPE_CHECKING:
    from PIL import Image, ImageDraw

_SIDE = 96  # pixels of a picture in a grid, at most: small ones are enlarged by whole numbers
_GAP = 8  # pixels between two of them, and around all
_TEXT = 14  # pixels, the height of a font
_LINE = 17  # from one line of text to the next
_ROW = 5  # pictures in a row: TensorBoard shrinks all to a card of 380 × 210 pixels, and words must stay readable
_NUMBERED, _WIDEST = 30, 720  # classes up to which a cell has its number; pixels of a table that has more
_CELL = (24, 28)  # pixels of a cell with a number, at least and at most
_PAPER, _INK, _FAINT = (255, 255, 255), (30, 36, 46), (226, 230, 236)  # red, green, blue
_RIGHT, _WRONG = (31, 111, 178), (200, 48, 44)  # the darkest cell of each kind


def plot_image_grid(pictures: Tensor, words: Sequence[str]) -> Any:
    """Pictures (B, C, H, W) from 0 to 1 beside each other, each with its words below: (height, width, 3) of uint8.

    words: one text for each, of one line or several; or none at all. Colours are the first three channels, or grey.
    """
    import numpy
    from PIL import Image, ImageDraw

    tiles = _scale_images(pictures)  # (B, height, width, 3)
    _, height, width, _ = tiles.shape
    lines = max((text.count("\n") + 1 for text in words), default=0)
    # a cell is as wide as its words need, within reason
    font = _load_font()
    widest = max((font.getlength(line) for text in words for line in text.splitlines()), default=0)
    across, down = max(width, min(int(widest) + 1, 2 * _SIDE)) + _GAP, height + lines * _LINE + _GAP
    columns = min(_ROW, len(tiles))
    rows = -(-len(tiles) // columns)
    paper = Image.new("RGB", (columns * across + _GAP, rows * down + _GAP), _PAPER)
    draw = ImageDraw.Draw(paper)
    for at, tile in enumerate(tiles):
        left, top = _GAP + at % columns * across, _GAP + at // columns * down
        middle = left + (across - _GAP) // 2
        paper.paste(Image.fromarray(tile), (middle - width // 2, top))
        for number, line in enumerate(words[at].splitlines() if at < len(words) else ()):
            draw.text(
                (middle, top + height + 2 + number * _LINE),
                _truncate(line, across - _GAP // 2),
                _INK,
                font,
                anchor="ma",
            )
    return numpy.asarray(paper)


def _scale_images(pictures: Tensor) -> Any:
    """Pictures of a size that people can see, (B, height, width, 3) of uint8 as numpy has them."""
    shown = pictures.detach().float().cpu()
    # as RGB or grey, whatever a data set has for channels
    shown = shown[:, :3] if shown.shape[1] >= 3 else shown[:, :1].expand(-1, 3, -1, -1)
    largest = max(shown.shape[2:])
    if largest > _SIDE:
        size = [max(1, round(side * _SIDE / largest)) for side in shown.shape[2:]]
        shown = functional.interpolate(shown, size, mode="bilinear", antialias=True)
    else:
        shown = shown.repeat_interleave(_SIDE // largest, 2).repeat_interleave(_SIDE // largest, 3)
    # (B, 3, height, width) from 0 to 1; a NaN would become any colour
    shown = shown.nan_to_num(0).clamp(0, 1)
    return (shown * 255).round().byte().permute(0, 2, 3, 1).contiguous().numpy()


def plot_confusion_matrix(counts: Tensor, names: Sequence[str]) -> Any:
    """A confusion matrix, row = true class, column = class said, as a picture: (height, width, 3) of uint8.

    A cell is the darker, the more of its row are in it: blue where it is right, red where not. The root of that share,
    so that rare mistakes can be seen.
    """
    import numpy
    from PIL import Image, ImageDraw

    counts = counts.detach().double().cpu()
    classes = len(counts)
    shades = (counts / counts.sum(1, keepdim=True).clamp_min(1)).clamp(0, 1).sqrt()
    least, most = _CELL if classes <= _NUMBERED else (1, _WIDEST)
    cell = max(least, min(most, _WIDEST // classes))
    names = names if len(names) == classes else [str(number) for number in range(classes)]
    font = _load_font()
    # names stand beside the rows and, turned, below the columns; where cells are lower than a line there is no room
    margin = int(max(map(font.getlength, names))) + _GAP if cell >= _TEXT else 0
    left, top, side = _GAP + _LINE + margin, _GAP, cell * classes
    paper = Image.new("RGB", (left + side + _GAP, top + side + margin + _LINE + _GAP), _PAPER)
    draw = ImageDraw.Draw(paper)
    paper.paste(Image.fromarray(_color_cells(shades, cell)), (left, top))
    for number, name in enumerate(names if margin else ()):
        middle = top + number * cell + cell // 2
        draw.text((left - _GAP // 2, middle), name, _INK, font, anchor="rm")
        _draw_rotated_text(paper, name, (left + number * cell + cell // 2, top + side + _GAP // 2))
    if classes <= _NUMBERED:
        _write_counts(draw, counts, shades, (left, top, cell))
    draw.text((left + side // 2, top + side + margin + _LINE), "said", _INK, font, anchor="ms")
    _draw_rotated_text(paper, "true", (_GAP, top + side // 2), centred=True)
    return numpy.asarray(paper)


def _color_cells(shades: Tensor, cell: int) -> Any:
    """Cells of these shades (classes, classes), each so many pixels wide, with a thin line between large ones."""
    import numpy

    paper = numpy.array(_PAPER, dtype=float)
    dark = numpy.where(numpy.eye(len(shades), dtype=bool)[..., None], _RIGHT, _WRONG)
    shade = shades.numpy()[..., None]
    picture = (paper + (dark - paper) * shade).round().astype(numpy.uint8).repeat(cell, 0).repeat(cell, 1)
    if cell >= _TEXT:
        picture[::cell], picture[:, ::cell] = _FAINT, _FAINT
    return picture


def _write_counts(draw: ImageDraw.ImageDraw, counts: Tensor, shades: Tensor, place: tuple[int, int, int]) -> None:
    """In each cell how many samples it stands for, if any."""
    left, top, cell = place
    for row, column in counts.nonzero().tolist():
        text = f"{int(counts[row, column])}"
        # five digits must fit as two do
        font = _load_font(min(_TEXT, int(1.6 * (cell - 4) / max(len(text), 2))))
        colour = _PAPER if shades[row, column] > 0.6 else _INK
        draw.text((left + (column + 0.5) * cell, top + (row + 0.5) * cell), text, colour, font, anchor="mm")


def _draw_rotated_text(paper: Image.Image, text: str, at: tuple[int, int], centred: bool = False) -> None:
    """A text that reads upwards: its end at the top, in the middle of `at` across; or `at` the middle of it."""
    from PIL import Image, ImageDraw

    font = _load_font()
    strip = Image.new("RGB", (int(font.getlength(text)) + 1, _LINE), _PAPER)
    ImageDraw.Draw(strip).text((0, _LINE // 2), text, _INK, font, anchor="lm")
    turned = strip.rotate(90, expand=True)
    across, down = at
    paper.paste(turned, (across if centred else across - _LINE // 2, down - turned.height // 2 if centred else down))


@cache
def _load_font(size: int = _TEXT) -> Any:
    """The font that Pillow brings, so that pictures look the same everywhere."""
    from PIL import ImageFont

    return ImageFont.load_default(max(size, 6))


def _truncate(line: str, width: int) -> str:
    """As much of a line as fits."""
    font = _load_font()
    if font.getlength(line) <= width:
        return line
    while line and font.getlength(line + "…") > width:
        line = line[:-1]
    return line + "…"
