"""Metrics of training steps for lines of metrics.jsonl, measured without waiting for the device; and their checks.

The numbers of a line travel while the next step computes, and are written then. `StepMonitor` is what the loop uses.
"""

from __future__ import annotations

import math
import struct
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from time import perf_counter, time
from typing import Any

import torch
from torch import Tensor

from trainer.data.loader import Batch, digest_indices
from trainer.parallel.buckets import PendingSums, to_accumulator, to_summand
from trainer.records.checkpoint.manager import CheckpointManager, NonFiniteSave
from trainer.records.sinks import Log
from trainer.strategies.base import Strategy
from trainer.strategies.parallel_model import ParallelModel
from trainer.strategies.step_timing import NoUtilization


class TrainMeter:
    """Sums of losses, which stay on the device, and a clock that stops during evaluations and saves."""

    def __init__(self, totals: Callable[..., PendingSums], global_batch: int, dtype: torch.dtype) -> None:
        """totals: begins to add up sums over the data ranks; dtype: of the loss in `loss_hex`."""
        self._totals, self._global_batch, self._dtype = totals, global_batch, dtype
        self._last: dict[str, Tensor] = {}
        self._sum: Tensor | float = 0.0
        self._steps: Tensor | int = 0
        self._tokens = 0
        self.resume()

    def resume(self) -> None:
        """Start the clock again, after an evaluation or a save; the time since the last line is forgotten."""
        # timed: steps since then
        self._since, self._timed, self._tokens = perf_counter(), 0, 0

    def add(self, parts: dict[str, Tensor], loss: Tensor, steps: Tensor | int, tokens: int) -> None:
        """Take this rank's part of a step's losses, as tensors on the device, and its tokens.

        `loss` is added to the mean over steps, as the loss of so many `steps` (0 if the step was left out).
        """
        self._last = parts
        # in float64 if the device has it: thousands of bf16 losses would lose their digits
        self._sum += to_summand(loss)
        self._steps += steps
        self._timed += 1
        self._tokens += tokens

    def begin_line(
        self,
        batches: list[Batch],
        alike: Mapping[str, Tensor],
        known: Mapping[str, float | int | str],
        work: NoUtilization,
    ) -> PendingMetrics:
        """Collective: begin a line about the step just done. It is read a step later, when its numbers have arrived.

        alike: numbers that are the same on all ranks already.
        """
        indices = torch.cat([batch.indices for batch in batches])  # (samples of this rank in the step,)
        counts = {"sample_digest": digest_indices(indices), "tokens": torch.tensor(self._tokens)}
        sums = {**self._last, "loss_mean": to_accumulator(self._sum) / self._steps, **counts}
        totals = self._totals(sums, alike)  # the data ranks; a few numbers
        elapsed = perf_counter() - self._since
        seconds = elapsed / max(self._timed, 1)
        speed = {"samples_per_s": self._global_batch / seconds, **work.metrics(batches[0].inputs, seconds)}
        facts = {**known, **speed, "step_s": seconds, "time": time()}
        self._sum, self._steps = 0.0, 0
        self.resume()
        return PendingMetrics(totals, facts, elapsed, self._dtype)


@dataclass
class PendingMetrics:
    """A training line whose sums have not arrived yet."""

    totals: PendingSums
    facts: Mapping[str, float | int | str]
    seconds: float  # since the line before
    dtype: torch.dtype  # of the loss's bits

    def read(self) -> dict[str, float | int | str]:
        """The line, complete."""
        totals = self.totals.read()
        tokens = int(totals.pop("tokens"))
        speed = {"tokens_per_s": tokens / self.seconds} if tokens else {}
        digest_bits = int(totals.pop("sample_digest")) & (1 << 64) - 1  # torch has no int64 without a sign
        metrics = {name: float(total) for name, total in totals.items()}
        # the loss once more, as bits: so runs can be compared exactly, however numbers are printed
        rounded = totals["loss"].to(self.dtype).item()  # struct itself refuses what is rounded to infinity
        loss_hex = struct.pack(">d" if self.dtype == torch.float64 else ">f", rounded).hex()
        return {**metrics, "loss_hex": loss_hex, **self.facts, **speed, "sample_digest": f"{digest_bits:016x}"}


class StepMonitor:
    """Measures and checks the steps of one loop.

    Are numbers finite, are copies equal, does a rank hold up the others? The ranks ask each other at a line, and before
    a save.
    """

    def __init__(
        self,
        strategy: Strategy,
        model: ParallelModel,
        global_batch: int,
        checkpoints: CheckpointManager,
        log: Log,
        report: Callable[..., None],
    ) -> None:
        """Collective: no step has been done yet."""
        self._model, self._checkpoints, self._log, self._report = model, checkpoints, log, report
        self._meter = TrainMeter(strategy.totals, global_batch, strategy.machine.parameter_dtype)
        self._pending: PendingMetrics | None = None
        self._lookout = strategy.lookout(model.scaler.allowed)
        self._copies, self._pace = strategy.copies(model.network), strategy.pace()

    def has_found(self) -> bool:
        """Was a number of this rank not finite, of those on the host by now? For the vote of a step."""
        return self._lookout.has_found()

    def add(self, step: int, batches: list[Batch], parts: dict[str, Tensor], norm: Tensor | None) -> None:
        """Take the numbers of the step just done. They stay on the device until a line is due."""
        # also between lines: the last report tells how much a kill has cost
        self._report("running", step)
        model = self._model
        tokens = sum(model.task.tokens(batch.targets) for batch in batches)
        self._meter.add(parts, *model.scaler.loss_and_count(parts["loss"]), tokens)
        self._lookout.record(step, batches, parts["loss"], model.scaler.norm_to_check(norm), model.shares)

    def check(self, broken: bool, failed: bool = False) -> None:
        """Collective if a rank has found something, which all ranks know: NotFinite, or a warning for a step left out.

        failed: the present save has failed on a rank, or is to be waited for; then NotFinite or FailedSave.
        """
        # the save first: what broke it is older than what a step has found since
        self.check_saved(self._checkpoints.finish_save(broken or failed))
        self._lookout.check(broken)

    def begin(self, step: int, batches: list[Batch], norm: Tensor | None, known: Mapping[str, Any]) -> None:
        """Collective: begin a line about the step just done, and the comparisons of the ranks that go with it."""
        model = self._model
        alike = ({} if norm is None else {"grad_norm": norm}) | model.task.counted(model.counters.sums)
        self._pending = self._meter.begin_line(batches, alike, {"step": step, **known}, model.work)
        self._copies.start(step)
        self._pace.start(model.watch)
        model.watch.lap("log")

    def write(self) -> None:
        """Write the last line, if it was not written yet. ReplicaDriftError on all ranks if copies differ."""
        if self._pending is None:
            return
        line, self._pending = self._pending.read(), None
        self._log.train(line)
        # each tensor rank has its own sum: the others do not know yet what one of them finds here
        self._lookout.note(not math.isfinite(float(line["loss_mean"])))
        self._write_notes(self._pace.read())
        self._copies.check()
        self._model.watch.lap("log")

    def _write_notes(self, notes: Sequence[str] = ()) -> None:
        for note in (*notes, *self._model.heard()):
            self._log.say(f"note        {note}")

    def check_before_save(self, step: int, state: Mapping[str, Tensor]) -> None:
        """Collective: NotFinite or ReplicaDriftError if no run should go on from this state."""
        self.check(broken=False, failed=True)  # the save before this one
        self._lookout.check_before_save()
        self._write_notes(self._copies.check_before_save(step, state))

    def check_saved(self, broken: NonFiniteSave) -> None:
        """Collective if a state that was to be saved is not finite: NotFinite."""
        self._lookout.check_state(*broken)

    def resume(self) -> None:
        """Start the clock again, after an evaluation or a save, and write what was new in it."""
        self._write_notes()
        self._meter.resume()
