"""Context parallelism: each rank has a part of every sequence, in one or two pieces, and a plan says what modules do.

A batch is cut along its tokens, (B, T, …) to (B, T / ranks, …). Most modules work on each token by itself. Attention
and positions do not: a plan's `context` gives them a style of this file.
"""

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
from trainer.parallel.module_units import require_modules
from trainer.parallel.ranks import Group, Ranks


class Pieces(NamedTuple):
    """Which pieces of a sequence a rank has, of a sequence in so many equal pieces."""

    numbers: tuple[int, ...]  # from the front of the sequence
    of: int  # pieces of the whole sequence

    def part(self, other: Pieces) -> Pieces:
        """A part of these pieces: laid one behind the other, they are divided once more, as `other` says."""
        finer = lcm(len(self.numbers), other.of) // len(self.numbers)  # parts of each piece
        parts = [number * finer + index for number in self.numbers for index in range(finer)]
        each = len(parts) // other.of
        selected = [part for number in other.numbers for part in parts[number * each : (number + 1) * each]]
        return Pieces(tuple(selected), self.of * finer)


def rank_pieces(rank: int, ranks: int, tokens: int, most: int) -> Pieces:
    """The pieces of a rank that has so many tokens of each sequence. All ranks have as many, so nothing is sent for it.

    Two pieces, one from the front and one from the back, so that causal attention is the same work for all ranks
    (zigzag, as Grattafiori et al. 2024, arXiv:2407.21783, section 3.3.2); one where the tokens are odd, or `most` is 1.
    """
    if most == 2 and tokens % 2 == 0:
        return Pieces((rank, 2 * ranks - 1 - rank), 2 * ranks)
    return Pieces((rank,), ranks)


# (the call of a module, one object for all its pieces; the index of the piece that it computes at present)
_PIECE: ContextVar[tuple[object, int] | None] = ContextVar("piece", default=None)


@contextmanager
def computing_piece(call: object, index: int) -> Iterator[None]:
    """Inside it a module computes one piece. `SampleRNG` asks for it: a piece draws as if all were computed at once."""
    token = _PIECE.set((call, index))
    try:
        yield
    finally:
        _PIECE.reset(token)


def current_piece() -> tuple[object, int] | None:
    """The call and its piece; None where a rank's pieces are computed together."""
    return _PIECE.get()


ModuleForward = Callable[..., Any]  # of a module


class _PiecewiseStyle(ParallelStyle):
    """A style for modules that are called once for each piece of this rank's sequence, or get all pieces at once."""

    pieces = 2  # that a rank has at most: 1 where the plan has styles of others, which may not know of two
    _dim: int  # of the tokens in the first argument

    def _apply(self, module: nn.Module, device_mesh: DeviceMesh) -> nn.Module:
        """Give the module another forward. torch calls this method, in 2.11 to 2.15: there is no public one."""
        rank = device_mesh.get_local_rank()
        vars(module)["piecewise_forward"] = partial(self._call, module.forward, device_mesh, rank)
        vars(module).pop("forward", None)  # it is in the line above
        # another class, not another forward of the object: a unit's forward must be its class's to be recomputed
        module.__class__ = _piecewise_class(type(module))  # type: ignore[arg-type]  # mypy takes no class for hashable
        return module

    @abstractmethod
    def _call(self, forward: ModuleForward, mesh: DeviceMesh, rank: int, *args: Any, **more: Any) -> Any:
        """Call the module's own forward for a rank's part of the sequences. args: (B, T / ranks, …)."""

    def _call_pieces(
        self, forward: ModuleForward, mine: Pieces, piece_arguments: Callable[..., list[Any]], *args: Any, **more: Any
    ) -> Any:
        """The outputs for all pieces, one behind the other.

        piece_arguments: called with a piece's number and the arguments cut to it; what the module is called with.
        """
        dim, dims, tokens = self._dim, args[0].dim(), args[0].shape[self._dim]
        call, size, outputs = object(), tokens // len(mine.numbers), []
        for index, number in enumerate(mine.numbers):

            def cut(x: Tensor, start: int = index * size) -> Tensor:
                return x.narrow(dim, start, size) if x.dim() == dims and x.shape[dim] == tokens else x

            with nullcontext() if torch.compiler.is_compiling() else computing_piece(call, index):
                outputs.append(forward(*piece_arguments(number, map_tensors([*args], cut)), **map_tensors(more, cut)))
        if len(outputs) == 1:
            return outputs[0]
        by_tensor = zip(*map(tensors, outputs), strict=True)  # an output may have several tensors
        return replace_tensors(outputs[0], [_concatenate(pieces, dim % dims, dims, size) for pieces in by_tensor])


class GatheredKeys(_PiecewiseStyle):
    """For a plan's `context`: causal attention, called with (queries, keys, values), gets all earlier keys and values.

    This rank's stretch is two pieces of the sequence, and the module is called for each. It gets the queries of the
    piece, (…, T, …), and keys and values from the beginning of the sequence to the end of the piece, (…, S, …): so the
    last query may see the last key, and each query before one key less (`torch.nn.attention.bias.causal_lower_right`).
    Gathered, not sent in a ring: Grattafiori et al. 2024, arXiv:2407.21783, section 3.3.2. dim: that of the tokens.
    """

    def __init__(self, dim: int = 2) -> None:
        self._dim = dim

    def _call(self, forward: ModuleForward, mesh: DeviceMesh, rank: int, *args: Any, **more: Any) -> Any:
        queries, keys, values, *_ = args
        tokens, widths = queries.shape[self._dim], (keys.shape[-1], values.shape[-1])
        mine = rank_pieces(rank, mesh.size(), tokens, self.pieces)
        size = tokens // len(mine.numbers)
        # (…, S, key width + value width): all tokens up to the end of this rank's last piece; later ones are not seen
        earlier = cat(self._gather(cat((keys, values), -1), mesh)[: mine.numbers[-1] + 1], self._dim)

        def piece_arguments(number: int, cut: list[Any]) -> list[Any]:
            return [cut[0], *earlier.narrow(self._dim, 0, (number + 1) * size).split(widths, -1), *cut[3:]]

        return self._call_pieces(forward, mine, piece_arguments, *args, **more)

    def _gather(self, x: Tensor, mesh: DeviceMesh) -> list[Tensor]:
        """Collective: the pieces of whole sequences, of which each rank gives its own."""
        ranks, tokens = mesh.size(), x.shape[self._dim]
        # they arrive rank by rank, and are put in the order of the sequence
        of_ranks = [rank_pieces(other, ranks, tokens, self.pieces).numbers for other in range(ranks)]
        arrived = [number for numbers in of_ranks for number in numbers]
        chunks = _all_gather(x, mesh, self._dim).split(tokens // len(of_ranks[0]), self._dim)
        return [chunks[arrived.index(number)] for number in range(len(chunks))]


class WholeSequences(GatheredKeys):
    """For a plan's `context`: a module that must know all tokens of a sample is called with them, (B, T, …).

    Every context rank does the same work, and keeps its own tokens of each output that has them. What the module
    counts in its buffers, the first of them counts. dim: that of the tokens.
    """

    def __init__(self, dim: int = 1) -> None:
        super().__init__(dim)

    def _call(self, forward: ModuleForward, mesh: DeviceMesh, rank: int, *args: Any, **more: Any) -> Any:
        x, dim = args[0], self._dim
        mine = rank_pieces(rank, mesh.size(), x.shape[dim], self.pieces)
        pieces = self._gather(x, mesh)
        buffers = [] if rank == 0 else [*forward.__self__.buffers()]  # type: ignore[attr-defined]  # of a module
        before = [buffer.clone() for buffer in buffers]
        output = forward(cat(pieces, dim), *args[1:], **more)
        for buffer, value in zip(buffers, before, strict=True):
            buffer.copy_(value)
        tokens = x.shape[dim] * mesh.size()

        def keep(y: Tensor) -> Tensor:
            if y.dim() <= dim or y.shape[dim] != tokens:
                return y
            chunks = y.chunk(mine.of, dim)
            return cat([chunks[number] for number in mine.numbers], dim)

        return map_tensors(output, keep)


class ShiftedPlaces(_PiecewiseStyle):
    """For a plan's `context`: a module that gets positions of tokens gets those in the whole sequence.

    argument: which one holds the place of the first token, or the places of all, as numbers. dim: that of the tokens
    in the first argument. With the place of the first token it is called for each of this rank's pieces.
    """

    def __init__(self, argument: int = 0, dim: int = -1) -> None:
        self._argument, self._dim = argument, dim

    def _call(self, forward: ModuleForward, mesh: DeviceMesh, rank: int, *args: Any, **more: Any) -> Any:
        index, positions, tokens = self._argument, args[self._argument], args[0].shape[self._dim]
        mine = rank_pieces(rank, mesh.size(), tokens, self.pieces)
        size = tokens // len(mine.numbers)
        dims = [self._dim] if index == 0 else range(positions.dim())[::-1] if isinstance(positions, Tensor) else ()
        along = next((dim for dim in dims if positions.shape[dim] == tokens), None)
        if along is not None:  # the positions of all tokens
            pieces = zip(mine.numbers, range(len(mine.numbers)), positions.split(size, along), strict=True)
            shifted = cat([x + (number - before) * size for number, before, x in pieces], along)
            return forward(*args[:index], shifted, *args[index + 1 :], **more)

        def piece_arguments(number: int, cut: list[Any]) -> list[Any]:
            return [*cut[:index], positions + number * size, *cut[index + 1 :]]

        return self._call_pieces(forward, mine, piece_arguments, *args, **more)


@cache
def _piecewise_class(kind: type[nn.Module]) -> type[nn.Module]:
    """A class of the same name whose forward is `piecewise_forward`. Modules of one class share it, and its code."""

    def forward(self: Any, *args: Any, **more: Any) -> Any:
        return self.piecewise_forward(*args, **more)

    attributes = {"__module__": kind.__module__, "__qualname__": kind.__qualname__, "forward": forward}
    return type(kind.__name__, (kind,), attributes)


def _concatenate(pieces: tuple[Tensor, ...], dim: int, dims: int, size: int) -> Tensor:
    """Outputs for pieces of so many tokens, one behind the other.

    dim: of the tokens in the inputs, which have `dims` dimensions; in an output they may lie elsewhere, as (B, T, …).
    """
    last = pieces[-1]
    candidates = [*[dim] * (last.dim() == dims), *range(1, last.dim())]
    along = next((candidate for candidate in candidates if last.shape[candidate] == size), None)
    if along is None:
        raise RuntimeError(f"a module under GatheredKeys or ShiftedPlaces gave {tuple(last.shape)} for {size} tokens")
    # weights of attention, (…, T, S), have another S in each piece: the tokens that it sees
    return cat([pad(x, (0, last.shape[-1] - x.shape[-1])) for x in pieces], along)


def _all_gather(sequence_shard: Tensor, mesh: DeviceMesh, dim: int) -> Tensor:
    """Collective: the parts of all context ranks, one behind the other. Gradients go back to the rank of each part."""
    sharded = DTensor.from_local(sequence_shard, mesh, [Shard(dim)], run_check=False)
    # the context ranks; forward: each one's keys and values to all, backward: each rank gets the sum of its gradients
    return sharded.redistribute(placements=[Replicate()]).to_local(grad_placements=[Partial()])


TOKENS = 1  # the dimension of a batch's tensors along which sequences are cut: (B, T, …)
WITHOUT_CONTEXT = "strategy=ddp and strategy=fsdp need no such plan"


def apply_context_parallel(network: nn.Module, plan: Plan, ranks: Ranks, device_type: str) -> None:
    """Let the modules that the plan names work on parts of sequences, in place."""
    if isinstance(ranks, Group):
        mesh = DeviceMesh.from_group(ranks.group, device_type, mesh_dim_names=("context",))
        styles = {key: copy(style) for key, style in plan.context.items()}
        for style in styles.values():
            vars(style)["pieces"] = max_pieces(plan)
        parallelize_module(network, mesh, styles)


def max_pieces(plan: Plan) -> int:
    """How many pieces a rank may have: two, or one where the plan has styles of others, which know of one only."""
    return 2 if all(isinstance(style, GatheredKeys | ShiftedPlaces) for style in plan.context.values()) else 1


def shard_sequences(tree: Any, ranks: Ranks, most: int) -> Any:
    """This rank's part of every sequence of a batch, (B, T, …) to (B, T / ranks, …), in at most so many pieces.

    Refusal where lengths do not divide.
    """
    if ranks.size == 1:
        return tree
    refuse_sequences(tree, "a batch", ranks.size, Plan(), 1)  # lengths may differ from batch to batch

    def cut(x: Tensor) -> Tensor:
        numbers, of = rank_pieces(ranks.rank, ranks.size, x.shape[TOKENS] // ranks.size, most)
        chunks = x.chunk(of, TOKENS)
        return cat([chunks[number] for number in numbers], TOKENS)

    return map_tensors(tree, cut)


def count_tokens(tree: Any) -> int:
    """How many tokens a batch has of each sample; 1 where its samples are no sequences."""
    return (*first_tensor(tree).shape, 1)[TOKENS]


def refuse_context(network: nn.Module, plan: Plan) -> None:
    """Refuse a plan that does not say how the network works on stretches, or that names what is not there."""
    if not plan.context:
        raise Refusal(
            f"{type(network).__name__} cannot be trained on stretches of its sequences: its plan has no context="
            f"{{attention: GatheredKeys(), …}}; the decoders of recipes.language have one; {WITHOUT_CONTEXT}"
        )
    for key in plan.context:
        require_modules(network, key, "the plan's context", f"; {WITHOUT_CONTEXT}")


def refuse_sequences(tree: Any, what: str, context: int, plan: Plan, tensor: int) -> None:
    """Refuse tensors that are no sequences, (B, T, …), or whose length these ranks do not divide."""
    # in some plans tensor ranks split the tokens of a context rank once more
    split = any(isinstance(style, SequenceParallel) for style in plan.tensor.values())
    pieces = context * (tensor if split else 1)
    ranks = f"{context} context ranks" + (f" / {tensor} tensor ranks" if pieces > context else "")
    for name, x in named_tensors(tree, what):
        if x.dim() <= TOKENS:
            raise Refusal(
                f"strategy.context={context} cuts sequences (B, T, …), but {name} has the shape {tuple(x.shape)},"
                f" without tokens; {WITHOUT_CONTEXT}"
            )
        length = x.shape[TOKENS]
        if length % pieces:
            near = " and ".join(str(n) for n in (length // pieces * pieces, -(-length // pieces) * pieces) if n)
            raise Refusal(
                f"{name} has sequences of {length} tokens, and {length} / {ranks} is not whole; lengths that work:"
                f" {near} (data.length)"
            )
