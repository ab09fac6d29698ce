"""torch's functions that draw, in a forward: what they draw is that of its samples."""

from __future__ import annotations

import logging
from functools import cache
from types import FunctionType
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor, Shard
from torch.nn import functional
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.overrides import TorchFunctionMode

from trainer.parallel.per_sample_draw import Cut, Draw, Source, Stretch
from trainer.parallel.rng_operators import Below
from trainer.parallel.sequence_pieces import Pieces

_MANY = 2**24  # weights of one attention (64 MiB in fp32) from which on a word is due that they are all kept
log = logging.getLogger(__name__)

# By their names in torch, torch.Tensor and torch.nn.functional; those of one line are one operation in several forms.
NAMES = (
    *("dropout", "dropout_", "dropout1d", "dropout2d", "dropout3d", "feature_dropout", "feature_dropout_"),
    *("alpha_dropout", "alpha_dropout_", "feature_alpha_dropout", "feature_alpha_dropout_", "native_dropout"),
    *("bernoulli", "bernoulli_", "rand", "rand_like", "uniform_", "randn", "randn_like", "normal", "normal_"),
    *("randint", "randint_like", "random_", "randperm", "multinomial", "poisson", "exponential_", "geometric_"),
    *("binomial", "_standard_gamma", "_sample_dirichlet"),  # the last two: of torch.distributions
    *("cauchy_", "log_normal_", "rrelu", "rrelu_", "gumbel_softmax", "scaled_dot_product_attention"),
    *("fractional_max_pool2d", "fractional_max_pool3d", "multi_head_attention_forward"),
    *("lstm", "gru", "rnn_tanh", "rnn_relu"),
)
DRAWING = {
    function
    for holder in (torch, Tensor, functional)
    for name in NAMES
    if (function := getattr(holder, name, None)) is not None
}
_DROPOUT = {functional.dropout, torch.dropout, torch.dropout_}
_RECURRENT = {torch.lstm, torch.gru, torch.rnn_tanh, torch.rnn_relu}


def unasked(function: Any) -> Any:
    """The same function of Python, which does not ask for modes: inside of it they stay on."""
    names = {**function.__globals__, "has_torch_function": lambda *_: False}
    own = FunctionType(function.__code__, names, function.__name__, function.__defaults__, function.__closure__)
    own.__kwdefaults__ = function.__kwdefaults__
    return own


def _backward(x: Tensor, *args: Any, **kwargs: Any) -> None:
    """`Tensor.backward`: its fourth argument is another one in `torch.autograd.backward`."""
    words = dict(zip(("gradient", "retain_graph", "create_graph", "inputs"), args, strict=False)) | kwargs
    _BACKWARDS[torch.autograd.backward](x, words.pop("gradient", None), **words)


_BACKWARDS: dict[Any, Any] = {
    Tensor.backward: _backward,
    torch.autograd.backward: unasked(torch.autograd.backward),
    torch.autograd.grad: unasked(torch.autograd.grad),
}


class Drawing(TorchFunctionMode):
    """Inside it torch's functions draw from a source."""

    def __init__(self, source: Source) -> None:
        super().__init__()
        self._source = source

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if torch.compiler.is_compiling():  # what a network compiles by itself draws torch's numbers
            return func(*args, **kwargs)
        if func in _BACKWARDS:  # in which a part of the forward may be computed again, and here the mode is off
            with self:
                return _BACKWARDS[func](*args, **kwargs)
        if func not in DRAWING or kwargs.get("generator") is not None:
            return func(*args, **kwargs)
        if func in _DROPOUT:
            return _dropout(self._source, func, *args, **kwargs)
        if func is functional.scaled_dot_product_attention:
            return _attention(self._source, func, *args, **kwargs)
        # what consists of several operators, or is rare, is seen from below: there each of them takes microseconds
        if func is functional.multi_head_attention_forward:
            return _heads(self._source, func, *args, **kwargs)
        if func in _RECURRENT:
            return _recurrent(self._source, func, *args)
        with Below(self._source):
            return func(*args, **kwargs)


def _heads(source: Source, func: Any, *args: Any, training: bool = True, **kwargs: Any) -> Any:
    if not (training and args[10] > 0):  # its rate of dropout
        return func(*args, training=training, **kwargs)
    # other kernels than this one draw inside; it computes with (B · heads, T, T)
    with sdpa_kernel(SDPBackend.MATH), Below(source, many=True, time_first=False):
        return func(*args, training=training, **kwargs)


def _recurrent(source: Source, func: Any, *args: Any) -> Any:
    # (…, biases, layers, dropout, training, …), and of a packed sequence one word more before them
    packed = not isinstance(args[3], bool)
    if not (args[6 + packed] and args[5 + packed] > 0):
        return func(*args)
    # cuDNN draws inside; torch's own code computes with time first, whatever it is given
    with torch.backends.cudnn.flags(enabled=False), Below(source, time_first=True):
        return func(*args)


def _dropout(
    source: Source, func: Any, input: Tensor, p: float = 0.5, training: bool = True, inplace: bool = False, **more: Any
) -> Tensor:
    # the operators have other words for it
    training = more.get("train", training)
    draw = source.next() if training and 0 < p < 1 else None
    if draw is None:
        return func(input, p, training) if func is not functional.dropout else func(input, p, training, inplace)
    hidden = _like(draw, input, p)
    scale = 1 / (1 - p)
    if inplace or func is torch.dropout_:
        return input.mul_(scale).masked_fill_(hidden, 0.0)
    return (input * scale).masked_fill(hidden, 0.0)


def _like(draw: Draw, x: Tensor, p: float) -> Tensor:
    """True with probability p, at each element; what has the form of an activation is one, weights have no batch."""
    draw.many = not isinstance(x, nn.Parameter)
    if not isinstance(x, DTensor):
        return draw.bernoulli(p, tuple(x.shape))
    local, mesh = x.to_local(), x.device_mesh
    # one axis of ranks splits activations, in equal parts
    for axis, placement in enumerate(x.placements):
        if isinstance(placement, Shard):
            own = Cut(placement.dim, 0, Pieces((mesh.get_local_rank(axis),), mesh.size(axis)))
            draw.cut = draw.cut.within(own) if isinstance(draw.cut, Stretch) else own
    hidden = draw.bernoulli(p, tuple(local.shape))
    return DTensor.from_local(hidden, mesh, x.placements, run_check=False)


@cache  # once is enough
def _tell_of_weights() -> None:
    log.warning(
        "note        attention with dropout computes and keeps all T x T weights, because with loop.dropout=sample each"
        " sample draws for itself, which flash attention cannot do; loop.dropout=native, or no dropout in attention,"
        " is faster and needs less memory"
    )


def _attention(
    source: Source,
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
    draw = source.next() if 0 < dropout_p < 1 else None
    if draw is None:
        return func(query, key, value, attn_mask, dropout_p, is_causal, scale=scale, enable_gqa=enable_gqa)
    if enable_gqa:  # fewer heads of keys and values, each for several queries
        key, value = (x.repeat_interleave(query.shape[-3] // x.shape[-3], -3) for x in (key, value))
    if query.shape[:-1].numel() * key.shape[-2] >= _MANY:
        _tell_of_weights()
    scores = query @ key.mT * (query.shape[-1] ** -0.5 if scale is None else scale)  # (B, heads, T, S)
    if is_causal:
        attn_mask = torch.ones(scores.shape[-2:], dtype=torch.bool, device=scores.device).tril()
    if attn_mask is None:
        weights = scores.softmax(-1)
    elif attn_mask.dtype == torch.bool:  # who may see nobody gets zeros, and so does its gradient
        weights = scores.masked_fill(~attn_mask, torch.finfo(scores.dtype).min).softmax(-1).masked_fill(~attn_mask, 0.0)
    else:
        weights = (scores + attn_mask).softmax(-1)
    draw.cut = draw.cut.of_scores(scores.dim()) if draw.cut else None
    hidden = draw.bernoulli(dropout_p, tuple(scores.shape))
    return weights.masked_fill(hidden, 0.0).to(value.dtype) @ value * (1 / (1 - dropout_p))
