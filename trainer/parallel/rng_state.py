"""What one forward has drawn, and what all draws of it have in common."""

from __future__ import annotations

from collections import Counter
from functools import cached_property
from hashlib import blake2b

import torch
from torch import Tensor

from trainer.data.sample_random import Random
from trainer.data.seeds import mix, signed
from trainer.parallel.per_sample_draw import Cut
from trainer.parallel.sequence_pieces import computed

OUTSIDE = "the task"  # draws when no module of the network runs; no module has such a name
_CALL, _DRAW = 0xD6E8FEB86659FD93, 0xA0761D6478BD642F  # calls of a module are so far apart, and draws of a call


class Drawn:
    """The forward of one micro-batch: its samples, and what has been drawn in it."""

    def __init__(self, seed: int, step: int, indices: Tensor) -> None:
        self.batch, self.seed = len(indices), mix(seed, step)
        self._from = seed, step, indices
        self.draws: list[tuple[int, Cut | None]] = []
        self.calls: Counter[int] = Counter()  # by module
        self._drawn: Counter[int] = Counter()  # by call
        self._piece = computed()  # of a stretch: the last one in which something was counted
        self._before = Counter(self.calls), Counter(self._drawn)  # as its module began

    @cached_property
    def samples(self) -> Random:
        """Of each sample."""
        return Random(*self._from)

    @cached_property
    def common(self) -> Random:
        """Of what has no samples."""
        seed, step, indices = self._from
        return Random(seed, step, torch.full((1,), -1, dtype=torch.int64, device=indices.device))

    def called(self, module: int) -> int:
        """The number of one more call of this module."""
        self._look()
        self.calls[module] += 1
        return module + self.calls[module] * _CALL

    def add(self, call: int, cut: Cut | None) -> None:
        """One more draw, in this call."""
        self._look()
        self._drawn[call] += 1
        self.draws.append((signed(call + self._drawn[call] * _DRAW), cut))

    def _look(self) -> None:
        """In each piece of a stretch a module counts from where it began: the pieces are parts of the same draws."""
        piece, last = computed(), self._piece
        if piece == last:
            return
        self._piece = piece
        if piece and last and piece[0] is last[0]:
            self.calls, self._drawn = (Counter(each) for each in self._before)
        elif piece:
            self._before = Counter(self.calls), Counter(self._drawn)

    def add_told(self, name: str | None, call: int, draw: int, cut: Cut | None) -> None:
        """One more draw, of which it is known where it stands."""
        module = number(OUTSIDE) if name is None else number(name) + call * _CALL
        self.draws.append((signed(module + draw * _DRAW), cut))


def number(name: str) -> int:
    """A module's name as a number of 64 bits."""
    return int.from_bytes(blake2b(name.encode(), digest_size=8).digest(), "little")
