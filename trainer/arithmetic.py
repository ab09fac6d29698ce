"""The sums that must come out whole before a run can start."""

from __future__ import annotations

from dataclasses import dataclass
from math import isqrt

from trainer.refusal import Refusal


@dataclass(frozen=True)
class Batches:
    """How one global batch is dealt out: local × micro-batches × ranks = global."""

    local: int  # samples in one micro-batch of one data rank
    micro_batches: int  # that each data rank runs one after the other
    ranks: int  # data ranks

    @property
    def total(self) -> int:
        """Samples in one optimizer step."""
        return self.local * self.micro_batches * self.ranks

    def __str__(self) -> str:
        dealt = f"{self.local} samples × {self.micro_batches} micro-batches × {self.ranks} data ranks"
        return f"{dealt} = global batch {self.total}"


def deal(global_batch: int, ranks: int, micro_batches: int, local: int | None) -> Batches:
    """Deal a global batch out; `local`, if given, decides the micro-batches. Refusal if it is not whole."""
    if local is not None:
        if global_batch % (ranks * local):
            raise Refusal(
                f"loop.global_batch {global_batch} / {ranks} data ranks / loop.micro_batch {local} is not whole;"
                f" nearest: loop.global_batch={_multiples(global_batch, ranks * local)}"
                + _divisors("loop.micro_batch", local, global_batch, ranks)
            )
        return Batches(local, global_batch // ranks // local, ranks)
    if global_batch % (ranks * micro_batches):
        raise Refusal(
            f"loop.global_batch {global_batch} / {ranks} data ranks / {micro_batches} micro-batches is not whole;"
            f" nearest: loop.global_batch={_multiples(global_batch, ranks * micro_batches)}"
            + _divisors("loop.micro_batches", micro_batches, global_batch, ranks)
        )
    return Batches(global_batch // ranks // micro_batches, micro_batches, ranks)


def more_micro_batches(batches: Batches) -> int | None:
    """The next number of micro-batches that needs less memory; None: each holds one sample already."""
    share = batches.local * batches.micro_batches
    return next((more for more in _divisors_of(share) if more > batches.micro_batches), None)


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
