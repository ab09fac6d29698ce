"""Keys and values of tokens that went by, so that a text grows token by token without being read again."""

from __future__ import annotations

import torch
from torch import Tensor


class NoPast:
    """Training: what is given is all there is."""

    tokens = 0  # that went by

    def extended(self, keys: Tensor, values: Tensor) -> tuple[Tensor, Tensor]:
        """All keys and values so far: (B, groups, T, head) each."""
        return keys, values


class Past(NoPast):
    """Of one layer of attention; after the first tokens it takes one at a time."""

    def __init__(self) -> None:
        self._kept: tuple[Tensor, Tensor] | None = None

    def extended(self, keys: Tensor, values: Tensor) -> tuple[Tensor, Tensor]:
        """Keep these behind those that went by."""
        if self._kept is not None:
            keys, values = (torch.cat(both, dim=2) for both in zip(self._kept, (keys, values), strict=True))
        self._kept, self.tokens = (keys, values), keys.shape[2]
        return self._kept
