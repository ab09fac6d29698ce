"""Random numbers taken out: what a forward draws is the same for every sample, so it cannot tell two forwards apart."""

from __future__ import annotations

import random
from typing import Any

import numpy
import torch
from torch import Tensor

from trainer.parallel.below import Operators

_AT = torch.ops.aten
_ONES = (_AT.bernoulli, _AT.bernoulli_)  # nothing is left out
_ZEROS = (_AT.normal, _AT.normal_, _AT.randn, _AT.randn_like)


class AsDrawn:
    """Random numbers as they come."""

    def __enter__(self) -> None:
        """Around a forward and its backward."""

    def __exit__(self, *error: object) -> None:
        """As before."""

    def begin(self) -> None:
        """A forward begins."""


AS_DRAWN = AsDrawn()


class Constant(AsDrawn):
    """Every draw of torch gives its middle, and Python's and NumPy's generators begin anew with every forward."""

    def __init__(self) -> None:
        self.moved: set[str] = set()  # whose numbers were drawn
        self._mode = _Middle(self.moved)
        self._seeded: tuple[Any, str] | None = None

    def __enter__(self) -> None:
        self._seeded = None
        self._mode.__enter__()

    def __exit__(self, *error: Any) -> None:
        self._mode.__exit__(*error)
        self._look()

    def begin(self) -> None:
        """A forward begins."""
        self._look()
        random.seed(0)
        numpy.random.seed(0)
        self._seeded = _states()

    def _look(self) -> None:
        if self._seeded is None:
            return
        for name, before, now in zip(("Python's random", "NumPy's"), self._seeded, _states(), strict=True):
            if before != now:
                self.moved.add(name)


class _Middle(Operators):
    def __init__(self, moved: set[str]) -> None:
        super().__init__()
        self._moved = moved

    def drawn(self, func: Any, *args: Any, **kwargs: Any) -> Any:
        """The middle of what it may give."""
        packet = func.overloadpacket
        if packet is _AT.native_dropout:
            x, p, train = args
            if train is False or not 0 < p < 1:
                return func(*args, **kwargs)
            self._moved.add("torch's")
            return x * (1 / (1 - p)), torch.ones_like(x, dtype=torch.bool)  # as its backward will have it
        self._moved.add("torch's")
        drawn = func(*args, **kwargs)
        if packet is _AT.randperm:
            return torch.arange(len(drawn), dtype=drawn.dtype, device=drawn.device)
        if isinstance(drawn, Tensor) and packet not in (_AT.multinomial,):
            drawn.fill_(_middle(packet, drawn, args))
        return drawn


def _middle(packet: Any, drawn: Tensor, args: Any) -> float:
    if packet in _ONES:
        return 1.0
    if packet in _ZEROS:
        return 0.0
    if packet in (_AT.randint, _AT.randint_like, _AT.random_):
        numbers = [each for each in args if isinstance(each, int)]
        return numbers[0] if len(numbers) > 1 else 0
    return 0.5 if drawn.is_floating_point() else 0


def _states() -> tuple[Any, str]:
    return random.getstate(), repr(numpy.random.get_state(legacy=False))
