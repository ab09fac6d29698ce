"""New pictures without labels, prepared as an evaluation prepares its own; damaged ones are told apart."""

from __future__ import annotations

from typing import Any, Literal

import torch
from torch import Tensor
from torch.utils.data import Dataset

from recipes.inputs import Listed
from recipes.vision.decode import Window, decode


class Unlabelled(Dataset):
    """Files as tensors (C, size, size) of uint8 and 0; of one that cannot be read zeros and 1.

    white: the value of white in the pictures that the network has learned from.
    """

    def __init__(
        self,
        paths: Listed,
        window: Window,
        size: int,
        channels: Literal[1, 3],
        white: float = 255.0,
        draft: bool = True,
    ) -> None:
        self._paths, self._window, self._size, self._channels, self._white = paths, window, size, channels, white
        self._draft = draft

    def __len__(self) -> int:
        return len(self._paths)

    def __getitem__(self, index: int) -> tuple[Tensor, int]:
        try:
            return self._read(index), 0
        except Exception:  # PIL has many, as formats have; error() says which
            form = torch.uint8 if self._white == 255 else torch.float32
            return torch.zeros(self._channels, self._size, self._size, dtype=form), 1

    def _read(self, index: int) -> Tensor:
        pixels = decode(self._paths[index], self._size, self._channels, self._window, self._draft)
        return pixels if self._white == 255 else pixels * (self._white / 255)

    def name(self, index: int) -> str:
        """The path."""
        return self._paths[index]

    def error(self, index: int) -> str:
        """What is wrong with a file: it is read once more."""
        try:
            self._read(index)
        except Exception as error:
            said: Any = error.strerror if isinstance(error, OSError) and error.strerror else error
            return f"cannot be read as a picture: {' '.join(str(said).split()) or type(error).__name__}"
        return "could not be read at first, but a second time"
