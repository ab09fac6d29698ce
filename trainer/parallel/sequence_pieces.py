"""Which pieces of a sequence a context rank has, and which of them is being computed."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from math import lcm
from typing import NamedTuple


class Pieces(NamedTuple):
    """Some of so many equal pieces, by their numbers from the front."""

    numbers: tuple[int, ...]
    of: int

    def part(self, other: Pieces) -> Pieces:
        """Some of these, which lie one behind the other, and of which all together are pieces of once more."""
        finer = lcm(len(self.numbers), other.of) // len(self.numbers)
        parts = [number * finer + at for number in self.numbers for at in range(finer)]
        each = len(parts) // other.of
        own = [part for number in other.numbers for part in parts[number * each : (number + 1) * each]]
        return Pieces(tuple(own), self.of * finer)


def pieces(rank: int, ranks: int, tokens: int, most: int) -> Pieces:
    """Those of a rank that has so many tokens of each sequence: all ranks have as many, so they know alike.

    Two pieces, one from the front and one from the back, so that causal attention is the same work for all ranks
    (zigzag, as Grattafiori et al. 2024, arXiv:2407.21783, section 3.3.2); one where the tokens are odd, or `most` is 1.
    """
    if most == 2 and tokens % 2 == 0:
        return Pieces((rank, 2 * ranks - 1 - rank), 2 * ranks)
    return Pieces((rank,), ranks)


# the call of a module, the same object for all its pieces; and which one of the rank's pieces it computes at present
_COMPUTED: ContextVar[tuple[object, int] | None] = ContextVar("computed", default=None)


@contextmanager
def computing(call: object, at: int) -> Iterator[None]:
    """Inside it a module computes one piece: what it draws is as if the module had all pieces at once."""
    token = _COMPUTED.set((call, at))
    try:
        yield
    finally:
        _COMPUTED.reset(token)


def computed() -> tuple[object, int] | None:
    """The call and its piece; None where a rank's pieces are computed together."""
    return _COMPUTED.get()
