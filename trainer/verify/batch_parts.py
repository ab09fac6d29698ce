"""A global batch divided by hand: the parts that ranks and micro-batches would have, each read by itself."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, NamedTuple

import torch
from torch import Tensor

from trainer.data.dataset_reader import LoaderOptions, make_reader
from trainer.data.loader import MIX_SEED, Batch
from trainer.data.nested_tensors import has_rows, select_rows, to_device
from trainer.data.rng import Random, mix_seeds
from trainer.data.sampler import split_evenly
from trainer.jobs.run_parts import PreparedRun
from trainer.learning.task import loss_weight
from trainer.parallel.ranks import Ranks


class ImaginaryRank(Ranks):
    """A rank of a group that does not exist: its number and the number of ranks."""

    def __init__(self, rank: int, size: int) -> None:
        self.rank, self.size = rank, size


class BatchPart(NamedTuple):
    """Some samples of a global batch."""

    batch: Batch
    weight: float  # units that its loss is the mean of
    rank: ImaginaryRank  # whose samples they are


def read_batch_parts(
    run: PreparedRun,
    ranks: int,
    micro_batches: int,
    epoch: int,
    indices: Tensor,
    training: bool,
    together: bool = False,
) -> Iterator[BatchPart]:
    """The parts of a global batch, each read by itself, of one rank after the other.

    together: rows of what is read at once instead, where a batch has rows; so all are padded to the same size.
    """
    size = len(indices)
    whole = _read(run, epoch, indices, torch.arange(size), training) if together else None
    cuts = whole is not None and all(has_rows(tree, size) for tree in whole)
    for rank in (ImaginaryRank(number, ranks) for number in range(ranks)):
        # spans of the global batch, each divided over the ranks: (samples of this rank,)
        for span in split_evenly(size, min(micro_batches, size)):
            rows = torch.tensor([row for row in span if row % rank.size == rank.rank])
            if not len(rows):
                continue
            if cuts:
                inputs, targets = select_rows(whole, rows.to(run.strategy.device), size)
            else:
                inputs, targets = _read(run, epoch, indices, rows, training)
            batch = Batch(inputs, targets, indices[rows], span, size)
            yield BatchPart(batch, float(loss_weight(run.task, targets, len(rows))), rank)


def _read(run: PreparedRun, epoch: int, indices: Tensor, rows: Tensor, training: bool) -> tuple[Any, Any]:
    """These samples of a global batch, each mixed with its partner where the data mixes."""
    seed, device = run.settings.seed, run.strategy.device
    data, dataset = run.data, run.training if training else run.evaluation
    read_items = make_reader(dataset, data.collate, seed, LoaderOptions(workers=0), pin=False)

    def augmented(chosen: Tensor) -> tuple[Any, Any]:
        ((_, *items),) = read_items(epoch, [chosen])
        inputs, targets = to_device(items, device)
        return data.augment(inputs, targets, Random(seed, epoch, chosen.to(device)), training)

    inputs, targets = augmented(chosen := indices[rows])
    if data.mix is None or not training:
        return inputs, targets
    # the partner is half a global batch away
    others = augmented(indices[(rows + len(indices) // 2) % len(indices)])
    return data.mix(inputs, targets, *others, Random(mix_seeds(seed, MIX_SEED), epoch, chosen.to(device)))
