"""Cutting sequences over context ranks: the batch, the network's modules, and what cannot be cut."""

from __future__ import annotations

from copy import copy
from typing import Any

from torch import Tensor, cat, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor.parallel import SequenceParallel, parallelize_module

from trainer.data.nested_tensors import changed, first_tensor, named
from trainer.learning.parallel_plan import Plan
from trainer.parallel.context_parallel import GatheredKeys, ShiftedPlaces
from trainer.parallel.ranks import Group, Ranks
from trainer.parallel.sequence_pieces import pieces
from trainer.parallel.units import matched
from trainer.refusal import Refusal

TOKENS = 1  # the dimension of a batch's tensors along which sequences are cut: (B, T, …)
ELSE = "strategy=ddp and strategy=fsdp need no such plan"


def cut_sequences(network: nn.Module, plan: Plan, ranks: Ranks, device_type: str) -> None:
    """Let the modules that the plan names work on stretches, in place."""
    if isinstance(ranks, Group):
        mesh = DeviceMesh.from_group(ranks.group, device_type, mesh_dim_names=("context",))
        styles = {key: copy(style) for key, style in plan.context.items()}
        for style in styles.values():
            vars(style)["pieces"] = most_pieces(plan)
        parallelize_module(network, mesh, styles)


def most_pieces(plan: Plan) -> int:
    """Of how many pieces a stretch may be: of two, or of one where the plan has styles of others, who know of one."""
    return 2 if {type(style) for style in plan.context.values()} <= {GatheredKeys, ShiftedPlaces} else 1


def stretch(tree: Any, ranks: Ranks, most: int) -> Any:
    """This rank's stretch of every sequence of a batch, (B, T, …) to (B, T / ranks, …), of at most so many pieces.

    Refusal where there is none.
    """
    if ranks.size == 1:
        return tree
    refuse_sequences(tree, "a batch", ranks.size, Plan(), 1)  # lengths may differ from batch to batch

    def cut(x: Tensor) -> Tensor:
        numbers, of = pieces(ranks.rank, ranks.size, x.shape[TOKENS] // ranks.size, most)
        each = x.chunk(of, TOKENS)
        return cat([each[number] for number in numbers], TOKENS)

    return changed(tree, cut)


def tokens(tree: Any) -> int:
    """How many tokens a batch has of each sample; 1 where its samples are no sequences."""
    return (*first_tensor(tree).shape, 1)[TOKENS]


def refuse_context(network: nn.Module, plan: Plan) -> None:
    """Refuse a plan that does not say how the network works on stretches, or that names what is not there."""
    if not plan.context:
        raise Refusal(
            f"{type(network).__name__} cannot be trained on stretches of its sequences: its plan has no context="
            f"{{attention: GatheredKeys(), …}}; the decoders of recipes.language have one; {ELSE}"
        )
    for key in plan.context:
        matched(network, key, "the plan's context", f"; {ELSE}")


def refuse_sequences(tree: Any, what: str, context: int, plan: Plan, tensor: int) -> None:
    """Refuse tensors that are no sequences, (B, T, …), or whose length these ranks do not divide."""
    # a plan may have tensor ranks split the tokens of a stretch once more
    split = any(isinstance(style, SequenceParallel) for style in plan.tensor.values())
    pieces = context * (tensor if split else 1)
    ranks = f"{context} context ranks" + (f" / {tensor} tensor ranks" if pieces > context else "")
    for name, x in named(tree, what):
        if x.dim() <= TOKENS:
            raise Refusal(
                f"strategy.context={context} cuts sequences (B, T, …), but {name} has the shape {tuple(x.shape)},"
                f" without tokens; {ELSE}"
            )
        length = x.shape[TOKENS]
        if length % pieces:
            near = " and ".join(str(n) for n in (length // pieces * pieces, -(-length // pieces) * pieces) if n)
            raise Refusal(
                f"{name} has sequences of {length} tokens, and {length} / {ranks} is not whole; lengths that work:"
                f" {near} (data.length)"
            )
