"""torch's random operators, overridden at their kernels: whatever draws in a forward is seen here, and nothing else.

`torch.library` replaces a kernel for one kind of device. So a draw is seen wherever it comes from: from a module or a
function of torch, from inside of another operator, from what a backward computes again, and from a graph of Inductor
that calls torch's own random operators (`fallback_random`). A network that draws nothing does not notice. The
overrides exist while a strategy is active (`install_kernels`). Where no forward is under way, and where a caller
gives a generator of its own, torch's kernel runs and gives torch's bits.
"""

from __future__ import annotations

import logging
import warnings
from collections.abc import Callable
from contextlib import suppress
from functools import cache
from threading import get_ident
from typing import Any, Protocol

import torch
from torch import Tensor

from trainer.parallel.activation_checkpointing import in_backward
from trainer.parallel.compile import is_compiler_loaded, set_fallback_random
from trainer.parallel.rng.random_draw import RandomDraw, Rows

_MANY_WEIGHTS = 2**24  # weights of one attention (64 MiB in fp32) from which on it is logged that they are all kept
log = logging.getLogger(__name__)
Kernel = Callable[..., Any]


class DrawSource(Protocol):
    """What gives a forward its random numbers."""

    def next_draw(self, shape: tuple[int, ...], operator: str) -> RandomDraw | None:
        """The next draw of the forward that is under way, of this shape; None: torch's own generator draws."""

    def see_generator(self) -> None:
        """The forward draws from a generator of its own."""


class _Current:
    """The source of the forward that is under way, and the thread that runs it."""

    source: DrawSource | None = None
    thread = 0


def use_source(source: DrawSource | None) -> DrawSource | None:
    """From now on this thread's draws, and those of backwards, come from a source; returns the one before."""
    before, _Current.source, _Current.thread = _Current.source, source, get_ident()
    return before


# what takes the place of a kernel: (the draw, torch's kernel, its arguments). Names are the operators'


def _bernoulli_(draw: RandomDraw, torchs: Kernel, x: Tensor, p: Any = 0.5) -> Tensor:
    if isinstance(p, Tensor):
        return x.copy_(draw.uniform(tuple(x.shape)) < p)
    return x.copy_(draw.bernoulli(p, tuple(x.shape)))


def _native_dropout(draw: RandomDraw, torchs: Kernel, x: Tensor, p: float, train: bool | None) -> tuple[Tensor, Tensor]:
    kept = draw.bernoulli(1 - p, tuple(x.shape))
    return x * kept * (1 / (1 - p) if p < 1 else 0.0), kept


def _uniform_(draw: RandomDraw, torchs: Kernel, x: Tensor, low: float = 0.0, high: float = 1.0) -> Tensor:
    """In [low, high), as multiples of the smallest step that the type has below 1, as torch's own on CPUs."""
    cell = torch.finfo(x.dtype).eps / 2
    drawn = draw.uniform(tuple(x.shape)).to(_wide(x))
    if cell > 2.0**-24:  # the draw has 24 bits: in a narrower type the last ones would be rounded up to 1
        drawn = drawn.div_(cell).floor_().mul_(cell)
    x.copy_(drawn.mul_(high - low).add_(low))
    return x.masked_fill_(x >= high, low)  # it may be rounded up to that all the same, as 3 - 2^-24 is


def _normal_(draw: RandomDraw, torchs: Kernel, x: Tensor, mean: Any = 0.0, std: Any = 1.0) -> Tensor:
    return x.copy_(draw.normal(tuple(x.shape)).to(_wide(x)) * std + mean)


def _normal(draw: RandomDraw, torchs: Kernel, mean: Any, std: Any = 1.0) -> Tensor:
    like = mean if isinstance(mean, Tensor) else std
    return _normal_(draw, torchs, like.new_empty(_shape_of_normal(mean, std)), mean, std)


def _exponential_(draw: RandomDraw, torchs: Kernel, x: Tensor, rate: float = 1.0) -> Tensor:
    """In (0, ∞): where the uniform number is 0 the result is half of the next one, and in no type rounded down to 0."""
    drawn = draw.uniform(tuple(x.shape)).to(_wide(x)).clamp_min_(2.0**-25)
    x.copy_(drawn.neg_().log1p_().div_(-rate))
    least = torch.finfo(x.dtype)
    return x.clamp_min_(least.smallest_normal * least.eps)


def _wide(x: Tensor) -> torch.dtype:
    """What numbers are computed in before they are rounded once, to the tensor's own type."""
    return torch.promote_types(x.dtype, torch.float32)


def _random_(draw: RandomDraw, torchs: Kernel, x: Tensor, *bounds: int | None) -> Tensor:
    low, high = (0, *bounds)[-2:]
    if not bounds or low is None or high is None:  # all numbers that the type has
        return _by_torch_(draw, torchs, x, *bounds)
    return x.copy_(draw.integers(low, high, tuple(x.shape)))


def _multinomial(draw: RandomDraw, torchs: Kernel, weights: Tensor, count: int, replacement: bool = False) -> Tensor:
    """Of (…, K) weights (…, count) indices. One of each, and several without replacement, torch draws exponentially."""
    sums = weights.to(_wide(weights)).cumsum(-1)
    places = draw.uniform((*weights.shape[:-1], count)).to(sums.dtype) * sums[..., -1:]  # (…, count)
    return torch.searchsorted(sums, places, right=True).clamp_(max=weights.shape[-1] - 1)


def _rrelu(draw: RandomDraw, torchs: Kernel, x: Tensor, noise: Tensor, low: float, high: float, *_: Any) -> Tensor:
    """What is negative times a number in [low, high); autograd wants the numbers, 1 for what is not negative."""
    drawn = draw.uniform(tuple(x.shape)).to(x.dtype) * (high - low) + low
    return x * noise.copy_(torch.where(x <= 0, drawn, torch.ones_like(drawn)))


# What is rare torch draws itself: for each sample by itself, from a generator that its own numbers have seeded.


def _by_torch(draw: RandomDraw, torchs: Kernel, *args: Any) -> Any:
    return draw.by_torch(torchs, args, in_place=False)


def _by_torch_(draw: RandomDraw, torchs: Kernel, *args: Any) -> Any:
    return draw.by_torch(torchs, args, in_place=True)


def _permutation(draw: RandomDraw, torchs: Kernel, *args: Any) -> Any:
    draw.rows = Rows(None)  # it has no rows of samples
    return draw.by_torch(torchs, args, in_place=False)


# how the shape of what a kernel draws follows from its arguments


def _shape_of_first(x: Tensor, *_: Any) -> tuple[int, ...]:
    return tuple(x.shape)


def _shape_of_normal(mean: Any, std: Any = 1.0) -> tuple[int, ...]:
    return tuple(torch.broadcast_shapes(*(x.shape for x in (mean, std) if isinstance(x, Tensor))))


def _shape_of_choice(weights: Tensor, count: int, *_: Any) -> tuple[int, ...]:
    return (*weights.shape[:-1], count)


def _shape_of_permutation(count: int, out: Tensor | None = None) -> tuple[int, ...]:
    return (count,)


KERNELS: dict[str, tuple[Kernel, Callable[..., tuple[int, ...]]]] = {
    "bernoulli_.float": (_bernoulli_, _shape_of_first),
    "bernoulli_.Tensor": (_bernoulli_, _shape_of_first),
    "native_dropout": (_native_dropout, _shape_of_first),
    "uniform_": (_uniform_, _shape_of_first),
    "normal_": (_normal_, _shape_of_first),
    "normal.Tensor_float": (_normal, _shape_of_normal),
    "normal.float_Tensor": (_normal, _shape_of_normal),
    "normal.Tensor_Tensor": (_normal, _shape_of_normal),
    "exponential_": (_exponential_, _shape_of_first),
    "random_": (_random_, _shape_of_first),
    "random_.from": (_random_, _shape_of_first),
    "random_.to": (_random_, _shape_of_first),
    "multinomial": (_multinomial, _shape_of_choice),
    "randperm.generator_out": (_permutation, _shape_of_permutation),
    **dict.fromkeys(("poisson", "binomial", "_standard_gamma", "_sample_dirichlet"), (_by_torch, _shape_of_first)),
    **dict.fromkeys(("cauchy_", "geometric_", "log_normal_"), (_by_torch_, _shape_of_first)),
    "rrelu_with_noise": (_rrelu, _shape_of_first),
}


def _draws_nothing(name: str, args: tuple[Any, ...]) -> bool:
    """Does this call leave the choice to another kernel, or is there nothing to draw?"""
    if name == "native_dropout":
        return args[2] is False or args[1] == 0
    if name == "rrelu_with_noise":  # (x, noise, low, high, training)
        return len(args) < 5 or not args[4]
    # of each row one, or none twice: torch calls exponential_ for it, which is seen by itself
    return name == "multinomial" and (args[1] == 1 or not (len(args) > 2 and args[2]))


def count_draw(operator: Any, args: tuple[Any, ...]) -> None:
    """A draw into a tensor without values takes its number all the same: who draws next does not see a difference."""
    name = str(operator).removeprefix("aten.").removesuffix(".default")
    if name in KERNELS and _Current.source is not None and not _draws_nothing(name, args):
        _Current.source.next_draw(KERNELS[name][1](*args), name)


def _override(name: str, device: str, instead: Kernel, shape_of: Callable[..., tuple[int, ...]]) -> Kernel:
    original = torch.library.get_kernel(f"aten::{name}", device)

    def kernel(keys: Any, *args: Any, **more: Any) -> Any:
        source = _Current.source
        if source is None or not (_Current.thread == get_ident() or in_backward()) or _draws_nothing(name, args):
            return original.call_boxed(keys, *args, **more)
        generator = more.get("generator")
        if generator is None and isinstance(args[-1], torch.Generator):  # of some operators it is the last one
            generator = args[-1]
        if generator is not None and generator is not torch.default_generator:
            source.see_generator()
            return original.call_boxed(keys, *args, **more)
        draw = source.next_draw(shape_of(*args), name)
        if draw is None:
            return original.call_boxed(keys, *args, **more)

        def torchs(*others: Any) -> Any:
            return original.call_boxed(keys, *others, **more)

        return instead(draw, torchs, *args)

    return kernel


@cache  # once for a process
def _warn_of_attention_weights() -> None:
    log.warning(
        "note        attention with dropout computes and keeps all T x T weights, because with loop.dropout=sample each"
        " sample draws for itself, which flash attention cannot do; loop.dropout=native, or no dropout in attention,"
        " is faster and needs less memory"
    )


def _attention(device: str) -> Kernel:
    """Attention with dropout as products and a softmax: the fused kernels of GPUs draw inside of themselves."""
    from torch.nn.attention import SDPBackend, sdpa_kernel

    original = torch.library.get_kernel("aten::scaled_dot_product_attention", f"Autograd{device}")

    def kernel(keys: Any, *args: Any, **more: Any) -> Any:
        dropout = args[4] if len(args) > 4 else 0.0  # (query, key, value, mask, dropout, …)
        if _Current.source is None or dropout == 0:
            return original.call_boxed(keys, *args, **more)
        if args[0].shape[:-1].numel() * args[1].shape[-2] >= _MANY_WEIGHTS:
            _warn_of_attention_weights()
        with sdpa_kernel(SDPBackend.MATH):
            return original.call_boxed(keys, *args, **more)

    return kernel


class _Installed:
    """The overrides, and how many strategies are active that need them."""

    library: torch.library.Library | None = None
    users = 0
    fallback_before: bool | None = None  # what Inductor did with random operators


def install_kernels(device: torch.device, dropout: str, compiled: bool = False) -> None:
    """Override the kernels of this kind of device where samples draw (`sample`); wants an `uninstall_kernels`.

    compiled: is any of the network?
    """
    _Installed.users += dropout == "sample"
    if dropout != "sample" or _Installed.users > 1:
        return
    library = _Installed.library = torch.library.Library("aten", "IMPL")
    # the compiler looks at all Python that runs below a graph that has ended; its import takes a second
    hidden = compiled or is_compiler_loaded()
    # in the host's memory some draw for a GPU, too
    for kind in dict.fromkeys(("cpu", device.type)):
        key = kind.upper() if kind in ("cpu", "cuda", "xpu", "mps") else "PrivateUse1"  # as the dispatcher calls it
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # torch warns that its kernels are overridden
            for name, (instead, shape_of) in KERNELS.items():
                with suppress(RuntimeError):  # the device has no kernel of its own for it
                    kernel = _override(name, key, instead, shape_of)
                    kernel = torch.compiler.disable(kernel) if hidden else kernel
                    library.impl(name, kernel, key, with_keyset=True, allow_override=True)
            if kind != "cpu":
                attention = _attention(key)
                for keys in (f"Autograd{key}", key):
                    library.impl("scaled_dot_product_attention", attention, keys, with_keyset=True, allow_override=True)
    # a graph that a network compiles by itself calls torch's operators, too
    _Installed.fallback_before = set_fallback_random(True)


def see_compiler() -> bool:
    """Let graphs call torch's operators if somebody has imported the compiler meanwhile; then they are made anew."""
    if _Installed.library is None or _Installed.fallback_before is not None:
        return False
    _Installed.fallback_before = set_fallback_random(True)
    if _Installed.fallback_before is not None:
        torch.compiler.reset()
    return _Installed.fallback_before is not None


def uninstall_kernels(dropout: str) -> None:
    """Torch's own kernels are back once nobody needs the overrides."""
    _Installed.users -= dropout == "sample"
    if _Installed.users or _Installed.library is None:
        return
    _Installed.library = None  # with it go its overrides
    set_fallback_random(_Installed.fallback_before)
