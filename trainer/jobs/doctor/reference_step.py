"""A training step of a small network: how much longer it takes than its operators and collectives one by one.

In a step tensors are not in a cache, memory is new, ranks wait for each other, and Python and autograd take their time.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from statistics import median
from time import perf_counter
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from trainer.jobs.doctor.findings import ExaminedRanks
from trainer.jobs.plan.devices import CPU, Device, Points, interpolate
from trainer.jobs.plan.work import Work
from trainer.parallel.rng.dispatch_mode import TorchDispatchMode

_STEPS = 5  # after two first ones
_PHASE = "step"
_LEAST = 0.2  # of a collective's own time, in a step; less is chance
_MESSAGE = 2**18  # numbers of 4 bytes that ranks add up between two blocks


@dataclass(frozen=True)
class StepFactors:
    """What a step takes beside its operators."""

    overhead_s: float  # for each operator
    compute: float  # times as long as operators take one by one
    collectives: float  # the same of collectives; 1 where there is one rank


class _Counter(TorchDispatchMode):
    """Adds up what each operator should take, while it runs."""

    def __init__(self, work: Work) -> None:
        super().__init__()
        self._work = work

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = func(*args, **(kwargs or {}))
        self._work.record(func, args, kwargs or {}, out, _PHASE)
        return out


def _tiny() -> tuple[list[nn.Module], Tensor]:
    """Blocks that compute next to nothing, and a batch (B, C)."""
    return [nn.Sequential(nn.Linear(8, 8), nn.LayerNorm(8), nn.GELU()) for _ in range(8)], torch.ones(8, 8)


def _small() -> tuple[list[nn.Module], Tensor]:
    """Blocks as in image networks and transformers, and a batch of images (B, C, H, W)."""
    width = 192
    convolutions = [nn.Sequential(nn.Conv2d(32, 32, 3, padding=1), nn.BatchNorm2d(32), nn.ReLU()) for _ in range(2)]
    patches = nn.Sequential(nn.Conv2d(32, width, 4, 4), nn.Flatten(2), _Transposed())  # (B, T, width)
    blocks = [
        nn.Sequential(nn.LayerNorm(width), nn.Linear(width, 4 * width), nn.GELU(), nn.Linear(4 * width, width))
        for _ in range(4)
    ]
    return [*convolutions, patches, *blocks], torch.rand(16, 32, 32, 32)


class _Transposed(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return x.transpose(1, 2)


def measure_factors(site: ExaminedRanks, points: Mapping[str, Points], sums: Points) -> StepFactors:
    """Collective: the factors by the steps of two networks. sums: an all-reduce of all ranks, (bytes, seconds)."""
    # the tiny network shows what comes with each operator, the small one what comes with its size
    times, parts, operators = _time_step(site, *_tiny(), points)
    on_gpu = site.device.type != "cpu"  # which computes while the host prepares the next operator
    overhead = max(0.0, min(times) - (0.0 if on_gpu else parts)) / operators
    times, parts, operators = _time_step(site, *_small(), points)
    compute, waiting = max(1.0, (min(times) - operators * overhead) / parts), 1.0
    if sums:
        message = torch.zeros(_MESSAGE, device=site.device)
        # all ranks; 1 MiB between two blocks, as tensor ranks do: new memory, as what is gathered and added up has
        more, _, _ = _time_step(site, *_small(), points, lambda: dist.all_reduce(message.clone()))
        seconds = (median(more) - median(times)) / (len(_small()[0]) - 1)
        waiting = max(_LEAST, seconds / interpolate(sums, 4 * _MESSAGE))
    return StepFactors(overhead, compute, waiting)


def _time_step(
    site: ExaminedRanks,
    blocks: Sequence[nn.Module],
    x: Tensor,
    points: Mapping[str, Points],
    between: Callable[[], Any] = lambda: None,
) -> tuple[list[float], float, int]:
    """Seconds of each step, what its operators should take together, and how many there are."""
    network = nn.ModuleList(blocks).to(site.device)
    x = x.to(site.device)
    optimizer = torch.optim.AdamW(network.parameters(), lr=0.0, fused=True)

    def step(meet: Callable[[], Any]) -> None:
        y = network[0](x)
        for block in network[1:]:
            meet()
            y = block(y)
        y.square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()

    times = []
    site.begin()
    for _ in range(2 + _STEPS):
        site.synchronize()
        began = perf_counter()
        step(between)
        site.synchronize()
        times.append(perf_counter() - began)
        site.progress += 1
    work = Work(Device(CPU if site.device.type == "cpu" else "GPU", 1, 1, 1, 1, kernels=points))
    with _Counter(work):
        step(lambda: None)
    operators = work.operators
    return times[2:], work.take()[_PHASE], operators
