"""What a run looks at in its data before the first step: own random numbers of items, and padding that counts."""

from __future__ import annotations

from functools import partial
from itertools import takewhile
from time import perf_counter
from typing import Any

import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

from trainer.data.data import ReadTwice
from trainer.data.dataset_reader import is_read_by_item
from trainer.data.loader import Batch
from trainer.data.nested_tensors import named_tensors
from trainer.data.sampler import dataset_size
from trainer.jobs.run_parts import PreparedRun
from trainer.learning.freezing import NORMS, StaysInEvaluation
from trainer.loop.trainer import Trainer
from trainer.parallel.ranks import gather_exceptions

_SECONDS = 5.0  # after which no further item is read twice
_READ_TWICE = 8  # items: a flip that chance decides may come out alike
# relative to a loss: more than padding changes where it is masked, in the precision of the run
_ROUNDING = {"fp64": 1e-6, "fp32": 1e-4, "bf16": 5e-2, "fp16": 5e-2}


def data_notes(run: PreparedRun, trainer: Trainer) -> list[str]:
    """Collective, before the first step: sentences about the data for the user."""
    # all ranks, once; what the main rank has found
    own = trainer.strategy.world.broadcast_value(_own_generator_notes(run) if run.machine.launch.is_main else [])
    return own or _padding_notes(trainer)  # of an item that is always another one nothing else can be told


def _own_generator_notes(run: PreparedRun) -> list[str]:
    """A sentence if items of the training set are others when they are read again with the same seeds."""
    if type(run.training) is TensorDataset:
        return []
    # in a process of its own, which takes with it what items open, count and keep; where items are read in such ones
    workers = int(run.settings.loader.workers != 0 and is_read_by_item(run.training, run.data.collate))
    size = dataset_size(run.training)
    twice = DataLoader(
        ReadTwice(run.training, run.settings.seed),
        batch_size=None,
        sampler=range(min(size, _READ_TWICE)),
        num_workers=workers,
        generator=torch.Generator().manual_seed(0),  # or it would draw from the global one
    )
    began = perf_counter()
    # a minute for eight films is too much
    if not any(takewhile(lambda _: perf_counter() - began < _SECONDS, twice)):
        return []
    return [
        f"{type(run.training).__name__}: an item is another one when it is read again with the same seed. Its random"
        " numbers are its own, or it remembers something: the curve depends on workers and ranks, and a resumed run is"
        " another one (docs/data.md, Random numbers of other libraries)"
    ]


def _padding_notes(trainer: Trainer) -> list[str]:
    """Collective: a sentence if samples are padded to the largest beside them, and it counts.

    A BatchNorm counts what is padded; of all else one sample tells, whose loss is computed with and without padding.
    """
    samples = trainer.train_loader.padded_sample()  # the same two batches on every rank
    if samples is None:
        return []
    alone, padded = samples
    norms = {
        name: module
        for name, module in trainer.model.network.named_modules()
        if isinstance(module, NORMS) and not isinstance(module, StaysInEvaluation)
    }
    seen: dict[str, set[int]] = {}  # BatchNorm → how many values of a channel it gets of one sample

    def watch(name: str, module: nn.Module, inputs: tuple[Any, ...]) -> None:
        seen.setdefault(name, set()).add(inputs[0].shape[2:].numel())

    hooks = [module.register_forward_pre_hook(partial(watch, name)) for name, module in norms.items()]
    try:
        changes = _changes_loss(trainer, alone, padded)
    finally:
        for hook in hooks:
            hook.remove()
    counting = [name for name, sizes in seen.items() if len(sizes) > 1]
    # all ranks, once: stages have other layers
    counting = [name for of_rank in gather_exceptions(trainer.strategy.world, counting) for name in of_rank]
    if counting:
        who = f"{counting[0]}, a BatchNorm, takes its statistics over the padding, too"
    elif changes:
        who = "the loss of a sample depends on its padding"
    else:
        return []
    pairs = zip(named_tensors(alone[:2], ""), named_tensors(padded[:2], ""), strict=True)
    (name, single), (_, beside) = next(pair for pair in pairs if pair[0][1].shape != pair[1][1].shape)
    part = ("inputs", "targets")[int(name[1])] + name[2:]
    return [
        f"collate pads samples to the largest beside them ({part} of one: {tuple(single.shape)}, and"
        f" {tuple(beside.shape)} beside another), and {who}. Ranks and micro-batches pad differently, so the curve"
        " depends on them: pad to one size in all batches, or mask the padding (docs/extending.md, Padding)"
    ]


def _changes_loss(trainer: Trainer, alone: Batch, padded: Batch) -> bool:
    """Collective: is the loss of a sample, or its weight, another one where it is padded further?"""
    model = trainer.model
    try:
        with torch.no_grad():
            # of all data ranks, which have the same sample here; a few numbers
            first, other = (trainer.strategy.totals(model.evaluate(batch, 1)).read() for batch in (alone, padded))
    except Exception:  # what fails on one sample need not fail on a batch
        return False
    limit = _ROUNDING[model.machine.resolved_precision]
    pairs = [(float(first[name]), float(other[name])) for name in ("loss", "weight")]
    return any(abs(one - two) > limit * max(abs(one), abs(two)) for one, two in pairs)
