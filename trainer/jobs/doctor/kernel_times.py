"""How long operators take on this device, by kind and size: what a plan computes the time of a step from."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import asdict
from functools import partial
from statistics import fmean
from time import perf_counter
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from trainer.jobs.doctor.findings import ExaminedRanks
from trainer.jobs.doctor.reference_step import StepFactors, measure_factors
from trainer.jobs.plan.devices import Points

_AT = torch.ops.aten
_FEWEST, _MOST = 2, 200  # turns, after a first one
_QUEUED = 16  # calls of a turn on a GPU, which computes while the host prepares the next one


class Kernel(NamedTuple):
    """An operator on tensors of one size."""

    kind: str
    work: float  # operations of products, of all others the bytes that are read and written
    call: Callable[[], Any]
    calls: int = 1  # on tensors of this size that are done at once


def kernels(device: torch.device, dtype: torch.dtype) -> Iterator[Kernel]:
    """Every kind of operator that is measured, from small to large. On a GPU the large ones are larger."""
    on_gpu = device.type != "cpu"

    def make(*shape: int) -> Tensor:
        return torch.rand(shape, device=device, dtype=dtype)

    for n in (8, 64, 256, 4096 if on_gpu else 512):
        left, right = make(n, n), make(n, n)
        yield Kernel("mm", 2 * n**3, partial(torch.mm, left, right))
    # images (B, C, H, W) as networks have them: fewer channels where they are large
    large = ((128, 128, 28), (256, 256, 28)) if on_gpu else ((8, 64, 32), (8, 256, 8))
    for batch, channels, side in ((1, 16, 8), (4, 32, 16), *large):
        yield from _convolutions(make, batch, channels, side)
        yield from _image_operators(make, batch, channels, side)
    for heads, tokens, width in ((1, 16, 32), (8, 64, 32), (192, 1024, 64) if on_gpu else (32, 128, 32)):
        yield from _attention(make, heads, tokens, width)
    for rows, width in ((4, 256), (256, 256), (16384, 1024) if on_gpu else (4096, 256)):
        yield from _row_operators(make, rows, width)
    for numbers in (2**6, 2**14, 2**18, 2**26 if on_gpu else 2**22):
        yield from _elementwise_operators(make, numbers)


def _convolutions(make: Callable[..., Tensor], batch: int, channels: int, side: int) -> Iterator[Kernel]:
    for kind, size, groups in (("conv 1x1", 1, 1), ("conv", 3, 1), ("conv grouped", 3, channels)):
        x = make(batch, channels, side, side).to(memory_format=torch.channels_last)
        weight = make(channels, channels // groups, size, size).to(memory_format=torch.channels_last)
        rest = ([1, 1], [size // 2] * 2, [1, 1], False, [0, 0], groups)
        flops = 2 * weight.numel() * batch * side * side
        gradient = torch.convolution(x, weight, None, *rest)

        def forward(x: Tensor = x, weight: Tensor = weight, rest: Any = rest) -> Any:
            return torch.convolution(x, weight, None, *rest)

        def backward(x: Tensor = x, weight: Tensor = weight, gradient: Tensor = gradient, rest: Any = rest) -> Any:
            return _AT.convolution_backward(gradient, x, weight, None, *rest, [True, True, False])

        yield Kernel(kind, flops, forward)
        yield Kernel(f"{kind} backward", 2 * flops, backward)


def _image_operators(make: Callable[..., Tensor], batch: int, channels: int, side: int) -> Iterator[Kernel]:
    x = make(batch, channels, side, side).to(memory_format=torch.channels_last)
    weight, size = make(channels), x.nbytes
    # of few bits are only the images: a network keeps the weights and statistics of its BatchNorms in float32
    scale, running = weight.float(), torch.zeros(2, channels, device=x.device)
    normalize = partial(_AT.native_batch_norm, x, scale, scale, *running, True, 0.1, 1e-5)
    # what a backward takes has the type that this device's forward returns
    _, *saved = normalize()
    yield Kernel("batch norm", 2 * size, normalize)
    yield Kernel(
        "batch norm backward",
        3 * size,
        lambda: _AT.native_batch_norm_backward(x, x, scale, *running, *saved, True, 1e-5, [True, True, True]),
    )
    shape = (batch, channels, side * side, channels // 8)
    plain = x.contiguous()
    normalize_groups = partial(_AT.native_group_norm, plain, weight, weight, *shape, 1e-5)
    _, *statistics = normalize_groups()
    yield Kernel("group norm", 2 * size, normalize_groups)
    yield Kernel(
        "group norm backward",
        3 * size,
        lambda: _AT.native_group_norm_backward(plain, plain, *statistics, weight, *shape, [True, True, True]),
    )
    pooled, places = _AT.max_pool2d_with_indices(x, [2, 2], [2, 2])
    yield Kernel("pool", size + pooled.nbytes + places.nbytes, lambda: _AT.max_pool2d_with_indices(x, [2, 2], [2, 2]))


def _attention(make: Callable[..., Tensor], heads: int, tokens: int, width: int) -> Iterator[Kernel]:
    q, k, v = (make(1, heads, tokens, width).requires_grad_() for _ in range(3))
    flops = 4 * heads * tokens * tokens * width
    out = nn.functional.scaled_dot_product_attention(q, k, v)
    gradient = torch.ones_like(out)
    yield Kernel("attention", flops, lambda: nn.functional.scaled_dot_product_attention(q, k, v))
    yield Kernel(
        "attention backward", 2.5 * flops, lambda: torch.autograd.grad(out, (q, k, v), gradient, retain_graph=True)
    )


def _row_operators(make: Callable[..., Tensor], rows: int, width: int) -> Iterator[Kernel]:
    x, weight = make(rows, width), make(width)
    normalize = partial(_AT.native_layer_norm, x, [width], weight, weight, 1e-5)
    _, *statistics = normalize()
    yield Kernel("layer norm", 2 * x.nbytes, normalize)
    yield Kernel(
        "layer norm backward",
        3 * x.nbytes,
        lambda: _AT.native_layer_norm_backward(x, x, [width], *statistics, weight, weight, [True, True, True]),
    )
    yield Kernel("softmax", 2 * x.nbytes, lambda: torch.log_softmax(x, 1))
    yield Kernel("sum", x.nbytes, lambda: x.sum(0, keepdim=True))


def _elementwise_operators(make: Callable[..., Tensor], numbers: int) -> Iterator[Kernel]:
    x, y = make(numbers), make(numbers)
    # on a GPU as attention turns heads and tokens, in runs of 64 numbers
    heads = make(max(1, numbers // 2**12), min(64, numbers // 64), 64)
    grid = make(numbers // 64, 64).t() if x.device.type == "cpu" else heads.transpose(0, 1)
    size = x.nbytes
    yield Kernel("elementwise", 3 * size, lambda: x + y)
    yield Kernel("in place", 3 * size, lambda: x.add_(y))
    yield Kernel("copy", 2 * size, lambda: grid.clone(memory_format=torch.contiguous_format))
    yield Kernel("gelu", 2 * size, lambda: nn.functional.gelu(x))
    yield Kernel("gelu backward", 3 * size, lambda: _AT.gelu_backward(x, y))
    # of small parameters many are updated by one call; on a GPU by one kernel
    parameters = [nn.Parameter(x.clone()) for _ in range(16 if numbers <= 2**14 else 1)]
    for parameter in parameters:
        parameter.grad = y
    optimizer = torch.optim.AdamW(parameters, lr=0.0, fused=True)
    calls = len(parameters) if x.device.type == "cpu" else 1
    yield Kernel("optimizer", 4 * size * len(parameters) / calls, optimizer.step, calls)


def measure_kernels(site: ExaminedRanks, sums: Points, patience: float) -> dict[str, Any]:
    """Collective: what plans need to know of operators, measured while all ranks compute.

    sums: an all-reduce over all ranks, (bytes, seconds). patience: seconds for one operator of one size.
    """
    dtype = torch.float32 if site.device.type == "cpu" else torch.bfloat16
    labels: list[tuple[str, float]] = []
    measured: list[float] = []
    site.begin()
    for kernel in kernels(site.device, dtype):
        labels.append((kernel.kind, float(kernel.work)))
        measured.append(_best_seconds(kernel.call, site, patience) / kernel.calls)
        site.progress += 1
    # several shapes of as much work count by their mean; a run is as fast as its slowest rank
    same: dict[tuple[str, float], list[float]] = {}
    for label, took in zip(labels, site.slowest(measured), strict=True):
        same.setdefault(label, []).append(took)
    points: dict[str, list[tuple[float, float]]] = {}
    for (kind, work), times in sorted(same.items()):
        points.setdefault(kind, []).append((work, fmean(times)))
    factors = measure_factors(site, points, sums)
    overhead, compute, collectives = site.slowest([factors.overhead_s, factors.compute, factors.collectives])
    return {
        "ranks": site.machines.count(site.machines[0]),  # of a machine
        "threads": torch.get_num_threads(),
        "dtype": str(dtype).removeprefix("torch."),
        **asdict(StepFactors(overhead, compute, collectives)),
        "seconds": points,
    }


def _best_seconds(call: Callable[[], Any], site: ExaminedRanks, patience: float) -> float:
    """Seconds of a call: the best of some turns, because other programs only ever make it slower."""
    call()
    site.synchronize()
    calls = 1 if site.device.type == "cpu" else _QUEUED
    times: list[float] = []
    while len(times) < _FEWEST or (sum(times) < patience and len(times) < _MOST):
        began = perf_counter()
        for _ in range(calls):
            call()
        site.synchronize()
        times.append(perf_counter() - began)
    return min(times) / calls
