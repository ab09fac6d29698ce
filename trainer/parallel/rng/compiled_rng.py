"""Random numbers that belong to samples, in compiled networks: the same numbers as without compile.

While a graph is made, Python runs as in a forward, and so it is known which module draws. What differs from step to
step (where the samples' streams begin) and from unit to unit (a module's name) is a tensor, so that no graph is made
anew for it.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional
from torch.utils.checkpoint import checkpoint
from typing_extensions import override

from trainer.data.rng import DerivedRandom, Random, TensorPart, quantiles, row_words, to_int64
from trainer.parallel.rng.dispatch_mode import REPLACEMENTS
from trainer.parallel.rng.function_mode import RANDOM_FUNCTIONS, RandomFunctionMode, sample_attention, sample_dropout
from trainer.parallel.rng.native_rng import TorchRNG
from trainer.parallel.rng.random_draw import RandomDraw
from trainer.parallel.rng.sample_rng import CALL_STRIDE, DRAW_STRIDE, ForwardRNGState, SampleRNG, hash_name

_LONGEST = 2**18  # places along a dimension of what is drawn
_OPERATORS = torch.ops.aten
# what a module of a network may call by itself, and the operator that it is
_GRAPH_FUNCTIONS: dict[Callable[..., Any], Any] = {
    torch.bernoulli: _OPERATORS.bernoulli,
    Tensor.bernoulli: _OPERATORS.bernoulli,
    Tensor.bernoulli_: _OPERATORS.bernoulli_,
    Tensor.uniform_: _OPERATORS.uniform_,
    Tensor.normal_: _OPERATORS.normal_,
    torch.rand: _OPERATORS.rand,
    torch.randn: _OPERATORS.randn,
}
# dropout of whole channels, and the dimensions that its input must have to be a batch: (B, C, …)
_CHANNEL_DROPOUT = {functional.dropout1d: 3, functional.dropout2d: 4, functional.dropout3d: 5}


class _GraphFunctionMode(RandomFunctionMode):
    """Inside it torch's random functions draw from each sample's streams, also in code that is compiled."""

    def __init__(self, rng: CompiledSampleRNG) -> None:
        super().__init__(rng)
        self._rng = rng
        # here and not at the method: it imports the compiler, which takes a second
        self._leave_graph = torch.compiler.disable(self._outside_graph)

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if func is checkpoint and torch.compiler.is_compiling():
            # a mode is off while it handles a call, and this one calls the network
            return func(partial(self._call, args[0]), *args[1:], **kwargs)
        if func not in RANDOM_FUNCTIONS or kwargs.get("generator") is not None:
            return super().__torch_function__(func, types, args, kwargs)
        if not torch.compiler.is_compiling():
            return self._leave_graph(func, types, args, kwargs)  # torch would compile what draws here as well
        graph = self._rng.graph_draws
        if graph.call is None:  # a module that runs as it is, with a part of it in this graph
            return self._leave_graph(func, types, args, kwargs)
        if func is functional.dropout:
            return sample_dropout(graph, func, *args, **kwargs)
        if func is functional.scaled_dot_product_attention:
            return sample_attention(graph, func, *args, **kwargs)
        if func in _CHANNEL_DROPOUT and args[0].dim() == _CHANNEL_DROPOUT[func]:
            return _channel_dropout(graph, func, *args, **kwargs)
        if func in _GRAPH_FUNCTIONS and (draw := graph.next_draw()) is not None:
            if func in (torch.rand, torch.randn) and not isinstance(args[0], tuple | list):
                args = (args,)  # the operators take sizes as one argument
            operator = _GRAPH_FUNCTIONS[func]
            return REPLACEMENTS[operator](draw, operator, *args, **kwargs)
        # a random function that is rare: the graph ends here, and it runs as without compile
        return self._leave_graph(func, types, args, kwargs)

    def _call(self, function: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        with self:
            return function(*args, **kwargs)

    def _outside_graph(self, func: Any, types: Any, args: Any, kwargs: Any) -> Any:
        return RandomFunctionMode.__torch_function__(self, func, types, args, kwargs)


def _channel_dropout(
    graph: GraphDraws, func: Any, x: Tensor, p: float = 0.5, training: bool = True, inplace: bool = False
) -> Tensor:
    draw = graph.next_draw() if training and 0 < p < 1 else None
    if draw is None:
        return func(x, p, training, inplace)
    kept = draw.bernoulli(1 - p, (*x.shape[:2], *(1 for _ in x.shape[2:]))).to(x.dtype).div(1 - p)  # (B, C, 1, …)
    return x.mul_(kept) if inplace else x * kept


class _Tables(nn.Module):
    """Numbers for places along a dimension, from memory.

    A compiler would compute a place times an odd number of 64 bits as an index, which must not overflow. Buffers,
    because a graph reads them where they lie.
    """

    numbers: Tensor
    row_words: Tensor
    quantiles: Tensor

    def __init__(self, device: torch.device) -> None:
        super().__init__()
        self.register_buffer("numbers", torch.arange(_LONGEST, device=device), persistent=False)  # int64
        self.register_buffer("row_words", row_words(_LONGEST, device), persistent=False)  # int32
        self.register_buffer("quantiles", quantiles(device), persistent=False)


class _GraphRandom(DerivedRandom):
    """The streams of a draw in a graph, `starts`: (B,)."""

    def __init__(self, tables: _Tables, starts: Tensor, part: TensorPart | None = None) -> None:
        super().__init__(starts, starts, part)
        self._tables = tables

    @override
    def of(self, number: int | Tensor, part: TensorPart | None = None) -> Random:
        return _GraphRandom(self._tables, self.starts + number, part)

    @override
    def _positions(self, places: tuple[range, ...]) -> Tensor:
        pieces = [self._tables.numbers[_checked(place.start) : _checked(place.stop)] for place in places]
        return pieces[0] if len(pieces) == 1 else torch.cat(pieces)

    @override
    def _row_words(self, width: int) -> Tensor:
        return self._tables.row_words[: _checked(width)]

    @override
    def _quantiles(self, device: torch.device) -> Tensor:
        return self._tables.quantiles


def _checked(place: int) -> int:
    if place > _LONGEST:
        raise RuntimeError(
            f"loop.dropout=sample: a draw with a dimension of {place} in a compiled module, where at most {_LONGEST}"
            " are known; use loop.dropout=native"
        )
    return place


def as_hook(module: nn.Module, function: Callable[..., None]) -> Callable[..., None]:
    """A function as a hook of this module: where torch ends a graph, at recurrent layers, their hooks run as they are.

    Torch would compile some of them by themselves and others not, and they would not agree whether the layer is.
    """
    return torch.compiler.disable(function) if isinstance(module, nn.RNNBase) else function


class GraphDraws:
    """Which module draws, and which of its draws it is, while a graph is made."""

    def __init__(self, rng: CompiledSampleRNG, device: torch.device) -> None:
        self._rng, self._tables = rng, _Tables(device)
        # [module, its draws in this call], or None for one that runs as it is; the innermost last
        self.under_way: list[list[Any] | None] = []
        self.modules: list[nn.Module] = []  # all that may draw

    def watch(self, module: nn.Module, name: str, device: torch.device) -> None:
        """Know when a compiled module is called and when it has ended."""
        # Attributes, not buffers: no checkpoint has them. The number is a tensor: units that are alike share a graph.
        vars(module).update(draw_name=hash_name(name), draw_calls=0)
        vars(module)["draw_number"] = torch.tensor(to_int64(hash_name(name)), device=device)
        self.modules.append(module)
        module.register_forward_pre_hook(as_hook(module, self._begins))
        module.register_forward_hook(as_hook(module, self._ends))

    def begin(self, starts: Tensor, common_start: Tensor) -> None:
        """A forward begins."""
        self._rng.stream_starts = starts, common_start
        # nothing was called in it; a graph holds these numbers, too
        self.under_way.clear()  # an error may have left some
        for module in self.modules:
            vars(module)["draw_calls"] = 0

    def _begins(self, module: nn.Module, *_: Any) -> None:
        if torch.compiler.is_compiling():
            module.draw_calls += 1  # type: ignore[operator, assignment]  # a number of its own
            self.under_way.append([module, 0])
        else:
            self.under_way.append(None)

    def _ends(self, module: nn.Module, *_: Any) -> None:
        self.under_way.pop()

    @property
    def call(self) -> list[Any] | None:
        """The call of a compiled module that is under way."""
        return self.under_way[-1] if self.under_way else None

    def next_draw(self) -> RandomDraw | None:
        """The next draw of the graph; None where no compiled module is under way."""
        call = self.call
        if call is None:
            return None
        call[1] += 1
        module = call[0]
        number = module.draw_number + to_int64(module.draw_calls * CALL_STRIDE + call[1] * DRAW_STRIDE)
        starts, common_start = self._rng.stream_starts
        samples, common = _GraphRandom(self._tables, starts), _GraphRandom(self._tables, common_start)
        shard, time_first = self._rng.shard, self._rng.time_first
        return RandomDraw(starts.shape[0], samples, common, 0, number, shard, time_first)

    def next_number(self) -> int | None:
        """The number of the next draw, where a graph ended inside of a module, and it draws outside of the graph."""
        call = self.call
        if call is None:
            return None
        call[1] += 1
        return to_int64(call[0].draw_name + call[0].draw_calls * CALL_STRIDE + call[1] * DRAW_STRIDE)

    def has_drawn(self) -> bool:
        """Is not known."""
        return True


class CompiledSampleRNG(SampleRNG):
    """`SampleRNG` for a network that is compiled, or parts of which are."""

    mode_class: Any = _GraphFunctionMode
    modes = (RandomFunctionMode, _GraphFunctionMode)
    # where the streams of samples begin, (B,) int64, and that of what has no batch, (1,). Here, and not at what the
    # modules' hooks hold: torch takes tensors that a module holds to lie where they are for ever, so every forward
    # would record its CUDA graphs anew
    stream_starts: tuple[Tensor, Tensor]

    def __init__(self, seed: int, device: torch.device) -> None:
        super().__init__(seed, device)
        self.graph_draws = GraphDraws(self, device)

    def _watch_calls(self, module: nn.Module, name: str) -> None:
        super()._watch_calls(module, name)
        self.graph_draws.watch(module, name, self._device)

    def _hook(self, module: nn.Module, function: Callable[..., None]) -> Callable[..., None]:
        return as_hook(module, function)

    def _has_begun(self, forward: ForwardRNGState) -> None:
        self.graph_draws.begin(forward.samples.starts, forward.common.starts)

    def _next_number(self) -> int | None:
        return self.graph_draws.next_number()


def make_rng(dropout: str, compiled: bool, seed: int, device: torch.device) -> TorchRNG:
    """The random numbers of a forward. dropout: `sample` or `native`; compiled: is any of the network?"""
    if dropout == "native":
        return TorchRNG(seed, device)
    return CompiledSampleRNG(seed, device) if compiled else SampleRNG(seed, device)
