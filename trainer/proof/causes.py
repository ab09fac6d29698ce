"""The likely cause of a difference, from where it was seen first, on whom, and by which factor."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from itertools import chain

from trainer.proof.record import (
    CLIPPED,
    DATA,
    EVALUATION,
    FORWARD,
    GRADIENT,
    INITIAL,
    LOSS,
    NORM,
    RATE,
    RESUME,
    STEP,
    UPDATE,
)

_STRAYS = (
    "random numbers for rows that are no samples: dropout over nodes of graphs that stand one after the other, or over"
    " sequences that are padded on the left"
)


@dataclass(frozen=True)
class Circumstances:
    """What is known of a training beside its signatures."""

    data_ranks: int
    micro_batches: int
    sync_bn: bool
    max_norm: float | None
    kinds: Mapping[str, str]  # of the network's modules, by name
    parameters: frozenset[str]  # names


@dataclass(frozen=True)
class First:
    """The first difference, as all ranks together see it."""

    step: int
    phase: str
    name: str
    gap: float
    ratio: float  # of the norms: here over the reference's
    ranks: tuple[int, ...]  # those that see it; none: nobody has what the reference has
    others: int  # ranks that have the same thing, and see no difference
    resumed: bool  # is it after the resume?


def likely(first: First, here: Circumstances) -> str:
    """The likely cause, in words."""
    own = {
        INITIAL: lambda: (
            "the ranks do not build the same network: its constructor asks who it is, or draws random"
            " numbers from what the seed does not reach"
        ),
        DATA: lambda: (
            "the data: what an item or its augmentation is depends on the process that reads it, on a worker,"
            " on what was read before, or on the other samples of its batch; it may depend on the index, and on the"
            " generators that are seeded for it (in Data.augment and Data.mix: `random`)"
        ),
        FORWARD: lambda: _forward(first, here),
        LOSS: lambda: _loss(first, here),
        GRADIENT: lambda: _gradient(first, here),
        NORM: lambda: "clipping: the gradients are the same, and the norm that is taken of them is not",
        RATE: lambda: "the schedule: the learning rate, or another number by which the optimizer steps, is another",
        CLIPPED: lambda: "clipping: gradients and their norm are the same, and what the optimizer gets is not",
        STEP: lambda: "the optimizer: gradients are the same and what it makes of them is not",
        UPDATE: lambda: _update(first, here),
        RESUME: lambda: "saving or reading: the checkpoint does not give back what was there",
        EVALUATION: lambda: (
            "the evaluation: a metric that is no sum over samples, or a forward in evaluation mode that"
            " depends on the other samples of its batch"
        ),
    }
    keeper = {DATA: "Data", LOSS: "Task", RATE: "Schedule", UPDATE: "Task"}.get(first.phase)
    resume = f"the resume: something that {keeper} keeps is in no checkpoint; or " if first.resumed and keeper else ""
    return resume + own[first.phase]()


def _forward(first: First, here: Circumstances) -> str:
    kind = here.kinds.get(first.name, "")
    if "BatchNorm" in kind or "SyncBatchNorm" in kind:
        if here.data_ranks > 1 and not here.sync_bn:
            return "BatchNorm takes its statistics over the samples of one rank; strategy.sync_bn=true: over all ranks"
        if here.micro_batches > 1:
            return "BatchNorm takes its statistics over a micro-batch, so they depend on loop.micro_batches"
    if first.resumed:
        return "the resume: something that the forward reads is in no checkpoint (no parameter, no persistent buffer)"
    if "Drop" in kind:
        return (
            f"random numbers: torch's own (loop.dropout=native), which depend on ranks and micro-batches, or {_STRAYS}"
        )
    if first.others:
        return (
            "this rank's own: its code asks for the rank or the process, it draws random numbers (Python's, NumPy's),"
            " keeps a state of its own, or chooses by its samples what it computes; or its device computes something"
            f" else; or it draws {_STRAYS}"
        )
    return (
        "what this module computes for a sample depends on the other samples of its micro-batch (a mean or a sort over"
        " the batch, or it chooses by them what it computes), on random numbers, or on a state that ranks do not share"
        f"; or it draws {_STRAYS}"
    )


def _loss(first: First, here: Circumstances) -> str:
    factor = _factor(first.ratio, here)
    by = f"it is {factor} times that of one process: " if factor else ""
    return (
        f"the loss: {by}Task.loss must be the mean over the Task.weight units of its own samples. A sum, or a division"
        " by another number (of the batch, of ranks, of all words), gives a loss that depends on how a batch is divided"
    )


def _gradient(first: First, here: Circumstances) -> str:
    if not first.ranks:
        return (
            "no rank has this gradient: its weight takes no part there; it is used outside of the unit that holds it"
            " (functional_call, a tied weight), or only by some samples"
        )
    if factor := _factor(first.ratio, here):
        return f"averaging: the gradient is {factor} times what it should be, as a sum is to a mean over as many"
    return (
        "losses are the same and gradients are not: a backward of its own (autograd.Function, a hook) that is not"
        " linear in the samples, a weight used outside of the unit that holds it, or a gradient that is not averaged"
    )


def _update(first: First, here: Circumstances) -> str:
    if first.name in here.parameters or first.name.startswith("optimizer/"):
        return "Task.after_step: after the optimizer's step all is the same"
    if first.name.startswith("ema/"):
        return "the moving average of the weights"
    return (
        "a buffer that each rank updates from its own samples, and that nobody brings together (of BatchNorm"
        " strategy.sync_bn=true does); ranks then go different ways"
    )


def _factor(ratio: float, here: Circumstances) -> str:
    """The ratio as a whole number, or one over it, that ranks or micro-batches explain; empty: they do not."""
    ranks, slices = here.data_ranks, here.micro_batches
    wholes = {n for n in (ranks, slices, ranks * slices) if n > 1}
    fits = chain(
        (str(n) for n in wholes if abs(ratio - n) < 1e-3 * n),
        (f"1/{n}" for n in wholes if abs(ratio * n - 1) < 1e-3),
    )
    return next(_sorted(fits), "")


def _sorted(words: Iterator[str]) -> Iterator[str]:
    return iter(sorted(words, key=len))
