"""What all ranks together have found: what differs first, and its cause as far as experiments confirm one."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from itertools import chain, islice
from typing import Any

from trainer.verify.comparison import Comparison, Difference, Margin, nearest_to_limits
from trainer.verify.precision_comparison import Rounding
from trainer.verify.training_record import Key, Phase, TrainingRecord

# The plain loop of one process once more, with one thing changed: is it another one then, in the same place?
REPEATED, PROCESSES_VISIBLE, DIVIDED, RECREATED = (
    "repeated",
    "with the other processes in sight",
    "divided",
    "with all objects made anew",
)
# The strategy once more, with one thing taken out: is it as the plain loop then?
FIXED_RANDOMNESS, NO_RESUME, ONE_MICRO_BATCH = "random numbers", "the resume", "micro-batches"
NO_RECOMPUTING, UNCOMPILED, SYNC_BN = "recomputing", "compiling", "strategy.sync_bn=true"
# The plain loop, divided, with its parts in the other order; either of them, with no evaluation between the steps
PADDED_TOGETHER = "divided, padded together"
REVERSED, NO_EVALUATIONS = "divided, in the other order", "evaluations between the steps"

# The plain loop with other numbers from Python's and NumPy's generators
RESEEDED = "with other numbers of Python and NumPy"

# The plain loop after a forward that belongs to no step
TRIAL_FORWARD = "after a trial forward"

_TAKEN_OUT = (NO_RESUME, NO_EVALUATIONS, ONE_MICRO_BATCH, NO_RECOMPUTING, UNCOMPILED)

# Of each phase: what users have written, if the plain loop differs there as well
_USER_CAUSES = {
    Phase.INITIAL: "the network: its constructor",
    Phase.DATA: "the data: an item or its augmentation",
    Phase.FORWARD: "the network: what this module computes",
    Phase.LOSS: "the task: its loss",
    Phase.GRADIENT: "the network: a backward of it, or of the task,",
    Phase.NORM: "the network: a gradient",
    Phase.RATE: "the schedule: the rate",
    Phase.CLIPPED: "the network: a gradient",
    Phase.STEP: "the optimizer: what it makes of the same gradients",
    Phase.UPDATE: "the task: after_step, or a buffer of the network,",
    Phase.RESUME: "the network: what it or its optimizer gives a checkpoint, or takes from it,",
    Phase.EVALUATION: "the evaluation: its forward or a metric",
}
# Of each phase: who may keep something that no checkpoint has
_STATE_KEEPERS = {
    Phase.DATA: "Data keeps",
    Phase.FORWARD: "the forward reads (no parameter, no persistent buffer)",
    Phase.LOSS: "Task keeps",
    Phase.RATE: "Schedule keeps",
    Phase.UPDATE: "Task keeps",
}
# Of each phase: what the strategy does, if the plain loop is right
_STRATEGY_CAUSES = {
    Phase.INITIAL: "the values that it gives to ranks",
    Phase.DATA: "the samples that a rank reads, and where it goes on",
    Phase.FORWARD: "what it makes of this forward",
    Phase.LOSS: "how it adds up the losses of micro-batches and ranks",
    Phase.GRADIENT: "how it adds up the gradients of micro-batches and ranks",
    Phase.NORM: "the norm that it takes of the same gradients",
    Phase.RATE: "the rate that it gives the optimizer",
    Phase.CLIPPED: "what it does to the same gradients before the step, such as clipping",
    Phase.STEP: "how a rank steps what is its own",
    Phase.UPDATE: "what follows the optimizer's step: what ranks send each other, and averages",
    Phase.RESUME: "saving or reading: the checkpoint does not give back what was there",
    Phase.EVALUATION: "its forward in an evaluation, and which samples count",
}


@dataclass(frozen=True)
class RunFacts:
    """What is known of a training beside its sketches."""

    data_ranks: int
    micro_batches: int
    planned: bool  # do ranks share the work on one sample, as a plan says?
    native: bool  # are random numbers torch's own?
    kinds: Mapping[str, str]  # of the network's modules, by name
    padded: bool = False  # are samples padded in one way on one rank, and in another way on another?
    strays: Collection[str] = ()  # what the run has said, among it of random numbers that belong to no sample
    redrawn: bool = False  # is an item another one when it is read again with the same seed?
    generators: Sequence[str] = ()  # fields of the network and the task that are random generators
    stepping: str = ""  # the class of an optimizer that is not torch's, and is given shards


@dataclass(frozen=True)
class FirstDifference:
    """The first difference, as all ranks together see it."""

    step: int
    phase: str
    name: str
    gap: float
    ratio: float  # of the norms: here over the reference's
    ranks: tuple[int, ...]  # those that see it; none: nobody has what the reference has
    others: int  # ranks that have the same thing, and see no difference
    resumed: bool  # is it after the resume?
    extra: bool = False  # has one process no such thing?


@dataclass(frozen=True)
class ExperimentResults:
    """What experiments have shown; what was not tried is in none of them."""

    alone: Mapping[str, bool] = field(default_factory=dict)  # does the plain loop differ there as well, so changed?
    mended: Mapping[str, bool] = field(default_factory=dict)  # is the strategy right, with that taken out?
    drawn: Collection[str] = ()  # generators that a forward draws from
    failed: str = ""  # why there is nothing to compare with


def explain_cause(first: FirstDifference, facts: RunFacts, results: ExperimentResults) -> str:
    """The cause in words: the nearest one that experiments have confirmed; else what they have ruled out."""
    alone, mended = results.alone, results.mended
    if alone.get(RECREATED):
        return f"the resume: something that {_STATE_KEEPERS.get(first.phase, 'an object keeps')} is in no checkpoint"
    if alone.get(REPEATED):
        return (
            f"{_USER_CAUSES[first.phase]} differs when the same steps are repeated in the same process: it draws"
            " random numbers that no seed reaches, or depends on what was done before"
        )
    if alone.get(PROCESSES_VISIBLE):
        return (
            f"{_USER_CAUSES[first.phase]} differs when other processes are in sight: its code asks for the rank, or"
            " for their number"
        )
    if first.phase == Phase.FORWARD and facts.generators and alone.get(TRIAL_FORWARD):
        return (
            f"random numbers: the forward draws from {' and '.join(facts.generators[:3])}, a generator of its own,"
            " which knows nothing of samples and is in no checkpoint; torch.rand and its like are each sample's own"
        )
    if alone.get(RESEEDED):
        return _randomness_cause(first, facts, results.drawn)
    if alone.get(NO_EVALUATIONS):
        return (
            f"an evaluation before this step: {_USER_CAUSES[first.phase]} is another one without it, so something keeps"
            " what an evaluation has left"
        )
    in_batch_norm = "BatchNorm" in facts.kinds.get(first.name, "") and first.phase == Phase.FORWARD
    # cut from one batch the same samples are right, which are not compared where they are padded to other sizes; or
    # statistics over all ranks are not those of one process
    unmended = in_batch_norm and facts.padded and facts.micro_batches == 1 and not mended.get(SYNC_BN)
    if (alone.get(PADDED_TOGETHER) is False and first.phase != Phase.DATA) or unmended:
        return (
            "the data: collate pads the samples of a rank, or of a micro-batch, to the largest of these, and what"
            " follows counts the padding (a BatchNorm, a mean); pad to one size in all batches, or mask the padding"
        )
    if alone.get(DIVIDED):
        return _division_cause(first, facts, alone, mended)
    if alone.get(TRIAL_FORWARD):
        return (
            f"a forward before the first step: {_USER_CAUSES[first.phase]} is another one after it, so something that"
            " is no buffer keeps what it has left. Strategies do such forwards, to see what a step uses"
        )
    if mended.get(FIXED_RANDOMNESS) and results.drawn:
        return _randomness_cause(first, facts, results.drawn)
    if results.failed:
        return f"not known: the same steps cannot be done without the strategy ({results.failed})"
    if mended.get(FIXED_RANDOMNESS):
        return (
            "not known: with the strategy it is now as in a plain loop on one of these processes; it came once, or lies"
            " in what both of them use"
        )
    return _strategy_cause(first, facts, results)


def _division_cause(
    first: FirstDifference, facts: RunFacts, alone: Mapping[str, bool], mended: Mapping[str, bool]
) -> str:
    """One process differs as well where it divides its batch so."""
    if "BatchNorm" in facts.kinds.get(first.name, "") and first.phase == Phase.FORWARD:
        if mended.get(SYNC_BN):
            return (
                "the network: BatchNorm takes its statistics over the samples of one rank; strategy.sync_bn=true: over"
                " all ranks"
            )
        return "the network: BatchNorm takes its statistics over a micro-batch, so they depend on loop.micro_batches"
    if alone.get(REVERSED):
        return (
            f"{_USER_CAUSES[first.phase]} depends on what was computed before it in the same step: something counts its"
            " calls, or keeps what a micro-batch has left"
        )
    if first.phase == Phase.DATA and facts.redrawn:
        return (
            "the data: an item is another one when it is read again with the same seed. It draws from a generator of"
            " its own, which depends on what this process has read before, or remembers something"
        )
    if first.phase == Phase.LOSS and first.gap < 1e-6:  # less than rounding in the precision of most runs
        return (
            "the task: Task.loss or Task.weight adds up numbers of its own in fp32, so their sum depends a little on"
            " how a batch is divided; torch.tensor([…], dtype=torch.float64) there"
        )
    factor = _explain_ratio(first.ratio, facts)
    by = f" It is {factor} times that of one process" if factor else ""
    return {
        Phase.DATA: (
            "the data: an item depends on the other samples of its batch; it may depend on the index, and on the"
            " generators that are seeded for it (in Data.augment and Data.mix: `random`). Data.collate must not sort"
        ),
        Phase.LOSS: (
            "the task: Task.loss must be the mean over the Task.weight units of its own samples. A sum, or a division"
            " by another number (of the batch, of ranks, of all words), depends on how a batch is divided; so does one"
            f" over pairs of samples (negatives of the batch), which trainer.gather brings together.{by}"
        ),
        Phase.GRADIENT: (
            "the network: a backward of its own (autograd.Function, a hook), or of the task's, that is not linear in"
            " the samples: it depends on how a batch is divided"
        ),
        Phase.UPDATE: (
            "the network: a buffer that is updated from the samples that are there, and that nobody brings together"
        ),
        Phase.EVALUATION: (
            "the evaluation: a metric that is no sum over samples, or a forward in evaluation mode that depends on the"
            " other samples of its batch"
        ),
    }.get(
        first.phase,
        "the network: what this module, or Task.forward before it, computes for a sample depends on the other samples"
        " of its micro-batch (a mean or a sort over the batch, or it chooses by them what it computes)",
    )


def _randomness_cause(first: FirstDifference, facts: RunFacts, generators: Collection[str]) -> str:
    """Without random numbers it is right."""
    if first.phase == Phase.STEP:
        return "random numbers: the optimizer draws them, and ranks that step other parameters draw others"
    others = sorted(name for name in generators if name != "torch's")
    if others:
        return (
            f"random numbers: the forward draws from {' and '.join(others)} generator, which knows nothing of samples;"
            " torch's draws are each sample's own"
        )
    if facts.native:
        return "random numbers: torch's own (loop.dropout=native) depend on ranks and micro-batches"
    about = "loop.dropout=sample: "
    if said := next((note for note in facts.strays if note.startswith(about)), ""):
        return f"random numbers: {said.removeprefix(about)}"
    return "the strategy: the random numbers that it gives to a sample; without any it trains the same"


def _strategy_cause(first: FirstDifference, facts: RunFacts, results: ExperimentResults) -> str:
    """What users have written is right by itself, however it is divided."""
    whose = "the strategy, or the plan that says how it divides the network" if facts.planned else "the strategy"
    what = _STRATEGY_CAUSES[first.phase]
    if first.phase == Phase.STEP and facts.stepping:
        return (
            f"not known: the strategy, or {facts.stepping}, which is given shards here and is right without. An"
            " optimizer must compute element by element, or with norms that torch takes of whole DTensors"
        )
    if results.mended.get(NO_RESUME):
        what = f"what it saves or reads for the resume; {what}"
    elif results.mended.get(NO_EVALUATIONS):
        what = f"what an evaluation leaves behind; {what}"
    if first.phase == Phase.GRADIENT and not first.ranks:
        what = "no rank has this gradient: it was lost, or its weight is used outside of the unit that holds it"
    elif first.phase == Phase.GRADIENT and first.extra:
        what = "it gives a gradient to what no sample has used, so that the optimizer decays it"
    elif first.phase in (Phase.GRADIENT, Phase.LOSS) and (factor := _explain_ratio(first.ratio, facts)):
        what += f"; it is {factor} times what it should be, as a sum is to a mean over as many"
    right = next((name for name in _TAKEN_OUT if results.mended.get(name)), "")
    without = f"; without {right} it is right" if right else ""
    divided = ", also divided as it divides them" if DIVIDED in results.alone else ""
    return f"{whose}: {what}{without}. Network, task and data are right on one process{divided}"


def _explain_ratio(ratio: float, facts: RunFacts) -> str:
    """The ratio as a whole number, or one over it, that ranks or micro-batches explain; empty: they do not."""
    ranks, slices = facts.data_ranks, facts.micro_batches
    wholes = {n for n in (ranks, slices, ranks * slices) if n > 1}
    fits = chain(
        (str(n) for n in wholes if abs(ratio - n) < 1e-3 * n),
        (f"1/{n}" for n in wholes if abs(ratio * n - 1) < 1e-3),
    )
    return next(iter(sorted(fits, key=len)), "")


# phases of which nothing may be missing on all ranks
_NEVER_MISSING = (Phase.GRADIENT, Phase.STEP, Phase.UPDATE, Phase.RESUME)


@dataclass(frozen=True)
class Verdict:
    """Is the training the same? And if it is not, what differs first."""

    first: FirstDifference | None
    gap: float  # the largest, relative to the norms
    gaps: dict[str, float]  # of each phase
    rows: Sequence[int]  # samples of the global batch that differ first
    cause: str = ""
    tried: ExperimentResults = field(default_factory=ExperimentResults)  # the experiments that it follows from
    others: Sequence[str] = ()  # what differs after it, in the order of time
    modules: tuple[int, int] = (0, 0)  # compared, of those that were called and gave numbers
    left_out: Sequence[
        str
    ] = ()  # those that were not: ranks hold parts of what they give, or no sample has a place there
    nearest: Mapping[str, Margin] = field(default_factory=dict)  # to its limit, of each phase
    rounding: Rounding | None = None  # in the precision of the run, where that is another one
    precision: str = "fp64"  # in which all was compared
    on_purpose: bool = False  # has the strategy a curve of its own, and is all equal that comes before its first step?

    @property
    def same(self) -> bool:
        """Does nothing differ, but for what rounding makes?"""
        return self.first is None and (self.rounding is None or self.rounding.explains)

    def data(self) -> dict[str, Any]:
        """For a file."""
        return {"same": self.same, **asdict(self)}


def judge(reference: TrainingRecord, comparisons: Sequence[Comparison], resume: int) -> Verdict:
    """The verdict that follows from the comparisons of all ranks, without a cause yet.

    resume: the step after which the run went on from a checkpoint.
    """
    gaps: dict[str, float] = {}
    differences: dict[int, list[tuple[int, Difference]]] = {}  # place in the order of time → rank, what differs
    for rank, comparison in enumerate(comparisons):
        for phase, gap in comparison.gaps.items():
            gaps[phase] = max(gap, gaps.get(phase, 0.0))
        for difference in comparison.differences:
            differences.setdefault(difference.at, []).append((rank, difference))
    keys = [*reference.values]
    held = {key for comparison in comparisons for key in comparison.held}
    missing = [at for at, key in enumerate(keys) if key.phase in _NEVER_MISSING and key not in held]
    # which of the modules that one process calls were compared: `norm.0` is the first thing that `norm` gives
    called = dict.fromkeys(reference.facts.get("widths", ()))
    compared = set[str]()
    for place in {key.name for comparison in comparisons for key in comparison.seen if key.phase == Phase.FORWARD}:
        parts = place.split(".")
        above = (".".join(parts[:count]) for count in range(len(parts), -1, -1))
        compared |= {*islice((name for name in above if name in called), 1)}
    modules = len(compared), len(called)
    left_out = [name or "the output of the network" for name in called if name not in compared]
    gap, nearest = max(gaps.values(), default=0.0), nearest_to_limits(comparisons)
    order = sorted({*differences, *missing})
    if not order:
        return Verdict(None, gap, gaps, [], modules=modules, left_out=left_out, nearest=nearest)
    places = {at: _key_at(keys[at], differences.get(at, [])) for at in order}
    key = places[order[0]]
    at_first = [(rank, difference) for rank, difference in differences.get(order[0], []) if difference.key == key]
    most, ratio = max(((difference.gap, difference.ratio) for _, difference in at_first), default=(1.0, 0.0))
    ranks = tuple(sorted({rank for rank, _ in at_first}))  # each once, in however many of its micro-batches
    others_same = max(0, sum(key in comparison.seen for comparison in comparisons) - len(ranks))
    resumed, extra = key.step == resume + 1 > 1, key not in reference.values
    first = FirstDifference(key.step, key.phase, key.name, most, ratio, ranks, others_same, resumed, extra)
    rows = sorted({row for _, difference in at_first for row in difference.rows})
    others = [str(places[at]) for at in order[1:8]]
    return Verdict(first, gap, gaps, rows, others=others, modules=modules, left_out=left_out, nearest=nearest)


def _key_at(expected: Key, differences: Sequence[tuple[int, Difference]]) -> Key:
    """What differs at a place: what the reference has there, or else what only some ranks have."""
    keys = [difference.key for _, difference in differences]
    return keys[0] if keys and expected not in keys else expected
