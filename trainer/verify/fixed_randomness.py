"""Forwards without randomness: dropout switched off, and random draws replaced by their middle values."""

from __future__ import annotations

import random
from typing import Any

import numpy
import torch
from torch import Tensor, nn

from trainer.data.rng import seed_torch
from trainer.parallel.dispatch_mode import TorchDispatchMode

# where classes keep their probability: nn.Dropout and its like and torchvision's StochasticDepth in `p`, timm's
# DropPath in `drop_prob`, nn.MultiheadAttention and recurrent layers in `dropout`
_PLACES = {"drop": ("p", "drop_prob"), "stochasticdepth": ("p",), "attention": ("dropout",)}


def disable_dropout(network: nn.Module) -> int:
    """Set the probability of all layers that drop something to 0, in place; how many there were."""
    count = 0
    for module in network.modules():
        kind = type(module).__name__.lower()
        attributes = {name for word, names in _PLACES.items() if word in kind for name in names}
        attributes |= {"dropout"} if isinstance(module, nn.RNNBase) else set()
        active = [name for name in attributes if isinstance(vars(module).get(name), float) and vars(module)[name] > 0]
        for name in active:
            setattr(module, name, 0.0)
        count += bool(active)
    return count


_AT = torch.ops.aten
_ONES = (_AT.bernoulli, _AT.bernoulli_)  # nothing is left out
_ZEROS = (_AT.normal, _AT.normal_, _AT.randn, _AT.randn_like)
_HALVES = (_AT.uniform_, _AT.rand, _AT.rand_like, _AT.exponential_, _AT.geometric_, _AT.log_normal_, _AT.cauchy_)
_WHOLE = (_AT.random_, _AT.randint, _AT.randint_like)


class UsualRandomness:
    """Random numbers as torch gives them: nothing is replaced."""

    def __enter__(self) -> None:
        """Around a forward and its backward."""

    def __exit__(self, *error: object) -> None:
        """As before."""

    def begin(self) -> None:
        """A forward begins."""


USUAL_RANDOMNESS = UsualRandomness()


class FixedRandomness(UsualRandomness):
    """Every draw of torch gives its middle, and Python's and NumPy's generators begin anew with every forward."""

    def __init__(self) -> None:
        self.used_generators: set[str] = set()
        self._mode = _MiddleValues(self.used_generators)
        self._seeded: tuple[Any, str] | None = None

    def __enter__(self) -> None:
        self._seeded = None
        self._mode.__enter__()

    def __exit__(self, *error: Any) -> None:
        self._mode.__exit__(*error)
        self._note_use()

    def begin(self) -> None:
        """A forward begins."""
        self._note_use()
        # of Python and NumPy no call can be replaced, but each forward can get the same numbers
        random.seed(0)
        numpy.random.seed(0)
        self._seeded = _python_states()

    def _note_use(self) -> None:
        if self._seeded is None:
            return
        for name, before, now in zip(("Python's random", "NumPy's"), self._seeded, _python_states(), strict=True):
            if before != now:
                self.used_generators.add(name)


class _MiddleValues(TorchDispatchMode):
    def __init__(self, used: set[str]) -> None:
        super().__init__()
        self._used = used

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if torch.Tag.nondeterministic_seeded not in func.tags or kwargs.get("generator") is not None:
            return func(*args, **kwargs)
        return self._draw(func, *args, **kwargs)

    def _draw(self, func: Any, *args: Any, **kwargs: Any) -> Any:
        """The middle of what it may give."""
        packet = func.overloadpacket
        if packet is _AT.native_dropout:
            x, p, train = args
            if train is False or not 0 < p < 1:  # nothing is drawn
                return func(*args, **kwargs)
            self._used.add("torch's")
            return x * (1 / (1 - p)), torch.ones_like(x, dtype=torch.bool)  # as its backward will have it
        # of what more than draws it is at least the same each time; whether it draws at all its generator shows
        device = next((x.device for x in args if isinstance(x, Tensor)), torch.device(kwargs.get("device") or "cpu"))
        seed_torch(0, device)
        before, values = _torch_state(device), func(*args, **kwargs)
        if not torch.equal(_torch_state(device), before):
            self._used.add("torch's")
        if packet is _AT.randperm:
            # not as they are: samples that are mixed with others of their batch must show that
            return torch.arange(len(values), dtype=values.dtype, device=values.device).roll(1)
        middle = _middle_value(packet, args)
        return values if middle is None else values.fill_(middle)


def _torch_state(device: torch.device) -> Tensor:
    module = torch if device.type == "cpu" else torch.get_device_module(device)
    return module.get_rng_state()


def _middle_value(packet: Any, args: Any) -> float | None:
    """The value that stands for all that an operator may draw; None: it does more than draw."""
    # for integers the smallest one; for others what they are on average, so that results stay sensible
    if packet in _WHOLE:  # (low, high), (high) or neither
        bounds = [bound for bound in args if isinstance(bound, int)]
        return bounds[0] if len(bounds) > 1 else 0
    return next((middle for kinds, middle in ((_ONES, 1.0), (_ZEROS, 0.0), (_HALVES, 0.5)) if packet in kinds), None)


def _python_states() -> tuple[Any, str]:
    return random.getstate(), repr(numpy.random.get_state(legacy=False))
