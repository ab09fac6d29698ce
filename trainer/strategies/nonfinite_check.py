"""Checks the loss and the gradient norm of every step for NaN and infinity, without making a step wait.

Training lines and saves check, too. If one rank finds something, all ranks end together with the same message.
"""

from __future__ import annotations

import logging
import math
from collections import deque
from collections.abc import Collection, Mapping, Sequence
from time import perf_counter
from typing import Any, NamedTuple

import torch
from torch import Tensor
from typing_extensions import override

from trainer.data.loader import Batch
from trainer.messages import NotFinite, format_names
from trainer.parallel.buckets import PendingSums, to_accumulator
from trainer.parallel.ranks import Ranks

COPY_INTERVAL = 0.05  # seconds between two copies from a GPU: more of them would slow short steps down
MAX_RECORDED = 256  # steps whose samples are known; more than there are from a step to its check and its vote
MAX_NAMED = 128  # samples of a rank that a message names
WINDOW = 100  # steps, of which only some may be left out

log = logging.getLogger(__name__)


class RecordedStep(NamedTuple):
    """One step, with the numbers of this rank."""

    step: int
    indices: list[Tensor]  # of the data set, (samples,) for each micro-batch
    loss: Tensor  # this rank's part of the step's loss
    norm: Tensor | None  # of the whole gradient, the same on every rank; None: not measured
    shares: Sequence[Tensor | float]  # of each micro-batch in the step


class NonFiniteCheck:
    """The last steps of one loop: which samples they read, and their numbers. This class: tensors on the CPU."""

    def __init__(self, ranks: Ranks, allowed: int = 0) -> None:
        """allowed: how many of a hundred steps may be left out instead of ending the run."""
        self._ranks, self._allowed, self._has_found = ranks, allowed, False
        self._recorded: deque[RecordedStep] = deque(maxlen=MAX_RECORDED)
        self._reported: list[int] = []  # steps that were left out; the same on all ranks

    def record(
        self,
        step: int,
        batches: list[Batch],
        loss: Tensor,
        norm: Tensor | None,
        shares: Sequence[Tensor | float] = (),
    ) -> None:
        """Take the numbers of the step just done; `norm`: None if an infinite one is no fault."""
        self._recorded.append(RecordedStep(step, [batch.indices for batch in batches], loss, norm, shares))
        self._look_at(loss if norm is None else loss + norm)  # both at once: NaN and infinity stay in a sum

    def _look_at(self, number: Tensor) -> None:
        """Is it finite?"""
        value: Any = number.tolist()  # of a 0-d tensor: a number
        self._has_found = self._has_found or not math.isfinite(value)

    def has_found(self) -> bool:
        """Was a number of this rank not finite, of those on the host by now? Asked once a step, for the vote."""
        return self._has_found

    def note(self, is_broken: bool) -> None:
        """Somebody else has checked a number of this rank. All ranks learn of it with the next vote, or in a save."""
        self._has_found = self._has_found or is_broken

    def check(self, any_rank_found: bool) -> None:
        """Collective if a rank has found something, which all ranks know: NotFinite, alike on all.

        If steps may be left out, a warning for each of them; NotFinite if there are too many.
        """
        if any_rank_found:
            self._report([])

    def check_before_save(self) -> None:
        """Collective, before a save: as `check`, if a loss or a norm so far is not finite."""
        # all ranks tell whether they have found anything
        if self._ranks.max_values([bool(self._has_found or self._find_broken())])[0]:
            self._report([])

    def check_state(self, step: int, tensors: Collection[str]) -> None:
        """Collective if these tensors of the state after a step are not finite: NotFinite."""
        if tensors:
            self._report(tensors, step)

    def _find_broken(self) -> dict[int, tuple[str, float]]:
        """The steps of this rank that were not finite and not reported yet: loss or norm, its value. Waits."""
        measured = [record for record in self._recorded if record.norm is not None]
        # all losses in one copy, all norms in another: the host waits for the device twice, not for every step
        losses = _to_floats([record.loss for record in self._recorded])
        norms = _to_floats([record.norm for record in measured])
        norm_of = dict(zip((record.step for record in measured), norms, strict=True))
        broken: dict[int, tuple[str, float]] = {}
        for record, loss in zip(self._recorded, losses, strict=True):
            for kind, value in (("norm", norm_of.get(record.step, 0.0)), ("loss", loss)):
                if not math.isfinite(value) and record.step not in self._reported:
                    broken[record.step] = (kind, value)  # if both, the loss, which came first
        return broken

    def _report(self, tensors: Collection[str], until: float = math.inf) -> None:
        """Collective: report what was not finite on any rank, and from which samples; NotFinite if the run must end.

        tensors: those of a state that are not finite; until: the step of that state; later steps did not break it.
        """
        # all ranks; each has the losses of its own samples. The earliest step counts: it breaks all that follow
        broken = self._ranks.all_gather_values(self._find_broken())
        then = f"More than {self._allowed} of {WINDOW} steps would be left out. " if self._allowed else ""
        for step in sorted(step for step in set().union(*broken) if step <= until)[: 1 + self._allowed]:
            error = self._describe_step(step, broken, [], then)
            self._reported.append(step)
            recent = [earlier for earlier in self._reported if earlier > step - WINDOW]
            if len(recent) > self._allowed:
                raise error
            if self._ranks.is_main:
                log.warning("%s; its update is left out. Read were:%s", error.what, error.read)
        self._has_found = False
        # a tensor can be broken without a loss or a norm that shows it; steps left out were reported above
        if tensors or not self._allowed:
            last = self._recorded[-1].step if self._recorded else 0
            raise self._describe_step(int(min(last, until)), [], tensors)

    def _describe_step(
        self, step: int, broken: Sequence[Mapping[int, tuple[str, float]]], tensors: Collection[str], then: str = ""
    ) -> NotFinite:
        """Collective: the error that says what was not finite in this step, and which samples were read.

        broken: of each rank, as `_find_broken` has it; then: a sentence for the end of the message.
        """
        in_step = {rank: steps[step] for rank, steps in enumerate(broken) if step in steps}
        losses = {rank: value for rank, (kind, value) in in_step.items() if kind == "loss"}
        # a loss comes from the samples of its rank; a gradient or a weight from those of all ranks
        ranks = [*losses] or [*range(self._ranks.size)]
        # all ranks; each names its samples of that step, and of the one before
        samples = self._ranks.all_gather_values({at: self._samples(at) for at in (step - 1, step)})
        who = "" if self._ranks.size == 1 else f" on rank {', '.join(map(str, ranks))}"
        if losses:
            what = f"the loss is {next(iter(losses.values()))}{who}"
        elif in_step:
            what = f"the norm of the gradient is {next(iter(in_step.values()))[1]}, and every loss is finite"
        else:
            what = f"every loss is finite, but not {', '.join([*tensors][:4]) or 'their mean'}"
        # if the loss is broken on every rank, the step before may have broken the weights, unless its norm was checked
        is_doubtful = len(losses) == self._ranks.size and not self._had_norm(step - 1)
        steps = [step - 1, step] if is_doubtful else [step]
        read = [f"\n  step {at}, rank {rank}: samples {samples[rank][at]}" for at in steps for rank in ranks]
        return NotFinite(f"step {step}: {what}", "".join(read), then)

    def _samples(self, step: int) -> str:
        """Which samples this rank has read in a step, and which of its micro-batches count for nothing."""
        record = next((record for record in self._recorded if record.step == step), None)
        if record is None:
            return "not known"
        names = format_names(map(str, torch.cat(record.indices).tolist()), MAX_NAMED)
        empty = [str(number) for number, share in enumerate(record.shares, 1) if share == 0]
        if not empty:
            return names
        return (
            f"{names}\n  of weight 0: micro-batch {format_names(empty, 8)} of {len(record.shares)}; a mean over nothing"
            " is nan: in Task.loss divide a sum by its count.clamp(min=1)"
        )

    def _had_norm(self, step: int) -> bool:
        """Was the norm of this step checked? Also True if there was no such step."""
        return all(record.norm is not None for record in self._recorded if record.step == step)


class NonFiniteCheckOnDevice(NonFiniteCheck):
    """The same for an accelerator: now and then numbers are copied to the host, and read in the next step.

    So nothing waits for the device.
    """

    def __init__(self, ranks: Ranks, device: torch.device, allowed: int = 0) -> None:
        super().__init__(ranks, allowed)
        self._device, self._since = device, -math.inf
        self._unread: list[Tensor] = []  # since the last copy
        self._pending: PendingSums | None = None  # a copy to the host that was begun

    @override
    def _look_at(self, number: Tensor) -> None:
        """Begin to copy it, with all since the last copy, if that was long enough ago."""
        self._unread.append(number)
        if (now := perf_counter()) - self._since >= COPY_INTERVAL:
            self._pending = PendingSums({}, Ranks(), self._device, {"": torch.stack(self._unread)})
            self._unread, self._since = [], now

    @override
    def has_found(self) -> bool:
        """The same. A copy that was begun in the step before has arrived by now."""
        if self._pending is not None:
            numbers, self._pending = self._pending.read()[""].tolist(), None  # (steps,)
            self._has_found = self._has_found or not all(map(math.isfinite, numbers))
        return self._has_found


def _to_floats(tensors: Sequence[Tensor | None]) -> list[float]:
    """The values of 0-d tensors of one device, in one copy."""
    return torch.stack([to_accumulator(x) for x in tensors if x is not None]).tolist() if tensors else []
