"""Context parallelism: what a plan says of modules that work on parts of sequences, and how those are cut."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from contextvars import ContextVar
from copy import copy
from functools import cache, partial
from math import lcm
from typing import Any, NamedTuple

import torch
from torch import Tensor, cat, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Partial, Replicate, Shard
from torch.distributed.tensor.parallel import ParallelStyle, SequenceParallel, parallelize_module
from torch.nn.functional import pad

from trainer.data.nested_tensors import first_tensor, map_tensors, named_tensors, replace_tensors, tensors
from trainer.learning.parallel_plan import Plan
from trainer.messages import Refusal
from trainer.parallel.ranks import Group, Ranks
from trainer.parallel.units import require_modules


class Pieces(NamedTuple):
    """Some of so many equal pieces, by their numbers from the front."""

    numbers: tuple[int, ...]
    of: int

    def part(self, other: Pieces) -> Pieces:
        """Some of these, which lie one behind the other, and of which all together are pieces of once more."""
        finer = lcm(len(self.numbers), other.of) // len(self.numbers)
        parts = [number * finer + at for number in self.numbers for at in range(finer)]
        each = len(parts) // other.of
        selected = [part for number in other.numbers for part in parts[number * each : (number + 1) * each]]
        return Pieces(tuple(selected), self.of * finer)


def rank_pieces(rank: int, ranks: int, tokens: int, most: int) -> Pieces:
    """Those of a rank that has so many tokens of each sequence: all ranks have as many, so they know alike.

    Two pieces, one from the front and one from the back, so that causal attention is the same work for all ranks
    (zigzag, as Grattafiori et al. 2024, arXiv:2407.21783, section 3.3.2); one where the tokens are odd, or `most` is 1.
    """
    if most == 2 and tokens % 2 == 0:
        return Pieces((rank, 2 * ranks - 1 - rank), 2 * ranks)
    return Pieces((rank,), ranks)


# the call of a module, the same object for all its pieces; and which one of the rank's pieces it computes at present
_PIECE: ContextVar[tuple[object, int] | None] = ContextVar("computed", default=None)


@contextmanager
def computing_piece(call: object, at: int) -> Iterator[None]:
    """Inside it a module computes one piece: what it draws is as if the module had all pieces at once."""
    token = _PIECE.set((call, at))
    try:
        yield
    finally:
        _PIECE.reset(token)


def current_piece() -> tuple[object, int] | None:
    """The call and its piece; None where a rank's pieces are computed together."""
    return _PIECE.get()


Forward = Callable[..., Any]  # what a module answers


class _PiecewiseStyle(ParallelStyle):
    """A style for modules that are called once for each piece of a stretch, or are told of all pieces."""

    pieces = 2  # that a stretch has at most: 1 where the plan has styles of others, which may not know of two
    _dim: int

    def _apply(self, module: nn.Module, device_mesh: DeviceMesh) -> nn.Module:
        """What torch calls, in 2.11 to 2.15: no public name is meant for styles of one's own."""
        vars(module)["stretched"] = partial(self._call, module.forward, device_mesh, device_mesh.get_local_rank())
        vars(module).pop("forward", None)  # it is in the line above
        module.__class__ = _piecewise_class(type(module))  # type: ignore[arg-type]  # mypy takes no class for hashable
        return module

    @abstractmethod
    def _call(self, forward: Forward, mesh: DeviceMesh, rank: int, *args: Any, **more: Any) -> Any:
        """What the module answers for a rank's stretch."""

    def _each(
        self, forward: Forward, mine: Pieces, piece_arguments: Callable[..., list[Any]], *args: Any, **more: Any
    ) -> Any:
        """Its answers for all pieces, one behind the other. told: of a piece's number and arguments, which ones."""
        dim, dims, tokens = self._dim, args[0].dim(), args[0].shape[self._dim]
        call, size, answers = object(), tokens // len(mine.numbers), []
        for index, number in enumerate(mine.numbers):

            def cut(x: Tensor, start: int = index * size) -> Tensor:
                return x.narrow(dim, start, size) if x.dim() == dims and x.shape[dim] == tokens else x

            with nullcontext() if torch.compiler.is_compiling() else computing_piece(call, index):
                answers.append(forward(*piece_arguments(number, map_tensors([*args], cut)), **map_tensors(more, cut)))
        if len(answers) == 1:
            return answers[0]
        several = zip(*map(tensors, answers), strict=True)
        return replace_tensors(answers[0], [_concatenate(each, dim % dims, dims, size) for each in several])


class GatheredKeys(_PiecewiseStyle):
    """For a plan's `context`: causal attention, called with (queries, keys, values), gets all earlier keys and values.

    This rank's stretch is two pieces of the sequence, and the module is called for each. It gets the queries of the
    piece, (…, T, …), and keys and values from the beginning of the sequence to the end of the piece, (…, S, …): so the
    last query may see the last key, and each query before one key less (`torch.nn.attention.bias.causal_lower_right`).
    Gathered, not sent in a ring: Grattafiori et al. 2024, arXiv:2407.21783, section 3.3.2. dim: that of the tokens.
    """

    def __init__(self, dim: int = 2) -> None:
        self._dim = dim

    def _call(self, forward: Forward, mesh: DeviceMesh, rank: int, *args: Any, **more: Any) -> Any:
        queries, keys, values, *_ = args
        ranks, tokens, widths = mesh.size(), queries.shape[self._dim], (keys.shape[-1], values.shape[-1])
        mine = rank_pieces(rank, ranks, tokens, self.pieces)
        size = tokens // len(mine.numbers)
        # they come rank by rank; of later pieces nothing is seen
        arrived = [
            number for other in range(ranks) for number in rank_pieces(other, ranks, tokens, self.pieces).numbers
        ]
        chunks = _all_gather(cat((keys, values), -1), mesh, self._dim).split(size, self._dim)
        earlier = cat([chunks[arrived.index(number)] for number in range(mine.numbers[-1] + 1)], self._dim)

        def piece_arguments(number: int, cut: list[Any]) -> list[Any]:
            return [cut[0], *earlier.narrow(self._dim, 0, (number + 1) * size).split(widths, -1), *cut[3:]]

        return self._each(forward, mine, piece_arguments, *args, **more)


class ShiftedPlaces(_PiecewiseStyle):
    """For a plan's `context`: a module that gets positions of tokens gets those in the whole sequence.

    argument: which one holds the place of the first token, or the places of all, as numbers. dim: that of the tokens
    in the first argument. With the place of the first token it is called for each of this rank's pieces.
    """

    def __init__(self, argument: int = 0, dim: int = -1) -> None:
        self._argument, self._dim = argument, dim

    def _call(self, forward: Forward, mesh: DeviceMesh, rank: int, *args: Any, **more: Any) -> Any:
        index, positions, tokens = self._argument, args[self._argument], args[0].shape[self._dim]
        mine = rank_pieces(rank, mesh.size(), tokens, self.pieces)
        size = tokens // len(mine.numbers)
        dims = [self._dim] if index == 0 else range(positions.dim())[::-1] if isinstance(positions, Tensor) else ()
        along = next((dim for dim in dims if positions.shape[dim] == tokens), None)
        if along is not None:  # the places of all
            each = zip(mine.numbers, range(len(mine.numbers)), positions.split(size, along), strict=True)
            shifted = cat([x + (number - before) * size for number, before, x in each], along)
            return forward(*args[:index], shifted, *args[index + 1 :], **more)

        def piece_arguments(number: int, cut: list[Any]) -> list[Any]:
            return [*cut[:index], positions + number * size, *cut[index + 1 :]]

        return self._each(forward, mine, piece_arguments, *args, **more)


@cache
def _piecewise_class(kind: type[nn.Module]) -> type[nn.Module]:
    """A class of the same name, as recomputing makes one: so both may be asked of a module."""

    def forward(self: Any, *args: Any, **more: Any) -> Any:
        return self.stretched(*args, **more)

    attributes = {"__module__": kind.__module__, "__qualname__": kind.__qualname__, "forward": forward}
    return type(kind.__name__, (kind,), attributes)


def _concatenate(each: tuple[Tensor, ...], dim: int, dims: int, size: int) -> Tensor:
    """Answers for pieces of so many tokens, one behind the other; their tokens may lie elsewhere, as (B, T, …)."""
    last = each[-1]
    order = [*[dim] * (last.dim() == dims), *range(1, last.dim())]
    along = next((at for at in order if last.shape[at] == size), None)
    if along is None:
        raise RuntimeError(f"a module under GatheredKeys or ShiftedPlaces gave {tuple(last.shape)} for {size} tokens")
    # of weights of attention, (…, T, S), each piece has as many as it sees
    return cat([pad(x, (0, last.shape[-1] - x.shape[-1])) for x in each], along)


def _all_gather(sequence_shard: Tensor, mesh: DeviceMesh, dim: int) -> Tensor:
    """Collective: the stretches of all context ranks, one behind the other; gradients go back to whom they belong."""
    sharded = DTensor.from_local(sequence_shard, mesh, [Shard(dim)], run_check=False)
    # the context ranks; forward: each one's keys and values to all, backward: the sum of what all have found for them
    return sharded.redistribute(placements=[Replicate()]).to_local(grad_placements=[Partial()])


TOKENS = 1  # the dimension of a batch's tensors along which sequences are cut: (B, T, …)
ALTERNATIVE = "strategy=ddp and strategy=fsdp need no such plan"


def apply_context_parallel(network: nn.Module, plan: Plan, ranks: Ranks, device_type: str) -> None:
    """Let the modules that the plan names work on stretches, in place."""
    if isinstance(ranks, Group):
        mesh = DeviceMesh.from_group(ranks.group, device_type, mesh_dim_names=("context",))
        styles = {key: copy(style) for key, style in plan.context.items()}
        for style in styles.values():
            vars(style)["pieces"] = max_pieces(plan)
        parallelize_module(network, mesh, styles)


def max_pieces(plan: Plan) -> int:
    """Of how many pieces a stretch may be: of two, or of one where the plan has styles of others, who know of one."""
    return 2 if {type(style) for style in plan.context.values()} <= {GatheredKeys, ShiftedPlaces} else 1


def shard_sequences(tree: Any, ranks: Ranks, most: int) -> Any:
    """This rank's stretch of every sequence of a batch, (B, T, …) to (B, T / ranks, …), of at most so many pieces.

    Refusal where there is none.
    """
    if ranks.size == 1:
        return tree
    refuse_sequences(tree, "a batch", ranks.size, Plan(), 1)  # lengths may differ from batch to batch

    def cut(x: Tensor) -> Tensor:
        numbers, of = rank_pieces(ranks.rank, ranks.size, x.shape[TOKENS] // ranks.size, most)
        each = x.chunk(of, TOKENS)
        return cat([each[number] for number in numbers], TOKENS)

    return map_tensors(tree, cut)


def count_tokens(tree: Any) -> int:
    """How many tokens a batch has of each sample; 1 where its samples are no sequences."""
    return (*first_tensor(tree).shape, 1)[TOKENS]


def refuse_context(network: nn.Module, plan: Plan) -> None:
    """Refuse a plan that does not say how the network works on stretches, or that names what is not there."""
    if not plan.context:
        raise Refusal(
            f"{type(network).__name__} cannot be trained on stretches of its sequences: its plan has no context="
            f"{{attention: GatheredKeys(), …}}; the decoders of recipes.language have one; {ALTERNATIVE}"
        )
    for key in plan.context:
        require_modules(network, key, "the plan's context", f"; {ALTERNATIVE}")


def refuse_sequences(tree: Any, what: str, context: int, plan: Plan, tensor: int) -> None:
    """Refuse tensors that are no sequences, (B, T, …), or whose length these ranks do not divide."""
    # a plan may have tensor ranks split the tokens of a stretch once more
    split = any(isinstance(style, SequenceParallel) for style in plan.tensor.values())
    pieces = context * (tensor if split else 1)
    ranks = f"{context} context ranks" + (f" / {tensor} tensor ranks" if pieces > context else "")
    for name, x in named_tensors(tree, what):
        if x.dim() <= TOKENS:
            raise Refusal(
                f"strategy.context={context} cuts sequences (B, T, …), but {name} has the shape {tuple(x.shape)},"
                f" without tokens; {ALTERNATIVE}"
            )
        length = x.shape[TOKENS]
        if length % pieces:
            near = " and ".join(str(n) for n in (length // pieces * pieces, -(-length // pieces) * pieces) if n)
            raise Refusal(
                f"{name} has sequences of {length} tokens, and {length} / {ranks} is not whole; lengths that work:"
                f" {near} (data.length)"
            )
