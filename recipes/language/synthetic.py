"""Tokens made from a seed, for tests and measurements."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.utils.data import Dataset

from trainer.data.data import Data
from trainer.data.rng import Random
from trainer.messages import Refusal

_NOISE = 0.25  # of the tokens, where the rest can be learned
_DOCUMENT = 32  # tokens of a document on average
_IGNORED = -100  # the target of a document's last token


class SyntheticTokens(Data):
    """Windows of made tokens, each with the same window one token further on as its targets: (B, length).

    A window follows from the seed and its number, so that no file and no memory holds any. learnable: tokens count
    upwards from a random one, and a quarter of them is noise; without, all are noise. pack: a window is cut into
    documents, and inputs are tokens and the places at which their documents begin, (B, length) each.
    """

    def __init__(
        self,
        size: int,
        evaluation_size: int,
        length: int,
        vocab_size: int,
        learnable: bool = True,
        seed: int = 0,
        pack: bool = False,
    ) -> None:
        if length < 1 or vocab_size < 1:
            raise Refusal(f"data.length={length}, data.vocab_size={vocab_size}: both are numbers of tokens, 1 or more")
        if size < 0 or evaluation_size < 0:
            raise Refusal(
                f"data.size={size}, data.evaluation_size={evaluation_size}: both are numbers of samples, 0 or more"
            )
        self.vocab_size, self.ignored = vocab_size, _IGNORED if pack else None
        sizes = (size, evaluation_size)
        self._train, self._held = (
            Windows(count, length, vocab_size, learnable, seed, part, pack) for part, count in enumerate(sizes)
        )

    def train(self) -> Windows:
        """The training windows."""
        return self._train

    def evaluation(self) -> Windows | None:
        """Other windows of the same kind; None where their number is 0."""
        return self._held if len(self._held) else None


class Windows(Dataset):
    """So many windows; those of another part are others."""

    def __init__(
        self, size: int, length: int, vocab_size: int, learnable: bool, seed: int, part: int, pack: bool
    ) -> None:
        self._size, self._length, self._vocabulary, self._pack = size, length, vocab_size, pack
        self._learnable, self._seed, self._part = learnable, seed, part

    def __len__(self) -> int:
        return self._size

    def batch(self, indices: Tensor) -> tuple[Any, Tensor]:
        """Inputs and targets (B, length) int64."""
        random = Random(self._seed, self._part, indices)
        shape = (len(indices), self._length + 1)
        tokens = random.integers(0, self._vocabulary, *shape)
        if self._learnable:
            counted = (tokens[:, :1] + torch.arange(shape[1])) % self._vocabulary
            tokens = torch.where(random.uniform(*shape) < _NOISE, tokens, counted)
        inputs, targets = tokens[:, :-1].contiguous(), tokens[:, 1:].contiguous()
        if not self._pack:
            return inputs, targets
        new = random.uniform(*shape) < 1 / _DOCUMENT  # (B, length + 1): does a document begin here?
        begins = torch.where(new, torch.arange(shape[1]), 0).cummax(1).values[:, :-1].contiguous()
        return (inputs, begins), targets.masked_fill(new[:, 1:], _IGNORED)

    def __getitem__(self, index: int) -> tuple[Any, Tensor]:
        inputs, targets = self.batch(torch.tensor([index]))
        return (tuple(x[0] for x in inputs) if self._pack else inputs[0]), targets[0]
