"""Mistakes of the program in random numbers, in the order of data and in what becomes of it."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.utils.checkpoint import checkpoint

from tests.planted.copies import MICRO
from tests.planted.networks import rank
from tests.planted.plant import DROPOUT, NET, STRATEGY, VIT, Plant
from tests.planted.shards import FOUR

BEGIN = "trainer.parallel.rng.sample_rng.SampleRNG.begin_forward"
RANDOM = (*STRATEGY, "random numbers")
MIXED = tuple(word for word in VIT if word != "task=classes")  # labels are no longer numbers of classes
THIRD_DATA = ("at step 3, data, inputs",)


def other_masks(original: Any) -> Any:
    """What is computed again draws anew."""
    return lambda run, *args, **more: checkpoint(run, *args, **{**more, "preserve_rng_state": False})


def first_epoch_again(original: Any) -> Any:
    """One rank has not heard that there is another epoch."""
    return lambda self, epoch, start=0: original(self, 0 if rank() else epoch, start)


def wrong_partner(original: Any) -> Any:
    """The partner of a sample is its neighbour's."""

    def find_partners(self: Any, global_batch: int) -> tuple[Tensor, Tensor]:
        needed, partners = original(self, global_batch)
        return needed, partners.roll(1)

    return find_partners


PLANTS = {
    "stale_keys": Plant(
        "the random numbers of a step are those of the first one",
        (*VIT, DROPOUT),
        ("strategy=ddp",),
        ("at step 2, forward",),
        RANDOM,
        {BEGIN: lambda original: lambda self, indices, step, *place: original(self, indices, 0, *place)},
    ),
    "keys_by_rank": Plant(
        "the random numbers of a sample depend on its rank",
        (*VIT, DROPOUT),
        ("strategy=fsdp",),
        ("at step 1, forward",),
        RANDOM,
        {BEGIN: lambda original: lambda self, indices, *place: original(self, indices + 10_000 * rank(), *place)},
    ),
    "keys_by_place": Plant(
        "the random numbers of a sample depend on its place in its micro-batch",
        (*VIT, DROPOUT),
        ("strategy=single", MICRO),
        ("at step 1, forward",),
        RANDOM,
        {BEGIN: lambda original: lambda self, indices, *place: original(self, torch.arange(len(indices)), *place)},
        size=1,
    ),
    "rows_by_size": Plant(
        "whose a row of a draw is, is guessed from its size",
        (*NET, "+model.kind=views"),
        ("strategy=ddp",),
        ("at step 1, forward",),
        RANDOM,
        {"trainer.parallel.rng.random_draw.DrawSites.find": lambda original: lambda *_: None},
    ),
    "other_masks": Plant(
        "what is computed again in the backward has other masks",
        (*VIT, DROPOUT),
        ("strategy=fsdp", "strategy.activation_checkpointing=units"),
        ("at step 1, gradient",),
        RANDOM,
        {"trainer.parallel.activation_checkpointing.checkpoint": other_masks},
    ),
    "first_epoch_again": Plant(
        "a rank forgets set_epoch",
        NET,
        ("strategy=ddp",),
        ("at step 3, data, inputs, rank 1",),
        STRATEGY,
        {"trainer.data.loader.TrainLoader.epoch": first_epoch_again},
    ),
    "one_order": Plant(
        "every epoch has the order of the first",
        NET,
        ("strategy=hsdp",),
        THIRD_DATA,
        STRATEGY,
        {"trainer.data.sampler.EpochOrder.__call__": lambda original: lambda self, epoch: original(self, 0)},
        FOUR,
    ),
    "augmented_by_place": Plant(
        "the augmentation of a sample depends on its place in the batch",
        VIT,
        ("strategy=zero1",),
        ("at step 1, data, inputs",),
        STRATEGY,
        {
            "trainer.data.micro_batches.Random": lambda original: (
                lambda seed, epoch, indices: original(seed, epoch, torch.arange(len(indices)))
            )
        },
    ),
    "wrong_partner": Plant(
        "a sample is mixed with its neighbour's partner",
        (*MIXED, "schedule=even", "data.augment.mixup=0.5"),
        ("strategy=tp",),
        ("at step 1, data, inputs",),
        STRATEGY,
        {"trainer.data.sampler.RankSampler.find_partners": wrong_partner},
    ),
}
