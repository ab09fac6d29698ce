"""What a training line needs of the steps since the last one, without making any device wait."""

from __future__ import annotations

import struct
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from time import perf_counter, time

import torch
from torch import Tensor

from trainer.data.stream import Batch, digest
from trainer.learning.flops_utilization import NoWork
from trainer.parallel.buckets import Totals, wide


class Meter:
    """Sums of losses that stay on the device, and a clock that stops while nothing is trained."""

    def __init__(self, totals: Callable[..., Totals], global_batch: int, dtype: torch.dtype) -> None:
        """`totals` starts adding sums up over all that train, to be read later. dtype: of the loss's bits."""
        self._totals, self._global_batch, self._dtype = totals, global_batch, dtype
        self._last: dict[str, Tensor] = {}
        self._sum: Tensor | None = None
        self._steps: Tensor | int = 0
        self._tokens = 0
        self.resume()

    def resume(self) -> None:
        """Start the clock again, after an evaluation or a save; what was measured since the last line is forgotten."""
        self._since, self._timed, self._tokens = perf_counter(), 0, 0

    def add(self, parts: dict[str, Tensor], loss: Tensor, steps: Tensor | int, tokens: int) -> None:
        """Take this rank's share of one step's losses: numbers, where they are; and of its tokens.

        The mean over steps takes `loss`, as that of so many `steps`.
        """
        self._last = parts
        # in float64 where there is one, whatever is added to it: thousands of bf16 losses would not add up
        self._sum = wide(loss) if self._sum is None else self._sum + loss
        self._steps += steps
        self._timed += 1
        self._tokens += tokens

    def line(
        self, batches: list[Batch], norm: Tensor | None, known: Mapping[str, float | int | str], work: NoWork
    ) -> PendingLine:
        """Collective: begin a line about the step just done; read it a step later, when its numbers have arrived."""
        assert self._sum is not None, "a line is about at least one step"
        indices = torch.cat([batch.indices for batch in batches])  # (samples of this rank's share,)
        counts = {"sample_digest": digest(indices), "tokens": torch.tensor(self._tokens)}
        sums = {**self._last, "loss_mean": self._sum / self._steps, **counts}
        # all ranks' sums start their way; the norm is the same on all already
        totals = self._totals(sums, {} if norm is None else {"grad_norm": norm})
        whole = perf_counter() - self._since
        seconds = whole / max(self._timed, 1)
        speed = {"samples_per_s": self._global_batch / seconds, **work.figures(batches[0].inputs, seconds)}
        facts = {**known, **speed, "step_s": seconds, "time": time()}
        self._sum, self._steps = None, 0
        self.resume()
        return PendingLine(totals, facts, whole, self._dtype)


@dataclass
class PendingLine:
    """A training line whose sums are still on their way."""

    totals: Totals
    facts: Mapping[str, float | int | str]
    seconds: float  # that it is about
    dtype: torch.dtype  # of the loss's bits

    def read(self) -> dict[str, float | int | str]:
        """The line, complete."""
        totals = self.totals.read()
        tokens = int(totals.pop("tokens"))
        speed = {"tokens_per_s": tokens / self.seconds} if tokens else {}
        digest_bits = int(totals.pop("sample_digest")) & (1 << 64) - 1  # torch has no int64 without a sign
        figures = {name: float(total) for name, total in totals.items()}
        # the loss once more, as bits: whether two runs are the same must not depend on how a number is printed
        rounded = totals["loss"].to(self.dtype).item()  # struct itself refuses what is rounded to infinity
        loss_hex = struct.pack(">d" if self.dtype == torch.float64 else ">f", rounded).hex()
        return {**figures, "loss_hex": loss_hex, **self.facts, **speed, "sample_digest": f"{digest_bits:016x}"}
