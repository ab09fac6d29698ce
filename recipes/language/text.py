"""A text file as bytes: windows of it, each with the same window one byte further on as its targets."""

from __future__ import annotations

import re
import zlib
from pathlib import Path
from typing import Any

import numpy
import torch
from numpy.typing import NDArray
from torch import Tensor
from torch.utils.data import Dataset

from recipes.gzipped import unpacked
from recipes.language.tokens import PADDED
from recipes.language.tokens import Windows as PackedWindows
from trainer.data.data import Data
from trainer.messages import Refusal, expand_home

BOOK = Path(__file__).with_name("moby-dick.txt.gz")  # Herman Melville, 1851; in the public domain


class Text(Data):
    """A text file, plain or gzipped, byte by byte: 256 tokens, and no tokenizer. Its end is the evaluation set.

    Inputs and targets are token numbers (B, length). `stride` is the distance between the beginnings of two training
    windows in bytes: with 1 every window of the text is a sample. Those of the evaluation do not overlap. pack: what
    lies between two separators is a document, and windows are those of `PackedData`; a separator ends its document.
    """

    vocab_size, bytes_per_token = 256, 1.0

    def __init__(
        self,
        file: str | None = None,
        length: int = 128,
        stride: int | None = None,
        held: float = 0.1,
        pack: bool = False,
        separator: str = "\n\n",
    ) -> None:
        if length < 1:
            raise Refusal(f"data.length is {length}; it is a number of bytes, 1 or more")
        if not 0 <= held < 1:
            raise Refusal(f"data.held is {held}; it is a fraction of the text, from 0 to less than 1")
        where = BOOK if file is None else expand_home(file)
        text = _read(where)
        cut = len(text) - int(held * len(text))
        self.ignored = PADDED if pack else None
        parts = (text[:cut], text[cut:])
        if pack and stride is not None:
            raise Refusal(f"data.stride={stride}: with data.pack=true every byte is in one sample: data.stride=null")
        if pack and not (separator and separator.encode() in parts[0].numpy().tobytes()):
            raise Refusal(
                f"data.separator={separator!r} is not in {where}, so that it would be one document; give what lies"
                " between its documents, or data.pack=false"
            )
        self._windows, self._held = (
            PackedWindows(Documents(part, separator.encode()), length, False, True)
            if pack
            else Windows(part, length, each)
            for part, each in zip(parts, (length if stride is None else stride, length), strict=True)
        )
        for kind, size, windows in (("train", cut, self._windows), ("evaluate", len(text) - cut, self._held)):
            if not len(windows) and (kind == "train" or size):
                works = f"data.length={size - 1}" if size > 1 else "a longer text"
                raise Refusal(
                    f"{where} has {size:,} bytes to {kind} on with data.held={held}; a sample of"
                    f" data.length={length} needs {length + 1}: {works} would work"
                )

    def train(self) -> Windows | PackedWindows:
        """Windows of the beginning of the text."""
        return self._windows

    def evaluation(self) -> Windows | PackedWindows | None:
        """Windows of its end, one behind the other; None where nothing of it is held back."""
        return self._held if len(self._held) else None

    def encode(self, text: str) -> Tensor:
        """The tokens (T,) of a text: its bytes."""
        return torch.tensor(list(text.encode()), dtype=torch.int64)

    def decode(self, tokens: Tensor) -> str:
        """The text of tokens (T,); bytes that are no text become a mark."""
        return bytes(tokens.tolist()).decode(errors="replace")


class Windows(Dataset):
    """Windows of a text (N,) uint8, so many bytes apart, each with the next byte of every place."""

    def __init__(self, text: Tensor, length: int, stride: int) -> None:
        if stride < 1:
            raise Refusal(f"data.stride is {stride}; it is a number of bytes, 1 or more")
        # a view: windows that overlap share their bytes
        self._windows = text.unfold(0, length + 1, stride) if len(text) > length else text.new_empty(0, length + 1)

    def __len__(self) -> int:
        return len(self._windows)

    def batch(self, indices: Tensor) -> tuple[Tensor, Tensor]:
        """Inputs and targets (B, length) int64."""
        windows = self._windows[indices].long()  # (B, length + 1)
        return windows[:, :-1].contiguous(), windows[:, 1:].contiguous()

    def __getitem__(self, index: int) -> tuple[Tensor, Tensor]:
        inputs, targets = self.batch(torch.tensor([index]))
        return inputs[0], targets[0]


class Documents:
    """A text (N,) uint8 as documents, each with the separator that ends it."""

    def __init__(self, text: Tensor, separator: bytes) -> None:
        self._text: NDArray[numpy.uint8] = text.numpy()
        found = re.finditer(re.escape(separator), self._text.tobytes())
        self.starts = numpy.array([0, *(one.end() for one in found)], numpy.int64)
        self.ends, self.tokens = numpy.array([len(text)], numpy.int64), len(text)

    def read(self, start: int, count: int) -> NDArray[Any]:
        """So many bytes from a place on."""
        return self._text[start : start + count]


def _read(path: Path) -> Tensor:
    """The bytes of a file (N,) uint8. Refusal where it cannot be read."""
    try:
        content = unpacked(path) if path.suffix == ".gz" else bytearray(path.read_bytes())
    except (OSError, EOFError, ValueError, zlib.error) as error:
        raise Refusal(f"data.file={path} cannot be read as text: {error}") from error
    return torch.frombuffer(content, dtype=torch.uint8) if content else torch.empty(0, dtype=torch.uint8)
