"""The sums that must come out whole before a run can start."""

from __future__ import annotations

from dataclasses import dataclass, replace

from trainer.messages import Refusal, format_count


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
        samples = f"{self.smallest} to " if self.largest != self.smallest else ""
        samples += format_count(self.largest, "sample")
        micro_batches = format_count(self.micro_batches, "micro-batch")
        return f"{samples} × {micro_batches} × {format_count(self.ranks, 'data rank')} = global batch {self.total}"


def deal(global_batch: int, ranks: int, micro_batches: int, local: int | None, uneven: bool = False) -> Batches:
    """Deal a global batch out; `local`, if given, decides the micro-batches: as few as hold no more samples each.

    Refusal if it is not whole, or with `uneven` if some micro-batch would have no sample.
    """

    def dealt(number: int, uneven: bool) -> Batches | None:
        """With this number in the key that the user has set; None where it does not come out."""
        count = number if local is None else -(-global_batch // (ranks * number))
        whole = global_batch % (ranks * number) == 0 or (uneven and global_batch >= ranks * count)
        return Batches(global_batch, count, ranks, uneven) if whole else None

    key, wanted = ("loop.micro_batches", micro_batches) if local is None else ("loop.micro_batch", local)
    batches = dealt(wanted, uneven)
    if batches is not None:
        return batches
    # what would do: the same numbers with another batch, the same batch with another number, shares of two sizes
    unit = ranks * wanted
    below = global_batch // unit * unit
    nearest = f"loop.global_batch={f'{below} or ' if below else ''}{below + unit}"
    fitting = [number for number in range(1, global_batch // ranks + 1) if dealt(number, uneven)]
    fitting = sorted(sorted(fitting, key=lambda number: abs(number - wanted))[:2])
    raise Refusal(
        f"loop.global_batch {global_batch} / {format_count(ranks, 'data rank')} / "
        + (format_count(wanted, "micro-batch") if local is None else f"{key} {wanted}")
        + f" {'leaves some without a sample' if uneven else 'is not whole'}; nearest: {nearest}"
        + (f"; or {key}={' or '.join(map(str, fitting))}" if fitting else "")
        + ("; or loop.uneven=true" if dealt(wanted, uneven=True) else "")
    )


def more_micro_batches(batches: Batches) -> int | None:
    """The next number of micro-batches that needs less memory; None: there is none."""
    total, ranks = batches.total, batches.ranks
    for more in range(batches.micro_batches + 1, total // ranks + 1):
        smaller = replace(batches, micro_batches=more).largest < batches.largest
        if smaller and (batches.uneven or total % (ranks * more) == 0):
            return more
    return None


@dataclass(frozen=True)
class Length:
    """How long a run is."""

    steps: int  # optimizer steps
    per_epoch: int  # of them
    left_out: int  # samples of each epoch's order that make up no whole global batch

    def __str__(self) -> str:
        epochs = self.steps / self.per_epoch
        left_out = format_count(self.left_out, "sample")
        tail = f"; each epoch leaves out {left_out}, not always the same ones" if self.left_out else ""
        length = f"{epochs:.3g} epoch{'' if epochs == 1 else 's'} of {format_count(self.per_epoch, 'step')}"
        return f"{format_count(self.steps, 'step')}, {length}{tail}"


def measure(samples: int, global_batch: int, epochs: int | None, steps: int | None, unit: int) -> Length:
    """How many steps that is, by whichever bound is reached first. Refusal where an epoch has no step.

    samples: the length of an epoch's order; unit: of which a global batch is a multiple.
    """
    if samples == 0:
        raise Refusal("the training set is empty: 0 samples")
    if samples < global_batch:
        most = samples // unit * unit
        fits = f"at most {most} fits" if most else f"the smallest that these processes can divide is {unit}"
        raise Refusal(
            f"the training set has {format_count(samples, 'sample')}, loop.global_batch is {global_batch}; {fits}"
        )
    per_epoch = samples // global_batch
    bounds = [bound for bound in (steps, None if epochs is None else epochs * per_epoch) if bound is not None]
    return Length(min(bounds), per_epoch, samples % global_batch)
