"""How a decoder's layers are split over tensor ranks, the usual way, by sequence, with a split loss; and by context."""

from __future__ import annotations

from typing import Any

from torch.distributed.tensor import Replicate, Shard
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    ParallelStyle,
    PrepareModuleInput,
    PrepareModuleOutput,
    RowwiseParallel,
    SequenceParallel,
)

from trainer.parallel.context_parallel import ShiftedPlaces
from trainer.parallel.ring_attention import RingAttention


def tensor_plan(
    tied: bool, gated: bool, learned: bool, sequence: bool, loss_parallel: bool
) -> dict[str, ParallelStyle]:
    """Layer → how it is split; of a decoder with these kinds of head, MLPs and positions.

    sequence: between the layers each rank has some of the tokens, not all (Korthikanti et al. 2022, arXiv:2205.05198).
    loss_parallel: the scores stay split by token number until the loss. Tied embeddings stay whole: only one of the two
    layers would hold the shard.
    """
    stream = Shard(1) if sequence else Replicate()
    plan: dict[str, ParallelStyle] = {
        "blocks.*.attention.qkv": ColwiseParallel(),
        "blocks.*.attention.out": RowwiseParallel(output_layouts=stream),
        "blocks.*.mlp.up": ColwiseParallel(),
        "blocks.*.mlp.down": RowwiseParallel(output_layouts=stream),
    }
    if gated:
        plan["blocks.*.mlp.gate"] = ColwiseParallel()
    if not tied:
        scores = Shard(-1) if loss_parallel else Replicate()
        plan["embed"] = RowwiseParallel(input_layouts=Replicate(), output_layouts=stream)
        plan["head"] = ColwiseParallel(input_layouts=stream, output_layouts=scores, use_local_output=not loss_parallel)
    return plan | (_by_sequence(tied, learned) if sequence else {})


def _by_sequence(tied: bool, learned: bool) -> dict[str, ParallelStyle]:
    """Where the tokens are cut, and where all of them are put together again."""
    whole: Any = {"input_layouts": (Shard(1),), "desired_input_layouts": (Replicate(),)}
    plan: dict[str, ParallelStyle] = {
        "blocks.*.attention_norm": SequenceParallel(),
        "blocks.*.attention": PrepareModuleInput(**whole),
        "blocks.*.mlp_norm": SequenceParallel(),
        "blocks.*.mlp": PrepareModuleInput(**whole),
        "norm": SequenceParallel(),
    }
    if learned:
        plan["position"] = PrepareModuleOutput(
            output_layouts=Replicate(), desired_output_layouts=Shard(-2)
        )  # (…, T, width)
    if tied:
        plan["embed"] = PrepareModuleOutput(output_layouts=Replicate(), desired_output_layouts=Shard(1))
        plan["head"] = PrepareModuleInput(**whole, use_local_output=True)  # for a weight that is no DTensor
    return plan


def context_plan(learned: bool) -> dict[str, ParallelStyle]:
    """What works on a stretch of each sequence: attention, and what tells tokens where they are."""
    places = {"position": ShiftedPlaces()} if learned else {"blocks.*.attention.positions": ShiftedPlaces(1, dim=2)}
    return {"blocks.*.attention.core": RingAttention(), **places}
