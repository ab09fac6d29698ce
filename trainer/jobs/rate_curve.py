"""The losses of a range test against their rates: is it over, what do they suggest, and how do they look in a line."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field
from statistics import fmean
from typing import NamedTuple

from trainer.messages import format_number
from trainer.records.sinks import Line, Sink

_TOO_HIGH = 3.0  # a loss above its best by so many times what is best, or what was gained, has diverged
_MEMORY = 0.9  # what a step keeps of the running mean of the steps before it
_SMOOTHED = 20  # the curve is smoothed over two of so many parts
_REST = 0.1  # of the whole fall of the curve, in which the suggested rate lies
_CLEAR = 2.0  # how often the noise a fall must be, to say anything
_BLOCKS = "▁▂▃▄▅▆▇█"
_COLUMNS = 60  # characters of the curve on a screen


class Findings(NamedTuple):
    """Steps of a test, counted from 0."""

    chosen: int  # whose rate is suggested: in the last tenth of the fall, the middle
    steepest: int  # where the curve falls fastest
    lowest: int


@dataclass
class RateCurve(Sink):
    """Takes the line of each step. Every rank has one; the losses are those of the global batch, on all alike."""

    lowest: float
    highest: float
    steps: int
    shown: int  # steps from row to row of the table; 0: another rank shows it
    losses: list[float] = field(default_factory=list)  # of each step, until it diverged
    diverged: bool = False
    _mean: float = 0.0  # running, of the last steps
    _best: float = math.inf

    def train(self, line: Line) -> None:
        """The loss of the next step: has it diverged?"""
        step, loss = len(self.losses), float(line["loss"])
        if self.diverged:
            return
        if not math.isfinite(loss):
            self.diverged = True
            return
        self.losses.append(loss)
        self._mean = _MEMORY * self._mean + (1 - _MEMORY) * loss
        mean = self._mean / (1 - _MEMORY ** (step + 1))
        self._best = min(self._best, mean)
        # 4 times the best; where losses are near 0 or below, so far above the best in what was gained so far
        self.diverged = mean > self._best + _TOO_HIGH * max(abs(self._best), self.losses[0] - self._best)
        if self.shown and (step % self.shown == 0 or self.diverged):
            print(f"  {self.rate(step):<14.2e}{format_number(mean)}", flush=True)

    def rate(self, step: float) -> float:
        """`optimizer.lr` of a step, counted from 0."""
        return float(self.lowest * (self.highest / self.lowest) ** (step / (self.steps - 1)))

    def smoothed(self) -> list[float]:
        """Each loss as a mean with those around it, the nearest weigh most: without the lag of a running mean."""
        reach = max(1, len(self.losses) // _SMOOTHED)
        weights = [1 - abs(away) / (reach + 1) for away in range(-reach, reach + 1)]
        # an explosion must not reach back over its neighbours
        top = max(self.losses[: reach + 1], default=0.0)
        low = [min(loss, top + abs(top)) for loss in self.losses]
        means = []
        for at in range(len(low)):
            near = [
                (weight, low[at + away])
                for weight, away in zip(weights, range(-reach, reach + 1), strict=True)
                if 0 <= at + away < len(low)
            ]
            means.append(sum(weight * loss for weight, loss in near) / sum(weight for weight, _ in near))
        return means

    def find_rates(self) -> Findings | None:
        """What the smoothed curve says; None where the loss has not fallen clearly, so that it says nothing."""
        if not (curve := self.smoothed()):
            return None
        lowest = min(range(len(curve)), key=curve.__getitem__)
        start = max(curve[: lowest + 1])
        # behind the lowest loss comes what is no noise
        noise = fmean(abs(loss - mean) for loss, mean in zip(self.losses[: lowest + 1], curve, strict=False))
        slopes = {at: curve[at + 1] - curve[at - 1] for at in range(1, lowest)}
        if not slopes or start - curve[lowest] < _CLEAR * noise:
            return None
        # where nine tenths of the fall are done, and from there to where it stops: behind it the curve may be flat, and
        # have its lowest loss anywhere
        enough = curve[lowest] + _REST * (start - curve[lowest])
        early = late = next(at for at in range(lowest + 1) if curve[at] <= enough)
        while late < lowest and curve[late + 1] < curve[late]:
            late += 1
        return Findings((early + late) // 2, min(slopes, key=slopes.__getitem__), lowest)


def draw_blocks(losses: Sequence[float], marked: int | None) -> list[str]:
    """The curve as blocks in a line, and below it a mark at one of the steps."""
    width = min(_COLUMNS, len(losses))
    columns = [losses[at * len(losses) // width] for at in range(width)]
    low, high = min(columns), max(columns)
    heights = [round((value - low) / ((high - low) or 1.0) * (len(_BLOCKS) - 1)) for value in columns]
    lines = ["".join(_BLOCKS[height] for height in heights)]
    return lines if marked is None else [*lines, f"{'^':>{marked * width // len(losses) + 1}}"]
