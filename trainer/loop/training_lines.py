"""Training lines: begun after a step, on their way while the next one computes, then written."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from typing import Any

from torch import Tensor

from trainer.data.stream import Batch
from trainer.records.checkpoint import Broken, Checkpoints
from trainer.records.meter import Meter, PendingLine
from trainer.records.sinks import Log
from trainer.strategies.base import Strategy
from trainer.strategies.parallel_model import Placed


class Lines:
    """What one loop knows of its steps since it began or went back: sums for a line, and whether all is as it must be.

    Are numbers finite, are copies alike, does a rank hold up the others? All ranks ask at a line, and before a save.
    """

    def __init__(
        self,
        strategy: Strategy,
        placed: Placed,
        global_batch: int,
        checkpoints: Checkpoints,
        log: Log,
        report: Callable[..., None],
    ) -> None:
        """Collective: nothing is known yet."""
        self._placed, self._checkpoints, self._log, self._report = placed, checkpoints, log, report
        self._meter = Meter(strategy.totals, global_batch, strategy.machine.parameter_dtype)
        self._pending: PendingLine | None = None
        self._lookout = strategy.lookout(placed.scaler.allowed)
        self._copies, self._pace = strategy.copies(placed.network), strategy.pace()

    def broken(self) -> bool:
        """Was a number of this rank not finite, of those that have arrived? For the vote of a step."""
        return self._lookout.seen()

    def add(self, step: int, batches: list[Batch], parts: dict[str, Tensor], norm: Tensor | None) -> None:
        """Take the numbers of the step just done, where they are: only a line brings them to the host."""
        # steps between lines count as well: what a kill costs is known by the last report
        self._report("running", step)
        tokens = sum(self._placed.task.tokens(batch.targets) for batch in batches)
        self._meter.add(parts, *self._placed.scaler.counted(parts["loss"]), tokens)
        self._lookout.add(step, batches, parts["loss"], self._placed.scaler.judged(norm))

    def refuse(self, broken: bool, failed: bool = False) -> None:
        """Collective where some rank has found something, which all know: NotFinite, or a word of a step left out.

        failed: the save under way is over, or is to be waited for; NotFinite or FailedSave where it was not to be.
        """
        # the save first: what broke it is older than what any step has seen since
        self.refuse_saved(self._checkpoints.settle(broken or failed))
        self._lookout.refuse(broken)

    def begin(self, step: int, batches: list[Batch], norm: Tensor | None, known: Mapping[str, Any]) -> None:
        """Collective: a line about the step just done is on its way, and what else ranks tell each other with it."""
        self._pending = self._meter.line(batches, norm, {"step": step, **known}, self._placed.work)
        self._copies.tell(step)
        self._pace.tell(self._placed.watch)

    def write(self) -> None:
        """Write the last line, unless it was. Drifted on all ranks if copies differ."""
        if self._pending is None:
            return
        line, self._pending = self._pending.read(), None
        self._log.train(line)
        # tensor ranks add up each for itself: what one of them finds here is none of the others' yet
        self._lookout.notice(not math.isfinite(float(line["loss_mean"])))
        for fact in (*self._pace.heard(), *self._placed.heard()):
            self._log.say(f"note        {fact}")
        self._copies.refuse()

    def refuse_save(self, step: int, state: Mapping[str, Tensor]) -> None:
        """Collective: NotFinite or Drifted where this state is one that no run should go on from."""
        self.refuse(broken=False, failed=True)  # the save before this one
        self._lookout.refuse_save()
        self._copies.refuse_save(step, state)

    def refuse_saved(self, broken: Broken) -> None:
        """Collective where a state that was to be saved is not finite: NotFinite."""
        self._lookout.refuse_state(*broken)

    def resume(self) -> None:
        """Start the clock again, after what was no step."""
        self._meter.resume()
