"""Windows of tokens that lie in files, made by scripts/prepare_tokens: for texts far larger than memory."""

from __future__ import annotations

from functools import cached_property
from typing import Any, Protocol

import numpy
import torch
from numpy.typing import NDArray
from torch import Tensor
from torch.utils.data import Dataset

from recipes.language.shards import opened
from trainer.data.data import Data
from trainer.messages import Refusal, expand_home

PADDED = -100  # the target where a window has no more tokens


class Stream(Protocol):
    """The tokens of a split, one behind the other, read by place."""

    tokens: int
    starts: NDArray[numpy.int64]  # (documents,) where each begins
    ends: NDArray[numpy.int64]  # (pieces,) where what can be read at once ends

    def read(self, start: int, count: int) -> NDArray[Any]:
        """So many tokens from a place on; they must lie in one piece."""
        ...


class PackedData(Data):
    """Windows of a stream's tokens, each with the same window one token further on as its targets: (B, length).

    boundaries: a window begins with its document or behind the window before, and ends with its document at the latest;
    what is left is padding that does not count. Without, windows run on from one document into the next. pack: so they
    do, and inputs are tokens and the places in the window at which their documents begin, (B, length) each. What a
    window's end cuts off begins the next window, as a document of its own. The last token of a document predicts none.
    """

    def __init__(
        self, train: Stream, evaluation: Stream | None, where: str, length: int, boundaries: bool, pack: bool
    ) -> None:
        if length < 1:
            raise Refusal(f"data.length is {length}; it is a number of tokens, 1 or more")
        if pack and boundaries:
            raise Refusal(
                "data.pack=true fills samples with documents, and data.boundaries=true gives each its own sample:"
                " data.boundaries=false"
            )
        self._train = Windows(train, length, boundaries, pack)
        self._held = None if evaluation is None else Windows(evaluation, length, boundaries, pack)
        if not len(self._train):
            works = f"data.length={self._train.longest}" if self._train.longest > 0 else "more text"
            raise Refusal(
                f"{where} has {train.tokens:,} tokens to train on, and no"
                f" data.length + 1 = {length + 1:,} of them follow each other in one file: {works} would work"
            )
        self.ignored = PADDED if boundaries or pack else None

    def train(self) -> Windows:
        """Windows of the documents for training."""
        return self._train

    def evaluation(self) -> Windows | None:
        """Windows of the documents that were held back; None where there are none."""
        return self._held or None  # an empty one is none


class Tokens(PackedData):
    """The tokens of a folder that scripts/prepare_tokens has made, in windows."""

    def __init__(self, folder: str, length: int = 1024, boundaries: bool = False, pack: bool = False) -> None:
        index, splits = opened(expand_home(folder))
        held = splits.get("evaluation")
        super().__init__(splits["train"], held, f"data.folder={folder}", length, boundaries, pack)
        self.vocab_size = int(index["vocab_size"])
        known = held or splits["train"]
        self.bytes_per_token = known.bytes / max(1, known.tokens)
        self._tokenizer: str | None = index.get("tokenizer")

    def encode(self, text: str) -> Tensor:
        """The tokens (T,) of a text."""
        if self._tokenizer is None:
            return torch.tensor(list(text.encode()), dtype=torch.int64)
        return torch.tensor(self._loaded(text)["input_ids"], dtype=torch.int64)

    def decode(self, tokens: Tensor) -> str:
        """The text of tokens (T,)."""
        if self._tokenizer is None:
            return bytes(token for token in tokens.tolist() if token < 256).decode(errors="replace")
        return self._loaded.decode(tokens.tolist())

    @cached_property
    def _loaded(self) -> Any:
        from recipes.text.tokenizer import loaded

        return loaded(str(self._tokenizer), "the tokenizer of data.folder, ")


class Windows(Dataset):
    """Windows of one split by number, read when they are asked for."""

    def __init__(self, stream: Stream, length: int, boundaries: bool, pack: bool) -> None:
        self._stream, self._length, self._pack = stream, length, pack
        # what no window may cross: (pieces + 1,) places in tokens of the split
        edges = numpy.concatenate(([0], stream.ends))
        edges = numpy.union1d(edges, stream.starts) if boundaries else edges
        sizes = numpy.diff(edges) - 1  # the last token of a piece is only a target
        # windows of each piece; without padding the last one would lack tokens
        counts = -(-sizes // length) if boundaries or pack else sizes // length
        self._starts, self._ends, self.longest = edges[:-1], edges[1:], int(sizes.max(initial=0))
        self._before: NDArray[numpy.int64] = numpy.concatenate(([0], numpy.cumsum(counts.clip(min=0))))

    def __len__(self) -> int:
        return int(self._before[-1])

    def batch(self, indices: Tensor) -> tuple[Any, Tensor]:
        """Inputs and targets (B, length) int64; behind the end of a document 0 and -100."""
        inputs = torch.zeros(len(indices), self._length, dtype=torch.int64)
        targets = torch.full_like(inputs, PADDED)
        # all places of the batch at once; only the tokens themselves are read one window at a time
        numbers = indices.numpy()
        pieces = numpy.searchsorted(self._before, numbers, side="right") - 1
        starts = self._starts[pieces] + (numbers - self._before[pieces]) * self._length
        counts = numpy.minimum(self._length, self._ends[pieces] - starts - 1)
        for row, (start, count) in enumerate(zip(starts.tolist(), counts.tolist(), strict=True)):
            tokens = torch.from_numpy(self._stream.read(start, count + 1).astype(numpy.int64))
            inputs[row, :count], targets[row, :count] = tokens[:-1], tokens[1:]
        return ((inputs, self._begins(starts, counts, targets)) if self._pack else inputs), targets

    def _begins(self, starts: NDArray[numpy.int64], counts: NDArray[numpy.int64], targets: Tensor) -> Tensor:
        """Where in its window the document of each token begins, (B, length); targets in other documents become -100.

        starts, counts: of each window, in the split. Padding is a document of its own.
        """
        first = numpy.zeros((len(starts), self._length + 1), dtype=numpy.int64)
        first[numpy.arange(len(starts)), counts] = counts
        # the documents that begin behind a window's first token, up to its last target
        lows, highs = (numpy.searchsorted(self._stream.starts, at, side="right") for at in (starts, starts + counts))
        for row, (start, low, high) in enumerate(zip(starts.tolist(), lows.tolist(), highs.tolist(), strict=True)):
            places = self._stream.starts[low:high] - start
            first[row, places] = places
            targets[row, torch.from_numpy(places - 1)] = PADDED
        return torch.from_numpy(numpy.maximum.accumulate(first, axis=1)[:, : self._length].copy())

    def __getitem__(self, index: int) -> tuple[Any, Tensor]:
        inputs, targets = self.batch(torch.tensor([index]))
        return (tuple(x[0] for x in inputs) if self._pack else inputs[0]), targets[0]
