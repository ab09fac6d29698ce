"""A watch over every step: is its loss finite, is the gradient's norm? What is not is found without making a step wait.

A line and a save look too; whoever finds something, all ranks hear of it and end together with one sentence.
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

COPY_INTERVAL = 0.05  # between two looks at a GPU: each copies a few numbers, which a short step would notice
MAX_RECORDED = (
    256  # steps of which is known which samples they read; more than go by from a step to its look and its vote
)
MAX_NAMED = 128  # samples of a rank that a message names
WINDOW = 100  # steps, of which only some may be left out

log = logging.getLogger(__name__)


class RecordedStep(NamedTuple):
    """One step, as this rank has seen it."""

    step: int
    indices: list[Tensor]  # of the data set, (samples,) for each micro-batch
    loss: Tensor  # this rank's share
    norm: Tensor | None  # of the whole gradient, on every rank the same; None: nobody has asked for it


class NonFiniteCheck:
    """The last steps of one loop: what they read, and their numbers, where those are. Here: where the host has them."""

    def __init__(self, ranks: Ranks, allowed: int = 0) -> None:
        """allowed: how many of a hundred steps may be left out instead of ending the run."""
        self._ranks, self._allowed, self._found = ranks, allowed, False
        self._kept: deque[RecordedStep] = deque(maxlen=MAX_RECORDED)
        self._told: list[int] = []  # steps that were left out, as all ranks know

    def add(self, step: int, batches: list[Batch], loss: Tensor, norm: Tensor | None) -> None:
        """Take the numbers of the step just done; `norm`: None where one that is infinite is no fault."""
        self._kept.append(RecordedStep(step, [batch.indices for batch in batches], loss, norm))
        self._look(loss if norm is None else loss + norm)  # one look at both: NaN and infinity stay in a sum

    def _look(self, number: Tensor) -> None:
        """Is it finite?"""
        value: Any = number.tolist()  # of one number it is that number
        self._found = self._found or not math.isfinite(value)

    def seen(self) -> bool:
        """Was any number of this rank not finite, of those that have arrived? Asked once a step, for the vote."""
        return self._found

    def notice(self, found: bool) -> None:
        """Something was found on this rank, perhaps on no other: all hear of it with the next vote, or in a save."""
        self._found = self._found or found

    def refuse(self, found: bool) -> None:
        """Collective where something was found, which all ranks must know: NotFinite, the same on every rank.

        Where steps may be left out, a sentence for each of them; NotFinite where they are too many.
        """
        if found:
            self._tell([])

    def refuse_save(self) -> None:
        """Collective, before a save: as `refuse`, where a loss or a norm so far is not finite."""
        # all ranks; usually that nothing was found
        if any(self._ranks.all_gather_values(bool(self._found or self._broken()))):
            self._tell([])

    def refuse_state(self, step: int, tensors: Collection[str]) -> None:
        """Collective where these tensors of the state after a step were found not to be finite: NotFinite then."""
        if tensors:
            self._tell(tensors, step)

    def _broken(self) -> dict[int, tuple[str, float]]:
        """The steps here that were not finite and are not told yet: what of each, its value; waits for the device."""
        measured = [one for one in self._kept if one.norm is not None]
        # all of a kind in one copy: a device is waited for twice, not for every step
        losses = _to_floats([one.loss for one in self._kept])
        norms = dict(zip((one.step for one in measured), _to_floats([one.norm for one in measured]), strict=True))
        found: dict[int, tuple[str, float]] = {}
        for one, loss in zip(self._kept, losses, strict=True):
            for kind, value in (("norm", norms.get(one.step, 0.0)), ("loss", loss)):
                if not math.isfinite(value) and one.step not in self._told:
                    found[one.step] = (kind, value)  # of both the loss, which was first
        return found

    def _tell(self, tensors: Collection[str], until: float = math.inf) -> None:
        """Collective: say what was not finite on any rank, and whose samples it came from; NotFinite if that ends all.

        tensors: those of a state that are not finite; until: the step of that state; later ones did not break it.
        """
        # all ranks; each has seen losses of its own. The earliest counts: what is broken breaks all that follows
        found = self._ranks.all_gather_values(self._broken())
        then = f"More than {self._allowed} of {WINDOW} steps would be left out. " if self._allowed else ""
        for step in sorted(step for step in set().union(*found) if step <= until)[: 1 + self._allowed]:
            error = self._account(step, found, [], then)
            self._told.append(step)
            recent = [told for told in self._told if told > step - WINDOW]
            if len(recent) > self._allowed:
                raise error
            if self._ranks.is_main:
                log.warning("%s; its update is left out. Read were:%s", error.what, error.read)
        self._found = False
        # what was broken without a loss or a norm that shows it; of steps left out all has been said
        if tensors or not self._allowed:
            last = self._kept[-1].step if self._kept else 0
            raise self._account(int(min(last, until)), [], tensors)

    def _account(
        self, step: int, found: Sequence[Mapping[int, tuple[str, float]]], tensors: Collection[str], then: str = ""
    ) -> NotFinite:
        """Collective: the error that says what was not finite in this step, found on each rank, and what was read."""
        had = {rank: of[step] for rank, of in enumerate(found) if step in of}
        lost = {rank: value for rank, (kind, value) in had.items() if kind == "loss"}
        # of a loss the ranks that had it; a gradient or a weight is all ranks' work
        ranks = [*lost] or [*range(self._ranks.size)]
        # all ranks; each names its samples of that step, and of the one before
        samples = self._ranks.all_gather_values({at: self._samples(at) for at in (step - 1, step)})
        who = "" if self._ranks.size == 1 else f" on rank {', '.join(map(str, ranks))}"
        if lost:
            what = f"the loss is {next(iter(lost.values()))}{who}"
        elif had:
            what = f"the norm of the gradient is {next(iter(had.values()))[1]}, and every loss is finite"
        else:
            what = f"every loss is finite, but not {', '.join([*tensors][:4]) or 'their mean'}"
        # the first loss on every rank may be the work of weights that were broken before
        doubtful = len(lost) == self._ranks.size and not self._was_fine(step - 1)
        steps = [step - 1, step] if doubtful else [step]
        read = [f"\n  step {at}, rank {rank}: samples {samples[rank][at]}" for at in steps for rank in ranks]
        return NotFinite(step, f"step {step}: {what}", "".join(read), then)

    def _samples(self, step: int) -> str:
        """Which samples this rank has read in a step."""
        indices = next((one.indices for one in self._kept if one.step == step), None)
        if indices is None:
            return "not known"
        return format_names(map(str, torch.cat(indices).tolist()), MAX_NAMED)

    def _was_fine(self, step: int) -> bool:
        """Is it known of a step that its gradient was finite, or was there none?"""
        one = next((one for one in self._kept if one.step == step), None)
        return one is None or one.norm is not None


class NonFiniteCheckOnDevice(NonFiniteCheck):
    """Numbers on an accelerator: now and then copies of them are begun, and read in the next step. Nothing waits."""

    def __init__(self, ranks: Ranks, device: torch.device, allowed: int = 0) -> None:
        super().__init__(ranks, allowed)
        self._device, self._since = device, -math.inf
        self._unread: list[Tensor] = []
        self._under_way: PendingSums | None = None

    @override
    def _look(self, number: Tensor) -> None:
        """Begin to copy it, with all since the last copy, where that was long enough ago."""
        self._unread.append(number)
        if (now := perf_counter()) - self._since >= COPY_INTERVAL:
            self._under_way = PendingSums({}, Ranks(), self._device, {"": torch.stack(self._unread)})
            self._unread, self._since = [], now

    @override
    def seen(self) -> bool:
        """The same; what was begun to be copied in the step before has arrived by now."""
        if self._under_way is not None:
            numbers, self._under_way = self._under_way.read()[""].tolist(), None
            self._found = self._found or not all(map(math.isfinite, numbers))
        return self._found


def _to_floats(tensors: Sequence[Tensor | None]) -> list[float]:
    """The values of lone numbers that lie on one device."""
    return torch.stack([to_accumulator(one) for one in tensors if one is not None]).tolist() if tensors else []
