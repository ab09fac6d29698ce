"""Batch sizes and the number of steps: what must divide evenly before a run can start."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Literal

from trainer.configuration.schema import Loop
from trainer.messages import Refusal, format_count


@dataclass(frozen=True)
class BatchSizes:
    """How one global batch is divided: samples × micro-batches × data ranks = global batch."""

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


def divide_batch(
    global_batch: int,
    ranks: int,
    micro_batches: int,
    micro_batch: int | Literal["auto"] | None,
    uneven: bool = False,
) -> BatchSizes:
    """Divide a global batch over data ranks and micro-batches.

    micro_batch: samples of a rank at a time; if given, it decides the number of micro-batches, as few as possible.
    Refusal if the batch does not divide evenly, or with `uneven` if some micro-batch would have no sample.
    """
    micro_batch = _as_number(micro_batch)

    def divide(number: int, uneven: bool) -> BatchSizes | None:
        """With this number in the key that the user has set; None where it does not divide."""
        count = number if micro_batch is None else -(-global_batch // (ranks * number))
        fits = global_batch % (ranks * number) == 0 or (uneven and global_batch >= ranks * count)
        return BatchSizes(global_batch, count, ranks, uneven) if fits else None

    key, wanted = ("loop.micro_batches", micro_batches) if micro_batch is None else ("loop.micro_batch", micro_batch)
    batches = divide(wanted, uneven)
    if batches is not None:
        return batches
    # what would do: the same number with another batch, the same batch with another number, or uneven micro-batches
    unit = ranks * wanted
    below = global_batch // unit * unit
    nearest = f"loop.global_batch={f'{below} or ' if below else ''}{below + unit}"
    fitting = [number for number in range(1, global_batch // ranks + 1) if divide(number, uneven)]
    fitting = sorted(sorted(fitting, key=lambda number: abs(number - wanted))[:2])
    raise Refusal(
        f"loop.global_batch {global_batch} / {format_count(ranks, 'data rank')} / "
        + (format_count(wanted, "micro-batch") if micro_batch is None else f"{key} {wanted}")
        + f" {'leaves some without a sample' if uneven else 'is not whole'}; nearest: {nearest}"
        + (f"; or {key}={' or '.join(map(str, fitting))}" if fitting else "")
        + ("; or loop.uneven=true" if divide(wanted, uneven=True) else "")
    )


def _as_number(micro_batch: int | Literal["auto"] | None) -> int | None:
    if micro_batch == "auto":  # a training's has become a number long before
        raise Refusal("loop.micro_batch=auto: only a training plans how many samples fit; give a number")
    return micro_batch


def more_micro_batches(batches: BatchSizes) -> int | None:
    """The next number of micro-batches that needs less memory; None: there is none."""
    total, ranks = batches.total, batches.ranks
    for more in range(batches.micro_batches + 1, total // ranks + 1):
        # one more micro-batch need not make the largest one smaller: 7 samples in 5 or 6 parts, each has 2
        smaller = replace(batches, micro_batches=more).largest < batches.largest
        if smaller and (batches.uneven or total % (ranks * more) == 0):
            return more
    return None


def evaluation_batch_size(loop: Loop) -> int:
    """Samples in one evaluation batch, over all ranks and micro-batches."""
    return loop.eval_batch or 4 * loop.global_batch


def evaluation_micro_batches(loop: Loop, ranks: int) -> int:
    """Into how many micro-batches an evaluation batch is divided: as many as a step has on so many data ranks."""
    samples = _as_number(loop.micro_batch)
    return loop.micro_batches if samples is None else -(-loop.global_batch // (ranks * samples))


@dataclass(frozen=True)
class RunLength:
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


def compute_length(samples: int, global_batch: int, epochs: int | None, steps: int | None, unit: int) -> RunLength:
    """How many steps a run has, by whichever of `epochs` and `steps` is reached first. Refusal where an epoch has none.

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
    return RunLength(min(bounds), per_epoch, samples % global_batch)
