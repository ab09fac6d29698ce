"""The cause of a difference: what an experiment has confirmed, and no more than that."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import dataclass, field
from itertools import chain

from trainer.verify.training_record import (
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

# The plain loop of one process once more, with one thing changed: is it another one then, in the same place?
AGAIN, SHOWN, DIVIDED, ANEW = "repeated", "with the other processes in sight", "divided", "with all objects made anew"
# The strategy once more, with one thing taken out: is it as the plain loop then?
CONSTANT, STRAIGHT, ONE_BATCH = "random numbers", "the resume", "micro-batches"
KEPT, UNCOMPILED, SYNC_BN = "recomputing", "compiling", "strategy.sync_bn=true"
# The plain loop, divided, with its parts in the other order; either of them, with no evaluation between the steps
TURNED, LEFT = "divided, in the other order", "evaluations between the steps"
# The plain loop after a forward that is no step's
REHEARSED = "after a trial forward"

_SUBJECT = {
    INITIAL: "the network: its constructor",
    DATA: "the data: an item or its augmentation",
    FORWARD: "the network: what this module computes",
    LOSS: "the task: its loss",
    GRADIENT: "the network: a backward of it, or of the task,",
    NORM: "the network: a gradient",
    RATE: "the schedule: the rate",
    CLIPPED: "the network: a gradient",
    STEP: "the optimizer: what it makes of the same gradients",
    UPDATE: "the task: after_step, or a buffer of the network,",
    RESUME: "the network: what it or its optimizer gives a checkpoint, or takes from it,",
    EVALUATION: "the evaluation: its forward or a metric",
}
_KEEPERS = {
    DATA: "Data keeps",
    FORWARD: "the forward reads (no parameter, no persistent buffer)",
    LOSS: "Task keeps",
    RATE: "Schedule keeps",
    UPDATE: "Task keeps",
}
_STRATEGYS = {
    INITIAL: "the values that it gives to ranks",
    DATA: "the samples that a rank reads, and where it goes on",
    FORWARD: "what it makes of this forward",
    LOSS: "how it adds up the losses of micro-batches and ranks",
    GRADIENT: "how it adds up the gradients of micro-batches and ranks",
    NORM: "the norm that it takes of the same gradients",
    RATE: "the rate that it gives the optimizer",
    CLIPPED: "what it does to the same gradients before the step, such as clipping",
    STEP: "how a rank steps what is its own",
    UPDATE: "what follows the optimizer's step: what ranks send each other, and averages",
    RESUME: "saving or reading: the checkpoint does not give back what was there",
    EVALUATION: "its forward in an evaluation, and which samples count",
}


@dataclass(frozen=True)
class Circumstances:
    """What is known of a training beside its signatures."""

    data_ranks: int
    micro_batches: int
    planned: bool  # do ranks share the work on one sample, as a plan says?
    native: bool  # are random numbers torch's own?
    kinds: Mapping[str, str]  # of the network's modules, by name
    strays: Collection[str] = ()  # what was heard of draws for rows that are no samples
    stepping: str = ""  # the class of an optimizer that is not torch's, and is given shards


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


@dataclass(frozen=True)
class Tried:
    """What experiments have shown; what was not tried is in none of them."""

    alone: Mapping[str, bool] = field(default_factory=dict)  # does the plain loop differ there as well, so changed?
    mended: Mapping[str, bool] = field(default_factory=dict)  # is the strategy right, with that taken out?
    drawn: Collection[str] = ()  # generators that a forward draws from
    failed: str = ""  # why there is nothing to compare with


def likely(first: First, here: Circumstances, tried: Tried) -> str:
    """The cause, in words: of what experiments have confirmed the nearest; else what they have ruled out."""
    alone, mended = tried.alone, tried.mended
    if alone.get(ANEW):
        return f"the resume: something that {_KEEPERS.get(first.phase, 'an object keeps')} is in no checkpoint"
    if alone.get(AGAIN):
        return (
            f"{_SUBJECT[first.phase]} differs when the same steps are repeated in the same process: it draws"
            " random numbers that no seed reaches, or depends on what was done before"
        )
    if alone.get(SHOWN):
        return (
            f"{_SUBJECT[first.phase]} differs when other processes are in sight: its code asks for the rank, or"
            " for their number"
        )
    if alone.get(LEFT):
        return (
            f"an evaluation before this step: {_SUBJECT[first.phase]} is another one without it, so something keeps"
            " what an evaluation has left"
        )
    if alone.get(DIVIDED):
        return _divided(first, here, alone, mended)
    if alone.get(REHEARSED):
        return (
            f"a forward before the first step: {_SUBJECT[first.phase]} is another one after it, so something that is no"
            " buffer keeps what it has left. Strategies do such forwards, to see what a step uses"
        )
    if mended.get(CONSTANT) and tried.drawn:
        return _drawn(here, tried.drawn)
    if tried.failed:
        return f"not known: the same steps cannot be done without the strategy ({tried.failed})"
    if mended.get(CONSTANT):
        return (
            "not known: with the strategy it is now as in a plain loop on one of these processes; it came once, or lies"
            " in what both of them use"
        )
    return _strategys(first, here, tried)


def _divided(first: First, here: Circumstances, alone: Mapping[str, bool], mended: Mapping[str, bool]) -> str:
    """One process differs as well where it divides its batch so."""
    if "BatchNorm" in here.kinds.get(first.name, "") and first.phase == FORWARD:
        if mended.get(SYNC_BN):
            return (
                "the network: BatchNorm takes its statistics over the samples of one rank; strategy.sync_bn=true: over"
                " all ranks"
            )
        return "the network: BatchNorm takes its statistics over a micro-batch, so they depend on loop.micro_batches"
    if alone.get(TURNED):
        return (
            f"{_SUBJECT[first.phase]} depends on what was computed before it in the same step: something counts its"
            " calls, or keeps what a micro-batch has left"
        )
    factor = _factor(first.ratio, here)
    by = f" It is {factor} times that of one process" if factor else ""
    return {
        DATA: (
            "the data: an item depends on the other samples of its batch; it may depend on the index, and on the"
            " generators that are seeded for it (in Data.augment and Data.mix: `random`)"
        ),
        LOSS: (
            "the task: Task.loss must be the mean over the Task.weight units of its own samples. A sum, or a division"
            f" by another number (of the batch, of ranks, of all words), depends on how a batch is divided.{by}"
        ),
        GRADIENT: (
            "the network: a backward of its own (autograd.Function, a hook), or of the task's, that is not linear in"
            " the samples: it depends on how a batch is divided"
        ),
        UPDATE: (
            "the network: a buffer that is updated from the samples that are there, and that nobody brings together"
        ),
        EVALUATION: (
            "the evaluation: a metric that is no sum over samples, or a forward in evaluation mode that depends on the"
            " other samples of its batch"
        ),
    }.get(
        first.phase,
        "the network: what this module computes for a sample depends on the other samples of its micro-batch (a mean or"
        " a sort over the batch, or it chooses by them what it computes)",
    )


def _drawn(here: Circumstances, drawn: Collection[str]) -> str:
    """Without random numbers it is right."""
    others = sorted(name for name in drawn if name != "torch's")
    if others:
        return (
            f"random numbers: the forward draws from {' and '.join(others)} generator, which knows nothing of samples;"
            " torch's draws are each sample's own"
        )
    if here.native:
        return "random numbers: torch's own (loop.dropout=native) depend on ranks and micro-batches"
    if here.strays:
        return (
            "random numbers for rows that are no samples: dropout over nodes of graphs that stand one after the other,"
            " or over sequences that are padded on the left"
        )
    return "the strategy: the random numbers that it gives to a sample; without any it trains the same"


def _strategys(first: First, here: Circumstances, tried: Tried) -> str:
    """What users have written is right by itself, however it is divided."""
    whose = "the strategy, or the plan that says how it divides the network" if here.planned else "the strategy"
    what = _STRATEGYS[first.phase]
    if first.phase == STEP and here.stepping:
        return (
            f"not known: the strategy, or {here.stepping}, which is given shards here and is right without. An"
            " optimizer must compute element by element, or with norms that torch takes of whole DTensors"
        )
    if tried.mended.get(STRAIGHT):
        what = f"what it saves or reads for the resume; {what}"
    elif tried.mended.get(LEFT):
        what = f"what an evaluation leaves behind; {what}"
    if first.phase == GRADIENT and not first.ranks:
        what = "no rank has this gradient: it was lost, or its weight is used outside of the unit that holds it"
    elif first.phase in (GRADIENT, LOSS) and (factor := _factor(first.ratio, here)):
        what += f"; it is {factor} times what it should be, as a sum is to a mean over as many"
    right = next((name for name in (STRAIGHT, LEFT, ONE_BATCH, KEPT, UNCOMPILED) if tried.mended.get(name)), "")
    without = f"; without {right} it is right" if right else ""
    divided = ", also divided as it divides them" if DIVIDED in tried.alone else ""
    return f"{whose}: {what}{without}. Network, task and data are right on one process{divided}"


def _factor(ratio: float, here: Circumstances) -> str:
    """The ratio as a whole number, or one over it, that ranks or micro-batches explain; empty: they do not."""
    ranks, slices = here.data_ranks, here.micro_batches
    wholes = {n for n in (ranks, slices, ranks * slices) if n > 1}
    fits = chain(
        (str(n) for n in wholes if abs(ratio - n) < 1e-3 * n),
        (f"1/{n}" for n in wholes if abs(ratio * n - 1) < 1e-3),
    )
    return next(iter(sorted(fits, key=len)), "")
