"""torch's random functions, seen in Python and replaced by draws that belong to samples.

`RandomFunctionMode` computes dropout and attention itself. All other random functions run inside `RandomDispatchMode`,
which sees the operators that they consist of. That is slow, and so it is on for single functions only.
"""

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

from trainer.parallel.context_parallel import Pieces
from trainer.parallel.rng.dispatch_mode import RandomDispatchMode
from trainer.parallel.rng.random_draw import ActivationShard, DrawSource, RandomDraw, SequenceShard

_MANY_WEIGHTS = 2**24  # weights of one attention (64 MiB in fp32) from which on it is logged that they are all kept
log = logging.getLogger(__name__)

# Names in torch, torch.Tensor and torch.nn.functional.
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
    """A copy of a Python function of torch that does not look for function modes, so that they stay on inside of it.

    torch switches a mode off while it handles a function. In a backward, parts of the forward may be computed again,
    and they must draw as the forward did: so here `backward` runs inside the mode. Called as it is, it would find the
    mode once more, for ever. The copy has the same code and its own globals, in which `has_torch_function` is
    always False; tests/test_torch_names.py notices if torch looks for modes in another way.
    """
    own_globals = {**function.__globals__, "has_torch_function": lambda *_: False}
    copy = FunctionType(function.__code__, own_globals, function.__name__, function.__defaults__, function.__closure__)
    copy.__kwdefaults__ = function.__kwdefaults__
    return copy


def _backward(x: Tensor, *args: Any, **kwargs: Any) -> None:
    """`Tensor.backward`: its fourth argument is another one in `torch.autograd.backward`."""
    named = dict(zip(("gradient", "retain_graph", "create_graph", "inputs"), args, strict=False)) | kwargs
    _BACKWARDS[torch.autograd.backward](x, named.pop("gradient", None), **named)


# function that runs a backward → the same, inside of which the mode stays on
_BACKWARDS: dict[Any, Any] = {
    Tensor.backward: _backward,
    torch.autograd.backward: bypass_modes(torch.autograd.backward),
    torch.autograd.grad: bypass_modes(torch.autograd.grad),
}


_SEEN = RANDOM_FUNCTIONS | set(_BACKWARDS)


class RandomFunctionMode(TorchFunctionMode):
    """Inside it torch's random functions draw from a source."""

    def __init__(self, source: DrawSource) -> None:
        super().__init__()
        self._source = source
        self._quiet = set[Any]()  # functions that run a backward, in the first of which nothing was drawn

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if func not in _SEEN:  # first what thousands of calls in a step come to
            return func(*args, **kwargs)
        if torch.compiler.is_compiling():  # what a network compiles by itself draws torch's numbers
            return func(*args, **kwargs)
        if func in _BACKWARDS:
            return self._run_backward(func, args, kwargs)
        if kwargs.get("generator") is not None:
            return func(*args, **kwargs)
        if func in _DROPOUT:
            return sample_dropout(self._source, func, *args, **kwargs)
        if func is functional.scaled_dot_product_attention:
            return sample_attention(self._source, func, *args, **kwargs)
        # what has several operators, or is rare, is seen by the dispatcher: there each operator takes microseconds
        if func is functional.multi_head_attention_forward:
            return _multi_head_attention(self._source, func, *args, **kwargs)
        if func in _RECURRENT:
            return _recurrent(self._source, func, *args)
        with RandomDispatchMode(self._source):
            return func(*args, **kwargs)

    def _run_backward(self, func: Any, args: Any, kwargs: Any) -> Any:
        """A backward draws where it computes again what drew, or in hooks; if it does not, it runs outside the mode."""
        if func in self._quiet and not self._source.has_drawn():
            return func(*args, **kwargs)
        with self:
            result = _BACKWARDS[func](*args, **kwargs)
        if not self._source.has_drawn():
            self._quiet.add(func)
        return result


def _multi_head_attention(source: DrawSource, func: Any, *args: Any, training: bool = True, **kwargs: Any) -> Any:
    """torch's multi_head_attention_forward; its operators draw dropout of the weights, (B · heads, T, T)."""
    if not (training and args[10] > 0):  # its rate of dropout
        return func(*args, training=training, **kwargs)
    # other kernels than this one draw inside, where no mode sees it
    with sdpa_kernel(SDPBackend.MATH), RandomDispatchMode(source, many=True, time_first=False):
        return func(*args, training=training, **kwargs)


def _recurrent(source: DrawSource, func: Any, *args: Any) -> Any:
    """LSTM and its like; their operators draw dropout between layers, (T, B, width)."""
    # args: (…, biases, layers, dropout, training, …); for a packed sequence there is one more before them
    packed = not isinstance(args[3], bool)
    if not (args[6 + packed] and args[5 + packed] > 0):
        return func(*args)
    # cuDNN draws inside; torch's own code computes with time first, whatever it is given
    with torch.backends.cudnn.flags(enabled=False), RandomDispatchMode(source, time_first=True):
        return func(*args)


def sample_dropout(
    source: DrawSource,
    func: Any,
    input: Tensor,
    p: float = 0.5,
    training: bool = True,
    inplace: bool = False,
    **more: Any,
) -> Tensor:
    """Dropout as a function or an operator, which have other names for `training`. input: any shape, mostly (B, …)."""
    training = more.get("train", training)
    draw = source.next_draw() if training and 0 < p < 1 else None
    if draw is None:
        return func(input, p, training) if func is not functional.dropout else func(input, p, training, inplace)
    hidden = _dropout_mask(draw, input, p)  # in the shape of the input
    scale = 1 / (1 - p)
    if inplace or func is torch.dropout_:
        return input.mul_(scale).masked_fill_(hidden, 0.0)
    return (input * scale).masked_fill(hidden, 0.0)


def _dropout_mask(draw: RandomDraw, x: Tensor, p: float) -> Tensor:
    """True with probability p, for each element. Only activations have a batch; parameters have none."""
    draw.many = not isinstance(x, nn.Parameter)
    if not isinstance(x, DTensor):
        return draw.bernoulli(p, tuple(x.shape))
    local, mesh = x.to_local(), x.device_mesh
    # of an activation that tensor ranks hold in equal shards, each rank draws its own part
    for axis, placement in enumerate(x.placements):
        if isinstance(placement, Shard):
            shard = ActivationShard(placement.dim, 0, Pieces((mesh.get_local_rank(axis),), mesh.size(axis)))
            draw.shard = draw.shard.within(shard) if isinstance(draw.shard, SequenceShard) else shard
    hidden = draw.bernoulli(p, tuple(local.shape))
    return DTensor.from_local(hidden, mesh, x.placements, run_check=False)


@cache  # once for a process
def _warn_of_attention_weights() -> None:
    log.warning(
        "note        attention with dropout computes and keeps all T x T weights, because with loop.dropout=sample each"
        " sample draws for itself, which flash attention cannot do; loop.dropout=native, or no dropout in attention,"
        " is faster and needs less memory"
    )


def sample_attention(
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
    """As torch's page on scaled_dot_product_attention shows it. The kernels draw inside and never have all weights.

    query: (B, heads, T, width), key and value: (B, heads, S, width).
    """
    draw = source.next_draw() if 0 < dropout_p < 1 else None
    if draw is None:
        return func(query, key, value, attn_mask, dropout_p, is_causal, scale=scale, enable_gqa=enable_gqa)
    if enable_gqa:  # fewer heads of keys and values, each for several heads of queries
        key, value = (x.repeat_interleave(query.shape[-3] // x.shape[-3], -3) for x in (key, value))
    if not torch.compiler.is_compiling() and query.shape[:-1].numel() * key.shape[-2] >= _MANY_WEIGHTS:
        _warn_of_attention_weights()
    scores = query @ key.mT * (query.shape[-1] ** -0.5 if scale is None else scale)  # (B, heads, T, S)
    if is_causal:
        attn_mask = torch.ones(scores.shape[-2:], dtype=torch.bool, device=scores.device).tril()
    if attn_mask is None:
        weights = scores.softmax(-1)
    elif attn_mask.dtype == torch.bool:  # a token that may see none gets zeros, and so does its gradient
        weights = scores.masked_fill(~attn_mask, torch.finfo(scores.dtype).min).softmax(-1).masked_fill(~attn_mask, 0.0)
    else:
        weights = (scores + attn_mask).softmax(-1)
    draw.shard = draw.shard.of_scores(scores.dim()) if draw.shard else None
    hidden = draw.bernoulli(dropout_p, tuple(scores.shape))
    return weights.masked_fill(hidden, 0.0).to(value.dtype) @ value * (1 / (1 - dropout_p))
