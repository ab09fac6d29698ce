"""The sums that must come out whole before a run can start."""

from __future__ import annotations

from dataclasses import dataclass
from math import isqrt

from trainer.refusal import Refusal


@dataclass(frozen=True)
class Batches:
    """How one global batch is dealt out: samples × micro-batches × data ranks = global batch."""

    total: int  # samples in one optimizer step
    micro_batches: int  # that each data rank runs one after the other
    ranks: int  # data ranks
    uneven: bool = False  # micro-batches may differ by one sample

    @property
    def smallest(self) -> int:
        """Samples in the smallest micro-batch of a data rank."""
        return self.total // (self.micro_batches * self.ranks)

    @property
    def largest(self) -> int:
        """Samples in the largest micro-batch of a data rank: what decides the memory."""
        return -(-self.total // (self.micro_batches * self.ranks))

    def __str__(self) -> str:
        samples = str(self.largest) if self.largest == self.smallest else f"{self.smallest} to {self.largest}"
        dealt = f"{samples} samples × {self.micro_batches} micro-batches × {self.ranks} data ranks"
        return f"{dealt} = global batch {self.total}"


def deal(global_batch: int, ranks: int, micro_batches: int, local: int | None, uneven: bool = False) -> Batches:
    """Deal a global batch out; `local`, if given, decides the micro-batches: as few as hold no more samples each.

    Refusal if it is not whole, or with `uneven` if some micro-batch would have no sample.
    """
    count = micro_batches if local is None else -(-global_batch // (ranks * local))
    unit = ranks * (micro_batches if local is None else local)
    possible = global_batch >= ranks * count  # every micro-batch of every rank has a sample
    if global_batch % unit == 0 or (uneven and possible):
        return Batches(global_batch, count, ranks, uneven)
    if uneven:
        raise Refusal(_empty(global_batch, ranks, count, local))
    key, wanted = ("loop.micro_batches", micro_batches) if local is None else ("loop.micro_batch", local)
    asked = f"{micro_batches} micro-batches" if local is None else f"loop.micro_batch {local}"
    raise Refusal(
        f"loop.global_batch {global_batch} / {ranks} data ranks / {asked} is not whole;"
        f" nearest: loop.global_batch={_multiples(global_batch, unit)}"
        + _divisors(key, wanted, global_batch, ranks)
        + ("; or loop.uneven=true" if possible else "")
    )


def more_micro_batches(batches: Batches) -> int | None:
    """The next number of micro-batches that needs less memory; None: there is none."""
    total, ranks = batches.total, batches.ranks
    if not batches.uneven:
        return next((more for more in _divisors_of(total // ranks) if more > batches.micro_batches), None)
    if batches.largest == 1:
        return None
    more = -(-total // (ranks * (batches.largest - 1)))
    return more if total >= ranks * more else None


@dataclass(frozen=True)
class Length:
    """How long a run is."""

    steps: int  # optimizer steps
    per_epoch: int  # of them
    left_out: int  # samples of each epoch's order that make up no whole global batch

    def __str__(self) -> str:
        epochs = self.steps / self.per_epoch
        tail = f"; {self.left_out} samples of each epoch's order left out, others each time" if self.left_out else ""
        return f"{self.steps} steps, {epochs:g} epochs of {self.per_epoch}{tail}"


def measure(samples: int, global_batch: int, epochs: int | None, steps: int | None) -> Length:
    """How many steps that is, by whichever bound is reached first. Refusal where an epoch has no step.

    samples: the length of an epoch's order.
    """
    if samples == 0:
        raise Refusal("the training set is empty: 0 samples")
    if samples < global_batch:
        raise Refusal(
            f"the training set has {samples} samples, loop.global_batch is {global_batch}; at most {samples} fits"
        )
    per_epoch = samples // global_batch
    bounds = [bound for bound in (steps, None if epochs is None else epochs * per_epoch) if bound is not None]
    return Length(min(bounds), per_epoch, samples % global_batch)


def _empty(global_batch: int, ranks: int, count: int, local: int | None) -> str:
    """What is wrong where even uneven shares leave a micro-batch without a sample, and what would do."""
    asked = f"{count} micro-batches" + (f" (loop.micro_batch {local})" if local is not None else "")
    most = global_batch // ranks  # micro-batches that have a sample on every rank
    fewer = ""
    if most and local is None:
        fewer = f"; or loop.micro_batches={most}"
    elif most:
        fewer = f"; or loop.micro_batch={-(-global_batch // (ranks * most))}"
    return (
        f"loop.global_batch {global_batch} / {ranks} data ranks / {asked} leaves some without a sample;"
        f" nearest: loop.global_batch={ranks * count}{fewer}"
    )


def _multiples(number: int, unit: int) -> str:
    below = number // unit * unit
    return f"{below} or {below + unit}" if below else str(unit)


def _divisors(key: str, wanted: int, global_batch: int, ranks: int) -> str:
    """The nearest values of the other number that would do, where the global batch can be dealt at all."""
    if global_batch % ranks:
        return ""
    share = global_batch // ranks
    fitting = sorted(_divisors_of(share), key=lambda d: (abs(d - wanted), d))[:2]
    return f"; or {key}={' or '.join(map(str, sorted(fitting)))}"


def _divisors_of(number: int) -> list[int]:
    """All divisors, ascending."""
    small = [d for d in range(1, isqrt(number) + 1) if number % d == 0]
    return sorted({*small, *(number // d for d in small)})
