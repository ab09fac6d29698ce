"""A tensor of a decoder, and the tensors of transformers that hold the same numbers."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from torch import Tensor


@dataclass(frozen=True)
class Pair:
    """One of our tensors, and those of theirs that hold the same numbers."""

    theirs: tuple[str, ...]
    join: Callable[..., Tensor]  # theirs → ours
    part: Callable[[Tensor], tuple[Tensor, ...]]  # ours → theirs


def same(name: str) -> Pair:
    """A tensor that is theirs as it is."""
    return Pair((name,), lambda x: x, lambda x: (x,))
