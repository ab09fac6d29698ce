"""1,797 real handwritten digits, in the repository."""

from __future__ import annotations

import zlib
from pathlib import Path

import torch
from torch import Tensor

from recipes.gzipped import unpacked
from recipes.vision.augment import Augment
from recipes.vision.images import Images
from recipes.vision.pictures import Pictures
from trainer.messages import Refusal, expand_home

_SAMPLES, _EVALUATION, _SIDE, _WHITE = 1797, 360, 8, 16


class Digits(Pictures):
    """Handwritten digits (1, 8, 8) with values 0..16; the last 360, by other writers, are the evaluation set."""

    num_classes, stored = 10, (1, _SIDE)
    class_names = tuple("0123456789")

    def __init__(self, augment: Augment, file: str | None = None) -> None:
        super().__init__(augment)
        self.images, self.labels = _table(expand_home(file) if file else Path(__file__).with_name("digits.csv.gz"))

    def _read(self, training: bool) -> Images:
        """The first 1,437 digits of the file, or the last 360."""
        part = slice(None, -_EVALUATION) if training else slice(-_EVALUATION, None)
        return Images(self.images[part], self.labels[part])


def _table(path: Path) -> tuple[Tensor, Tensor]:
    """Images (1797, 1, 8, 8) uint8 and labels (1797,) int64 from the csv file."""
    expected = f"{_SAMPLES} lines of 64 values 0..{_WHITE} and a label 0..9, as gzipped csv"
    try:
        lines = unpacked(path).decode("ascii").split()
        table = torch.tensor([[int(value) for value in line.split(",")] for line in lines])
    except (OSError, EOFError, ValueError, zlib.error) as error:
        raise Refusal(f"{path} cannot be read as digits ({error}); expected {expected}") from error
    if table.shape != (_SAMPLES, _SIDE * _SIDE + 1):
        raise Refusal(f"{path} holds a table of {' × '.join(map(str, table.shape))}; expected {expected}")
    pixels, labels = table[:, :-1], table[:, -1]
    if pixels.min() < 0 or pixels.max() > _WHITE or labels.min() < 0 or labels.max() > 9:
        raise Refusal(f"{path} holds values out of range; expected {expected}")
    return pixels.to(torch.uint8).view(-1, 1, _SIDE, _SIDE), labels.contiguous()
