"""What a collective should take: the line α + bytes / β through its measured times, and a model made of links.

α is the time that even an empty message takes; β is the rate for large messages, in bytes a second.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from math import ceil, inf, log2


@dataclass(frozen=True)
class LinearCost:
    """The time of a message as α + bytes / β."""

    alpha_s: float
    bytes_per_s: float  # β; infinite where the size makes no difference

    def seconds(self, size: float) -> float:
        """The time of a message of so many bytes."""
        return self.alpha_s + size / self.bytes_per_s


def fit_cost(points: Sequence[tuple[int, float]]) -> LinearCost:
    """The line nearest to these (bytes, seconds), by relative distance: 1 µs counts among µs, not among seconds.

    Neither α nor 1/β is below zero.
    """
    # least squares of (α + x·k − t) / t, where k = 1/β
    weights, x, xx = (sum(size**power / t**2 for size, t in points) for power in (0, 1, 2))
    rhs, rhs_x = (sum(size**power / t for size, t in points) for power in (0, 1))
    determinant = weights * xx - x * x
    if determinant <= 1e-12 * weights * xx:  # one size alone
        return LinearCost(rhs / weights, inf)
    alpha, per_byte = (rhs * xx - rhs_x * x) / determinant, (rhs_x * weights - rhs * x) / determinant
    if alpha < 0:
        alpha, per_byte = 0.0, rhs_x / xx
    if per_byte <= 0:
        return LinearCost(rhs / weights, inf)
    return LinearCost(alpha, 1 / per_byte)


def model_cost(op: str, ranks: int, link: LinearCost) -> LinearCost:
    """A collective over so many ranks whose links are all like this one, by the usual ring and tree algorithms.

    Its bytes are those of the whole tensor: what a gather collects, what a scatter divides.
    """
    hops = ranks - 1
    steps, passes = {
        "all_reduce": (2 * hops, 2 * hops / ranks),  # a reduce-scatter and an all-gather around the ring
        "broadcast": (ceil(log2(ranks)), 1.0),
        "reduce": (ceil(log2(ranks)), 1.0),
    }.get(op, (hops, hops / ranks))  # each rank sends or receives all parts but its own
    return LinearCost(steps * link.alpha_s, link.bytes_per_s / passes)
