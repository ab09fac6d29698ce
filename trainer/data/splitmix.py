"""SplitMix64 (Steele, Lea, Flood 2014): a counter that grows by the golden ratio, and a mixing of its bits.

For whole numbers and for tensors alike; every seed, random number and digest of this package comes from it.
"""

from __future__ import annotations

from torch import Tensor

GOLDEN = 0x9E3779B97F4A7C15
POSITIVE = 2**63 - 1  # all bits but the sign
_FIRST, _SECOND = 0xBF58476D1CE4E5B9, 0x94D049BB133111EB
_WORD = 2**64 - 1


def mixed_int(word: int) -> int:
    word &= _WORD
    word = ((word ^ (word >> 30)) * _FIRST) & _WORD
    word = ((word ^ (word >> 27)) * _SECOND) & _WORD
    return word ^ (word >> 31)


def mixed(words: Tensor) -> Tensor:
    """The same mixing of int64 words; the masks make the shifts logical."""
    words = ((words >> 30).bitwise_and_(2**34 - 1).bitwise_xor_(words)).mul_(signed(_FIRST))
    words = ((words >> 27).bitwise_and_(2**37 - 1).bitwise_xor_(words)).mul_(signed(_SECOND))
    return (words >> 31).bitwise_and_(2**33 - 1).bitwise_xor_(words)


def signed(word: int) -> int:
    """The same 64 bits as the int64 that torch understands."""
    word &= _WORD
    return word - 2**64 if word > POSITIVE else word
