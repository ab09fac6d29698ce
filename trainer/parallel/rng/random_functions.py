"""torch's functions and operators that draw random numbers, replaced in a forward by draws of its samples."""

from __future__ import annotations

import logging
from collections.abc import Callable
from functools import cache, partial
from types import FunctionType
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor, Shard
from torch.nn import functional
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode

from trainer.parallel.context_parallel import Pieces
from trainer.parallel.rng.random_draw import ActivationShard, DrawSource, RandomDraw, SequenceShard


class RandomOperatorInterceptor(TorchDispatchMode):
    """Inside it operators that draw random numbers, from no generator of their own, are done by `drawn`."""

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if torch.Tag.nondeterministic_seeded not in func.tags or kwargs.get("generator") is not None:
            return func(*args, **kwargs)
        return self.drawn(func, *args, **kwargs)

    def drawn(self, func: Any, *args: Any, **kwargs: Any) -> Any:
        """What such an operator gives."""
        return func(*args, **kwargs)


class RandomDispatchMode(RandomOperatorInterceptor):
    """Inside it operators draw from a source: those that a function of torch consists of."""

    def __init__(self, source: DrawSource, many: bool = False, time_first: bool | None = None) -> None:
        super().__init__()
        self._source, self._many, self._time_first = source, many, time_first

    def drawn(self, func: Any, *args: Any, **kwargs: Any) -> Any:
        """From the source, unless it has nothing at present."""
        draw = self._source.next_draw()
        if draw is None:
            return func(*args, **kwargs)
        draw.many = self._many
        draw.time_first = draw.time_first if self._time_first is None else self._time_first
        make = _OPERATORS.get(func.overloadpacket)
        if make is not None:
            return make(draw, func, *args, **kwargs)
        device = next((each.device for each in args if isinstance(each, Tensor)), kwargs.get("device"))
        with draw.seeded(torch.device(device or "cpu")):
            return func(*args, **kwargs)


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
    """In [low, high), as multiples of what the type's digits can tell apart below 1: torch's own on CPUs are that."""
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
    given = [x for x in (mean, std) if isinstance(x, Tensor)]
    x = given[0].new_empty(torch.broadcast_shapes(*(each.shape for each in given)))
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
    if not bounds or bounds[-1] is None:  # as many numbers as the type has
        with draw.seeded(x.device):
            return func(x, *bounds)
    low, high = (0, *bounds)[-2:]
    return x.copy_(draw.integers(low, high, tuple(x.shape)))


def _new(fill: Callable[..., Tensor], draw: RandomDraw, func: Any, *args: Any, **kwargs: Any) -> Tensor:
    """rand, randn and randint: (bounds, shape), what the tensor is like."""
    bounds, shape = args[:-1], args[-1]
    return fill(draw, func, torch.empty(shape, **kwargs), *bounds)


def _new_like(
    fill: Callable[..., Tensor], draw: RandomDraw, func: Any, x: Tensor, *bounds: int, **kwargs: Any
) -> Tensor:
    """The same, like another tensor."""
    return fill(draw, func, torch.empty_like(x, **kwargs), *bounds)


_AT = torch.ops.aten
_OPERATORS: dict[Any, Callable[..., Any]] = {
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


_MANY_WEIGHTS = 2**24  # weights of one attention (64 MiB in fp32) from which on a word is due that they are all kept
log = logging.getLogger(__name__)

# By their names in torch, torch.Tensor and torch.nn.functional; those of one line are one operation in several forms.
RANDOM_FUNCTION_NAMES = (
    *("dropout", "dropout_", "dropout1d", "dropout2d", "dropout3d", "feature_dropout", "feature_dropout_"),
    *("alpha_dropout", "alpha_dropout_", "feature_alpha_dropout", "feature_alpha_dropout_", "native_dropout"),
    *("bernoulli", "bernoulli_", "rand", "rand_like", "uniform_", "randn", "randn_like", "normal", "normal_"),
    *("randint", "randint_like", "random_", "randperm", "multinomial", "poisson", "exponential_", "geometric_"),
    *("binomial", "_standard_gamma", "_sample_dirichlet"),  # the last two: of torch.distributions
    *("cauchy_", "log_normal_", "rrelu", "rrelu_", "gumbel_softmax", "scaled_dot_product_attention"),
    *("fractional_max_pool2d", "fractional_max_pool3d", "multi_head_attention_forward"),
    *("lstm", "gru", "rnn_tanh", "rnn_relu"),
)
RANDOM_FUNCTIONS = {
    function
    for holder in (torch, Tensor, functional)
    for name in RANDOM_FUNCTION_NAMES
    if (function := getattr(holder, name, None)) is not None
}
_DROPOUT = {functional.dropout, torch.dropout, torch.dropout_}
_RECURRENT = {torch.lstm, torch.gru, torch.rnn_tanh, torch.rnn_relu}


def bypass_modes(function: Any) -> Any:
    """The same function of Python, which does not ask for modes: inside of it they stay on."""
    names = {**function.__globals__, "has_torch_function": lambda *_: False}
    copy = FunctionType(function.__code__, names, function.__name__, function.__defaults__, function.__closure__)
    copy.__kwdefaults__ = function.__kwdefaults__
    return copy


def _backward(x: Tensor, *args: Any, **kwargs: Any) -> None:
    """`Tensor.backward`: its fourth argument is another one in `torch.autograd.backward`."""
    words = dict(zip(("gradient", "retain_graph", "create_graph", "inputs"), args, strict=False)) | kwargs
    _BACKWARDS[torch.autograd.backward](x, words.pop("gradient", None), **words)


_BACKWARDS: dict[Any, Any] = {
    Tensor.backward: _backward,
    torch.autograd.backward: bypass_modes(torch.autograd.backward),
    torch.autograd.grad: bypass_modes(torch.autograd.grad),
}


class RandomFunctionMode(TorchFunctionMode):
    """Inside it torch's functions draw from a source."""

    def __init__(self, source: DrawSource) -> None:
        super().__init__()
        self._source = source

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if torch.compiler.is_compiling():  # what a network compiles by itself draws torch's numbers
            return func(*args, **kwargs)
        if func in _BACKWARDS:  # in which a part of the forward may be computed again, and here the mode is off
            with self:
                return _BACKWARDS[func](*args, **kwargs)
        if func not in RANDOM_FUNCTIONS or kwargs.get("generator") is not None:
            return func(*args, **kwargs)
        if func in _DROPOUT:
            return _dropout(self._source, func, *args, **kwargs)
        if func is functional.scaled_dot_product_attention:
            return _attention(self._source, func, *args, **kwargs)
        # what consists of several operators, or is rare, is seen from below: there each of them takes microseconds
        if func is functional.multi_head_attention_forward:
            return _multi_head_attention(self._source, func, *args, **kwargs)
        if func in _RECURRENT:
            return _recurrent(self._source, func, *args)
        with RandomDispatchMode(self._source):
            return func(*args, **kwargs)


def _multi_head_attention(source: DrawSource, func: Any, *args: Any, training: bool = True, **kwargs: Any) -> Any:
    if not (training and args[10] > 0):  # its rate of dropout
        return func(*args, training=training, **kwargs)
    # other kernels than this one draw inside; it computes with (B · heads, T, T)
    with sdpa_kernel(SDPBackend.MATH), RandomDispatchMode(source, many=True, time_first=False):
        return func(*args, training=training, **kwargs)


def _recurrent(source: DrawSource, func: Any, *args: Any) -> Any:
    # (…, biases, layers, dropout, training, …), and of a packed sequence one word more before them
    packed = not isinstance(args[3], bool)
    if not (args[6 + packed] and args[5 + packed] > 0):
        return func(*args)
    # cuDNN draws inside; torch's own code computes with time first, whatever it is given
    with torch.backends.cudnn.flags(enabled=False), RandomDispatchMode(source, time_first=True):
        return func(*args)


def _dropout(
    source: DrawSource,
    func: Any,
    input: Tensor,
    p: float = 0.5,
    training: bool = True,
    inplace: bool = False,
    **more: Any,
) -> Tensor:
    # the operators have other words for it
    training = more.get("train", training)
    draw = source.next_draw() if training and 0 < p < 1 else None
    if draw is None:
        return func(input, p, training) if func is not functional.dropout else func(input, p, training, inplace)
    hidden = _dropout_mask(draw, input, p)
    scale = 1 / (1 - p)
    if inplace or func is torch.dropout_:
        return input.mul_(scale).masked_fill_(hidden, 0.0)
    return (input * scale).masked_fill(hidden, 0.0)


def _dropout_mask(draw: RandomDraw, x: Tensor, p: float) -> Tensor:
    """True with probability p, at each element; what has the form of an activation is one, weights have no batch."""
    draw.many = not isinstance(x, nn.Parameter)
    if not isinstance(x, DTensor):
        return draw.bernoulli(p, tuple(x.shape))
    local, mesh = x.to_local(), x.device_mesh
    # one axis of ranks splits activations, in equal parts
    for axis, placement in enumerate(x.placements):
        if isinstance(placement, Shard):
            shard = ActivationShard(placement.dim, 0, Pieces((mesh.get_local_rank(axis),), mesh.size(axis)))
            draw.shard = draw.shard.within(shard) if isinstance(draw.shard, SequenceShard) else shard
    hidden = draw.bernoulli(p, tuple(local.shape))
    return DTensor.from_local(hidden, mesh, x.placements, run_check=False)


@cache  # once is enough
def _warn_of_attention_weights() -> None:
    log.warning(
        "note        attention with dropout computes and keeps all T x T weights, because with loop.dropout=sample each"
        " sample draws for itself, which flash attention cannot do; loop.dropout=native, or no dropout in attention,"
        " is faster and needs less memory"
    )


def _attention(
    source: DrawSource,
    func: Any,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attn_mask: Tensor | None = None,
    dropout_p: float = 0.0,
    is_causal: bool = False,
    scale: float | None = None,
    enable_gqa: bool = False,
) -> Tensor:
    """After torch's page on scaled_dot_product_attention, whose kernels never have all weights and draw themselves."""
    draw = source.next_draw() if 0 < dropout_p < 1 else None
    if draw is None:
        return func(query, key, value, attn_mask, dropout_p, is_causal, scale=scale, enable_gqa=enable_gqa)
    if enable_gqa:  # fewer heads of keys and values, each for several queries
        key, value = (x.repeat_interleave(query.shape[-3] // x.shape[-3], -3) for x in (key, value))
    if query.shape[:-1].numel() * key.shape[-2] >= _MANY_WEIGHTS:
        _warn_of_attention_weights()
    scores = query @ key.mT * (query.shape[-1] ** -0.5 if scale is None else scale)  # (B, heads, T, S)
    if is_causal:
        attn_mask = torch.ones(scores.shape[-2:], dtype=torch.bool, device=scores.device).tril()
    if attn_mask is None:
        weights = scores.softmax(-1)
    elif attn_mask.dtype == torch.bool:  # who may see nobody gets zeros, and so does its gradient
        weights = scores.masked_fill(~attn_mask, torch.finfo(scores.dtype).min).softmax(-1).masked_fill(~attn_mask, 0.0)
    else:
        weights = (scores + attn_mask).softmax(-1)
    draw.shard = draw.shard.of_scores(scores.dim()) if draw.shard else None
    hidden = draw.bernoulli(dropout_p, tuple(scores.shape))
    return weights.masked_fill(hidden, 0.0).to(value.dtype) @ value * (1 / (1 - dropout_p))
