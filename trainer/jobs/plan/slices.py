"""The largest micro-batch whose step fits into the memory of a device, found by trials."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import suppress
from dataclasses import replace

from trainer.jobs.batch_sizes import BatchSizes, divide_batch
from trainer.jobs.plan.trial import RankUsage, StrategyTrial, try_ranks
from trainer.messages import Refusal
from trainer.strategies.base import Strategy

MAX_INTERLEAVED = 8  # times the fewest micro-batches of a pipeline
Tried = tuple[BatchSizes, list[RankUsage]]  # of each rank that was tried


def possible_slices(whole: BatchSizes, strategy: Strategy, least_micro_batches: int) -> list[BatchSizes]:
    """Every way to divide a rank's samples of a step into micro-batches, the largest ones first."""
    share, slices = whole.total // whole.ranks, []
    for samples in range(share, 0, -1):
        with suppress(Refusal):  # it does not divide, or the strategy cannot run so many
            batches = divide_batch(whole.total, whole.ranks, 1, samples, whole.uneven)
            strategy.refuse_shares(strategy.machine.launch.world_size, share, batches.micro_batches, whole.uneven)
            if batches.micro_batches >= least_micro_batches:
                slices.append(batches)
    # a strategy that refuses a single micro-batch runs several at once, and each more of them is to be tried
    most = slices[0].micro_batches * MAX_INTERLEAVED if slices and slices[0].micro_batches > 1 else share
    return [batches for batches in slices if batches.micro_batches <= most]


def find_largest_slice(trial: StrategyTrial, slices: Sequence[BatchSizes], limit: float) -> Tried:
    """The largest slice that fits into so many bytes, with its trial; the smallest one where none does.

    What is said to fit has been tried. Memory grows about linearly with a slice, so that few trials are needed.
    """
    above, below = -1, len(slices)  # places of the smallest that does not fit, and of the largest that does
    at, fitting = 0, None
    while True:
        usages = try_ranks(replace(trial, batches=slices[at]))
        largest = max((usage.peak for usage in usages), key=lambda peak: peak.bytes)
        if largest.bytes <= limit:
            below, fitting = at, (slices[at], usages)
        else:
            above = at
        if below - above == 1:
            return fitting or (slices[at], usages)
        # activations grow with the slice, and nothing else does
        growth = max(1.0, largest.by_kind["activations"] / slices[at].largest)
        samples = slices[at].largest + (limit - largest.bytes) / growth
        between = range(above + 1, below)
        if fitting and at == below and slices[below - 1].largest > samples:
            return fitting  # the next larger one would not fit
        at = next((place for place in between if slices[place].largest <= samples), between[-1])
