"""A text file as bytes: windows of it, each with the same window one byte further on as its targets."""

from __future__ import annotations

import zlib
from pathlib import Path

import torch
from torch import Tensor
from torch.utils.data import Dataset

from recipes.gzipped import unpacked
from trainer.data.data import Data
from trainer.messages import Refusal

BOOK = Path(__file__).with_name("moby-dick.txt.gz")  # Herman Melville, 1851; in the public domain


class Text(Data):
    """A text file, plain or gzipped, byte by byte: 256 tokens, and no tokenizer. Its end is the evaluation set.

    Inputs and targets are token numbers (B, length). `stride` is the distance between the beginnings of two training
    windows in bytes: with 1 every window of the text is a sample. Those of the evaluation do not overlap.
    """

    vocab_size, bytes_per_token = 256, 1.0

    def __init__(
        self, file: str | None = None, length: int = 128, stride: int | None = None, held: float = 0.1
    ) -> None:
        if length < 1:
            raise Refusal(f"data.length is {length}; it is a number of bytes, 1 or more")
        if not 0 <= held < 1:
            raise Refusal(f"data.held is {held}; it is a fraction of the text, from 0 to less than 1")
        where = BOOK if file is None else Path(file)
        text = _read(where)
        cut = len(text) - int(held * len(text))
        self._windows = Windows(text[:cut], length, length if stride is None else stride)
        self._held = Windows(text[cut:], length, length)
        for kind, size, windows in (("train", cut, self._windows), ("evaluate", len(text) - cut, self._held)):
            if not len(windows) and (kind == "train" or size):
                works = f"data.length={size - 1}" if size > 1 else "a longer text"
                raise Refusal(
                    f"{where} has {size:,} bytes to {kind} on with data.held={held}; a sample of"
                    f" data.length={length} needs {length + 1}: {works} would work"
                )

    def train(self) -> Windows:
        """Windows of the beginning of the text."""
        return self._windows

    def evaluation(self) -> Windows | None:
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


def _read(path: Path) -> Tensor:
    """The bytes of a file (N,) uint8. Refusal where it cannot be read."""
    try:
        content = unpacked(path) if path.suffix == ".gz" else bytearray(path.read_bytes())
    except (OSError, EOFError, ValueError, zlib.error) as error:
        raise Refusal(f"data.file={path} cannot be read as text: {error}") from error
    return torch.frombuffer(content, dtype=torch.uint8) if content else torch.empty(0, dtype=torch.uint8)
