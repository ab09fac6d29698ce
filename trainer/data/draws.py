"""Random numbers that belong to samples: every one depends on (seed, epoch, sample index) alone."""

from __future__ import annotations

import math
from functools import cache, cached_property

import torch
from torch import Tensor

from trainer.data.seeds import GOLDEN, POSITIVE, mix, mixed, signed
from trainer.devices import widest


class Random:
    """Random numbers for a batch: one counter-based stream a sample, the same bits on CPU and GPU.

    Successive calls continue the streams: `uniform(B, 3)` gives the numbers of `uniform(B)` called three times.
    """

    def __init__(self, seed: int, epoch: int, indices: Tensor) -> None:
        self._seed, self._epoch, self._indices = seed, epoch, indices
        self._drawn = 0  # numbers of each stream

    @cached_property
    def _start(self) -> Tensor:
        """Where each sample's stream begins: (B,) int64. Made when it is first asked for: many batches need none."""
        return mixed(self._indices * signed(GOLDEN) + mix(self._seed, self._epoch))

    def uniform(self, *shape: int) -> Tensor:
        """Uniform float32 numbers in [0, 1), multiples of 2^-24; the first dimension is the batch."""
        return (self._words(shape) >> 39).float().mul_(2.0**-24)

    def normal(self, *shape: int) -> Tensor:
        """Standard normal float32 numbers; the first dimension is the batch.

        The quantile function is a table with linear interpolation, because a device's own log and cos may differ in
        their last bit. Cells halve towards the tail: 256 for each power of two of the probability, down to 2^-32.
        """
        drawn = self._words(shape)
        # 33 bits want float64: where the device has none the host computes, and waits for it
        words = drawn if widest(drawn.device) == torch.float64 else drawn.cpu()
        tail, power = torch.frexp(((words >> 31) + 1).double())  # P(|z| > result) = tail · 2^power / 2^32
        place = (tail - 0.5) * 512
        cell = place.floor()
        index = power.long() * 256 + cell.long()
        table = _quantiles(words.device)
        near, far = table[index], table[index + 1]
        # (B, …): between two entries of the table, with a sign from the lowest bit, which the tail does not use
        magnitude = near + (far - near) * (place - cell).float()
        return (magnitude * (1 - 2 * (words & 1)).float()).to(drawn.device)

    def integers(self, low: int, high: int, *shape: int) -> Tensor:
        """Int64 numbers in [low, high); the first dimension is the batch."""
        if high <= low:
            raise ValueError(f"integers in [{low}, {high}) do not exist")
        return self._words(shape).remainder_(high - low).add_(low)

    def _words(self, shape: tuple[int, ...]) -> Tensor:
        """The next 63 random bits for each element of the shape."""
        batch = self._indices.shape[0]
        if not shape or shape[0] != batch:
            raise ValueError(f"shape {shape} must begin with the batch of {batch}")
        # The counter goes on where the last call ended, so that no two calls share numbers.
        count = math.prod(shape[1:])
        counter = torch.arange(self._drawn + 1, self._drawn + count + 1, device=self._indices.device)
        words = mixed(self._start[:, None] + counter * signed(GOLDEN)).bitwise_and_(POSITIVE)
        self._drawn += count
        return words.view(shape)


@cache
def _quantiles(device: torch.device) -> Tensor:
    """Half-normal quantiles at the probabilities (0.5 + cell / 512) · 2^(power - 32), at index power · 256 + cell."""
    with torch.inference_mode(False):
        cells = torch.arange(34 * 256 + 1, dtype=torch.float64)
        probability = (0.5 + (cells % 256) / 512) * 2.0 ** (torch.floor(cells / 256) - 32)
        return (-torch.special.ndtri(probability.clamp(max=1.0) / 2)).float().to(device)
