"""torch's random operators, seen by the dispatcher and replaced by draws that belong to samples."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from trainer.parallel.rng.random_draw import DrawSource, RandomDraw


class RandomOperatorInterceptor(TorchDispatchMode):
    """Inside it random operators that have no generator of their own are passed to `draw`."""

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if torch.Tag.nondeterministic_seeded not in func.tags or kwargs.get("generator") is not None:
            return func(*args, **kwargs)
        return self.draw(func, *args, **kwargs)

    def draw(self, func: Any, *args: Any, **kwargs: Any) -> Any:
        """The result of such an operator."""
        return func(*args, **kwargs)


class RandomDispatchMode(RandomOperatorInterceptor):
    """Inside it random operators draw from a source. many: see `RandomDraw`."""

    def __init__(self, source: DrawSource, many: bool = False, time_first: bool | None = None) -> None:
        super().__init__()
        self._source, self._many, self._time_first = source, many, time_first

    def draw(self, func: Any, *args: Any, **kwargs: Any) -> Any:
        """Numbers of the source, unless no forward of samples is under way."""
        draw = self._source.next_draw()
        if draw is None:
            return func(*args, **kwargs)
        draw.many = self._many
        draw.time_first = draw.time_first if self._time_first is None else self._time_first
        make = REPLACEMENTS.get(func.overloadpacket)
        if make is not None:
            return make(draw, func, *args, **kwargs)
        device = next((each.device for each in args if isinstance(each, Tensor)), kwargs.get("device"))
        with draw.seeded(torch.device(device or "cpu")):
            return func(*args, **kwargs)


# The replacements: (the draw, the operator, its arguments). Names are the operators'.


def _bernoulli_(draw: RandomDraw, func: Any, x: Tensor, p: Any = 0.5) -> Tensor:
    return x.copy_(_bernoulli_mask(draw, p, x.shape))


def _bernoulli(draw: RandomDraw, func: Any, x: Tensor, p: Any = None) -> Tensor:
    return _bernoulli_mask(draw, x if p is None else p, x.shape).to(x.dtype)


def _bernoulli_mask(draw: RandomDraw, p: Any, shape: torch.Size) -> Tensor:
    return draw.uniform(tuple(shape)) < p if isinstance(p, Tensor) else draw.bernoulli(p, tuple(shape))


def _native_dropout(draw: RandomDraw, func: Any, x: Tensor, p: float, train: bool | None) -> tuple[Tensor, Tensor]:
    if train is False or not 0 < p < 1:
        return func(x, p, train)
    kept = draw.bernoulli(1 - p, tuple(x.shape))
    return x * kept * (1 / (1 - p)), kept


def _uniform_(draw: RandomDraw, func: Any, x: Tensor, low: float = 0.0, high: float = 1.0) -> Tensor:
    """In [low, high), as multiples of the smallest step that the type has below 1, as torch's own on CPUs."""
    cell = torch.finfo(x.dtype).eps / 2
    drawn = draw.uniform(tuple(x.shape)).to(_wide(x))
    if cell > 2.0**-24:  # the draw has 24 bits: in a narrower type the last ones would be rounded up to 1
        drawn = drawn.div_(cell).floor_().mul_(cell)
    x.copy_(drawn.mul_(high - low).add_(low))
    return x.masked_fill_(x >= high, low)  # it may be rounded up to that all the same, as 3 - 2^-24 is


def _normal_(draw: RandomDraw, func: Any, x: Tensor, mean: Any = 0.0, std: Any = 1.0) -> Tensor:
    return x.copy_(draw.normal(tuple(x.shape)).to(_wide(x)) * std + mean)


def _normal(draw: RandomDraw, func: Any, mean: Any, std: Any = 1.0, size: Any = None, **kwargs: Any) -> Tensor:
    if size is not None:
        return _normal_(draw, func, torch.empty(size, **kwargs), mean, std)
    parameters = [x for x in (mean, std) if isinstance(x, Tensor)]
    x = parameters[0].new_empty(torch.broadcast_shapes(*(parameter.shape for parameter in parameters)))
    return _normal_(draw, func, x, mean, std)


def _exponential_(draw: RandomDraw, func: Any, x: Tensor, rate: float = 1.0) -> Tensor:
    """In (0, ∞): where the uniform number is 0 the result is half of the next one, and in no type rounded down to 0."""
    drawn = draw.uniform(tuple(x.shape)).to(_wide(x)).clamp_min_(2.0**-25)
    x.copy_(drawn.neg_().log1p_().div_(-rate))
    least = torch.finfo(x.dtype)
    return x.clamp_min_(least.smallest_normal * least.eps)


def _wide(x: Tensor) -> torch.dtype:
    """What numbers are computed in before they are rounded once, to the tensor's own type."""
    return torch.promote_types(x.dtype, torch.float32)


def _random_(draw: RandomDraw, func: Any, x: Tensor, *bounds: int) -> Tensor:
    if not bounds or bounds[-1] is None:  # all numbers that the type has: torch draws them, seeded
        with draw.seeded(x.device):
            return func(x, *bounds)
    low, high = (0, *bounds)[-2:]
    return x.copy_(draw.integers(low, high, tuple(x.shape)))


def _new(fill: Callable[..., Tensor], draw: RandomDraw, func: Any, *args: Any, **kwargs: Any) -> Tensor:
    """rand, randn and randint: called with (*bounds, shape) and a type and a device."""
    bounds, shape = args[:-1], args[-1]
    return fill(draw, func, torch.empty(shape, **kwargs), *bounds)


def _new_like(
    fill: Callable[..., Tensor], draw: RandomDraw, func: Any, x: Tensor, *bounds: int, **kwargs: Any
) -> Tensor:
    """rand_like and others: in the shape of another tensor."""
    return fill(draw, func, torch.empty_like(x, **kwargs), *bounds)


_AT = torch.ops.aten
# operator → its replacement, called with the draw, the operator, and its arguments
REPLACEMENTS: dict[Any, Callable[..., Any]] = {
    _AT.bernoulli_: _bernoulli_,
    _AT.bernoulli: _bernoulli,
    _AT.native_dropout: _native_dropout,
    _AT.uniform_: _uniform_,
    _AT.rand: partial(_new, _uniform_),
    _AT.rand_like: partial(_new_like, _uniform_),
    _AT.normal_: _normal_,
    _AT.normal: _normal,
    _AT.randn: partial(_new, _normal_),
    _AT.randn_like: partial(_new_like, _normal_),
    _AT.exponential_: _exponential_,
    _AT.random_: _random_,
    _AT.randint: partial(_new, _random_),
    _AT.randint_like: partial(_new_like, _random_),
}
