"""Mistakes of the program where ranks hold stages of a pipeline, or stretches of sequences."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor, Replicate, Shard

from tests.planted.copies import GRADIENT, LOSS, MICRO, SHARES
from tests.planted.plant import DROPOUT, GPT, STRATEGY, VIT, Plant
from tests.planted.shards import FINISH, FOUR, TENSOR, multiplied
from trainer.data.nested_tensors import map_tensors
from trainer.parallel.ranks import Ranks

STRETCH = ("at step 1, forward", *LOSS)  # of modules context ranks have stretches, which are not compared
STAGED = "trainer.strategies.pipeline_model"


def stale_activation(original: Any) -> Any:
    """A stage computes with what came for the micro-batch before."""
    before: list[Any] = []

    def call(self: Any, stage: Any, received: Any, *batch: Any) -> Any:
        if received and torch.is_grad_enabled():
            before.append([x.detach() for x in received])
            if len(before) > 1 and before[-2][0].shape == received[0].shape:
                received = tuple(0 * x + stale.to(x) for x, stale in zip(received, before[-2], strict=True))
        return original(self, stage, received, *batch)

    return call


def mixed_order(original: Any) -> Any:
    """The last stage takes the micro-batches from the back."""

    def turns(self: Any, stage: Any, batches: list[Any], *rest: Any) -> Any:
        return original(self, stage, batches[::-1] if stage.number == self._last else batches, *rest)

    return turns


def undivided_loss(original: Any) -> Any:
    """The last stage does not weigh its micro-batches."""

    def turns(self: Any, stage: Any, batches: list[Any], step: int, share_of: Any, sums: Any) -> Any:
        return original(self, stage, batches, step, lambda index: share_of(index) * len(batches), sums)

    return turns


def stale_step(original: Any) -> Any:
    """The last stage draws as in the first step."""

    def turns(self: Any, stage: Any, batches: list[Any], step: int, *rest: Any) -> Any:
        return original(self, stage, batches, 0 if stage.number == self._last else step, *rest)

    return turns


def own_tokens(original: Any) -> Any:
    """The last token of a stretch is lost."""

    def stretch(tree: Any, *place: Any) -> Any:
        return map_tensors(original(tree, *place), lambda x: torch.cat([x[:, :-1], x[:, -2:-1]], 1))

    return stretch


def own_keys_gradient(original: Any) -> Any:
    """The gradients of keys and values are those of this rank's queries alone."""

    def gathered(stretch: Tensor, mesh: Any, dim: int) -> Tensor:
        own = DTensor.from_local(stretch, mesh, [Shard(dim)], run_check=False)
        return own.redistribute(placements=[Replicate()]).to_local(grad_placements=[Replicate()])

    return gathered


def unshifted(original: Any) -> Any:
    """Every rank takes its stretch for the first one."""
    return lambda self, forward, mesh, _, *args, **more: original(self, forward, mesh, 0, *args, **more)


def without_documents(original: Any) -> Any:
    """Attention on a stretch takes all tokens of a sample for one document."""

    def call(self: Any, *args: Any, begins: Any, **more: Any) -> Any:
        return original(self, *args, begins=0 * begins, **more)

    return call


def local_loss_group(original: property) -> property:
    """Losses are made up of those of the ranks that read other samples, whatever of their sequences."""
    return property(lambda self: self.data_group)


PLANTS = {
    "stale_activation": Plant(
        "a stage computes with the activation of the micro-batch before",
        VIT,
        ("strategy=pp", MICRO),
        ("at step 1, forward",),
        STRATEGY,
        {f"{STAGED}.PipelineModel._run_stage": stale_activation},
    ),
    "mixed_order": Plant(
        "the last stage takes the micro-batches in another order",
        VIT,
        ("strategy=pp", MICRO),
        ("at step 1, forward",),
        STRATEGY,
        {f"{STAGED}.PipelineModel._make_compute": mixed_order},
    ),
    "undivided_stages": Plant(
        "the last stage does not divide the loss by the micro-batches",
        VIT,
        ("strategy=ddp_pp", MICRO),
        LOSS,
        STRATEGY,
        {f"{STAGED}.PipelineModel._make_compute": undivided_loss},
        FOUR,
    ),
    "halved_handover": Plant(
        "the gradient that goes back to the stage before is halved",
        VIT,
        ("strategy=pp", MICRO),
        ("at step 1, gradient, blocks.0",),
        STRATEGY,
        {
            "trainer.parallel.pipeline.schedule.ContiguousGradient.backward": lambda original: (
                lambda ctx, gradient: gradient / 2
            )
        },
    ),
    "pipelines_apart": Plant(
        "two pipelines do not average their gradients",
        VIT,
        ("strategy=ddp_pp", MICRO),
        GRADIENT,
        STRATEGY,
        {f"{TENSOR}.average_gradients": lambda original: lambda *_: None},
        FOUR,
    ),
    "one_stage_unit_summed": Plant(
        "the gradients of one unit of a stage are summed, not averaged",
        VIT,
        ("strategy=fsdp_pp", MICRO),
        GRADIENT,
        STRATEGY,
        {FINISH: multiplied("blocks.0", 2)},
        FOUR,
    ),
    "stale_stage_numbers": Plant(
        "the last stage draws the random numbers of the first step in every step",
        (*VIT, DROPOUT),
        ("strategy=pp", MICRO),
        ("at step 2, forward",),
        (*STRATEGY, "random numbers"),
        {f"{STAGED}.PipelineModel._make_compute": stale_step},
    ),
    "context_degree": Plant(
        "the loss is divided by the tokens of one context rank (Megatron-LM#673)",
        GPT,
        ("strategy=cp",),
        LOSS,
        STRATEGY,
        {SHARES: lambda original: lambda task, batches, ranks, device: original(task, batches, Ranks(), device)},
    ),
    "own_keys_gradient": Plant(
        "gradients of keys and values are not summed over the context ranks (Megatron-LM#1464)",
        GPT,
        ("strategy=cp",),
        GRADIENT,
        STRATEGY,
        {"trainer.parallel.context_parallel._all_gather": own_keys_gradient},
    ),
    "lost_token": Plant(
        "the last token of each stretch is lost",
        GPT,
        ("strategy=ddp_cp", "strategy.context=2"),
        STRETCH,
        STRATEGY,
        {"trainer.strategies.sharded_model.shard_sequences": own_tokens},
        FOUR,
    ),
    "leaking_documents": Plant(
        "a mask that leaks over documents: a context rank's tokens see those before their own document, too",
        (*GPT, "data.length=64", "data.pack=true", "+task.pack=true", "+task.ignored=-100"),
        ("strategy=cp",),
        ("at step 1, forward, blocks.0.attention.core",),
        STRATEGY,
        {"trainer.parallel.context_parallel.GatheredKeys._call": without_documents},
    ),
    "unshifted_places": Plant(
        "all context ranks take their tokens for the first ones",
        GPT,
        ("strategy=fsdp_cp", "strategy.context=2"),
        STRETCH,
        STRATEGY,
        {"trainer.parallel.context_parallel.ShiftedPlaces._call": unshifted},
        FOUR,
    ),
    "context_counted_twice": Plant(
        "the loss of a step counts each context rank as a copy (Megatron-LM#906)",
        GPT,
        ("strategy=mesh", "strategy.shard=2", "strategy.context=2"),
        LOSS,
        STRATEGY,
        {"trainer.strategies.multi_process.Meshed.loss_group": local_loss_group},
        FOUR,
    ),
    "whole_masks": Plant(
        "a context rank draws as if its tokens were all of the sequence",
        (*GPT, DROPOUT),
        ("strategy=cp",),
        STRETCH,
        (*STRATEGY, "random numbers"),
        {"trainer.parallel.rng.sample_rng.SampleRNG._find_part": lambda original: lambda *_: None},
    ),
    "masks_of_shards": Plant(
        "a tensor rank draws as if its tokens were all of the sequence",
        (*GPT, DROPOUT, "model.sequence=true"),
        ("strategy=tp",),
        ("at step 1, forward",),
        (*STRATEGY, "random numbers"),
        {"trainer.parallel.rng.sample_rng.SampleRNG._find_part": lambda original: lambda *_: None},
    ),
}
