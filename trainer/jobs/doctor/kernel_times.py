"""How long operators take on this device, by kind and size: what a plan computes the time of a step from."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from time import perf_counter
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from trainer.jobs.doctor.findings import ExaminedRanks

_AT = torch.ops.aten
_SECONDS = 0.02  # for one operator of one size
_FEWEST, _MOST = 2, 200  # repetitions, after a first one
_LAYERS = 8  # of the tiny network that shows what Python and autograd take
_ITS_OPERATORS = 8  # of one of these layers: 3 of the forward, 5 of the backward

Points = list[tuple[float, float]]  # operations, or bytes that are read and written; seconds


class Kernel(NamedTuple):
    """An operator on tensors of one size."""

    kind: str
    work: float  # operations of products, of all others the bytes that are read and written
    call: Callable[[], Any]


def kernels(device: torch.device, dtype: torch.dtype) -> Iterator[Kernel]:
    """Every kind of operator that is measured, from small to large. On a GPU the large ones are larger."""
    wide = 1 if device.type == "cpu" else 16

    def make(*shape: int) -> Tensor:
        return torch.rand(shape, device=device, dtype=dtype)

    for n in (8, 64, 256, 512 * (4 if wide > 1 else 1)):
        left, right = make(n, n), make(n, n)
        yield Kernel("mm", 2 * n**3, lambda left=left, right=right: left @ right)
    # images (B, C, H, W) as networks have them: fewer channels where they are large
    for batch, channels, side in ((1, 16, 8), (4, 32, 16), (8 * wide, 64, 32), (8 * wide, 256, 8)):
        yield from _convolutions(make, batch, channels, side)
        yield from _image_operators(make, batch, channels, side)
    for heads, tokens in ((1, 16), (8, 64), (32 * wide, 128)):  # (B, heads, T, 32)
        yield from _attention(make, heads, tokens)
    for rows in (4, 256, 4096 * wide):
        yield from _row_operators(make, rows)
    for numbers in (2**6, 2**14, 2**18, 2**22 * wide):
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
    weight, mean = make(channels), make(channels)
    size, groups = x.nbytes, channels // 8
    yield Kernel("batch norm", 2 * size, lambda: _AT.native_batch_norm(x, weight, weight, mean, mean, True, 0.1, 1e-5))
    saved = (weight, mean, mean)
    yield Kernel(
        "batch norm backward",
        3 * size,
        lambda: _AT.native_batch_norm_backward(x, x, weight, mean, mean, *saved[1:], True, 1e-5, [True, True, True]),
    )
    shape = (batch, channels, side * side, groups)
    statistics = make(batch, groups)
    plain = x.contiguous()
    yield Kernel("group norm", 2 * size, lambda: _AT.native_group_norm(plain, weight, weight, *shape, 1e-5))
    yield Kernel(
        "group norm backward",
        3 * size,
        lambda: _AT.native_group_norm_backward(
            plain, plain, statistics, statistics, weight, *shape, [True, True, True]
        ),
    )
    pooled, places = _AT.max_pool2d_with_indices(x, [2, 2], [2, 2])
    yield Kernel(
        "pool", size + pooled.nbytes + places.nbytes, lambda: _AT.max_pool2d_with_indices(x, [2, 2], [2, 2])
    )


def _attention(make: Callable[..., Tensor], heads: int, tokens: int) -> Iterator[Kernel]:
    q, k, v = (make(1, heads, tokens, 32).requires_grad_() for _ in range(3))
    flops = 4 * heads * tokens * tokens * 32
    out = nn.functional.scaled_dot_product_attention(q, k, v)
    gradient = torch.ones_like(out)
    yield Kernel("attention", flops, lambda: nn.functional.scaled_dot_product_attention(q, k, v))
    yield Kernel(
        "attention backward", 2.5 * flops, lambda: torch.autograd.grad(out, (q, k, v), gradient, retain_graph=True)
    )


def _row_operators(make: Callable[..., Tensor], rows: int) -> Iterator[Kernel]:
    x, weight, statistics = make(rows, 256), make(256), make(rows, 1)  # (rows, 256)
    yield Kernel("layer norm", 2 * x.nbytes, lambda: _AT.native_layer_norm(x, [256], weight, weight, 1e-5))
    yield Kernel(
        "layer norm backward",
        3 * x.nbytes,
        lambda: _AT.native_layer_norm_backward(
            x, x, [256], statistics, statistics, weight, weight, [True, True, True]
        ),
    )
    yield Kernel("softmax", 2 * x.nbytes, lambda: _AT._log_softmax(x, 1, False))
    yield Kernel("sum", x.nbytes, lambda: x.sum(0, keepdim=True))


def _elementwise_operators(make: Callable[..., Tensor], numbers: int) -> Iterator[Kernel]:
    x, y = make(numbers), make(numbers)
    grid = make(numbers // 64, 64).t()
    size = x.nbytes
    yield Kernel("elementwise", 3 * size, lambda: x + y)
    yield Kernel("in place", 3 * size, lambda: x.add_(y))
    yield Kernel("copy", 2 * size, lambda: grid.clone(memory_format=torch.contiguous_format))
    yield Kernel("gelu", 2 * size, lambda: nn.functional.gelu(x))
    yield Kernel("gelu backward", 3 * size, lambda: _AT.gelu_backward(x, y))
    step = torch.ones((), device=x.device)
    state = [[each] for each in (x, y, y.clone(), y.clone())]  # parameter, gradient, two moments
    keys = {"lr": 0.0, "beta1": 0.9, "beta2": 0.9, "weight_decay": 0.0, "eps": 1e-8, "amsgrad": False}
    yield Kernel(
        "optimizer", 4 * size, lambda: torch._fused_adamw_(*state, [], [step], maximize=False, **keys)
    )


def measure_kernels(site: ExaminedRanks, dtype: torch.dtype) -> dict[str, Points]:
    """Collective: each kind of operator's points. All ranks measure at the same time; rank 0's times count."""
    site.begin()
    points: dict[str, Points] = {}
    for kernel in kernels(site.device, dtype):
        points.setdefault(kernel.kind, []).append((float(kernel.work), _best_seconds(kernel.call, site)))
    return {kind: sorted(each) for kind, each in points.items()}


def _best_seconds(call: Callable[[], Any], site: ExaminedRanks) -> float:
    """Seconds of a call: the best of some turns, because other programs only ever make it slower."""
    call()
    site.synchronize()
    times: list[float] = []
    spent = 0.0
    while len(times) < _FEWEST or (spent < _SECONDS and len(times) < _MOST):
        began = perf_counter()
        call()
        site.synchronize()
        times.append(perf_counter() - began)
        spent += times[-1]
    return min(times)


def measure_overhead(site: ExaminedRanks, points: Mapping[str, Points]) -> float:
    """Seconds that Python and autograd take for each operator of a training step, beside the operator itself."""
    layers = [nn.Sequential(nn.Linear(8, 8), nn.LayerNorm(8), nn.GELU()) for _ in range(_LAYERS)]
    network = nn.Sequential(*layers).to(site.device)
    x = torch.ones(8, 8, device=site.device)  # (B, C)
    whole = _best_seconds(lambda: network(x).sum().backward(), site)
    smallest = min(seconds for each in points.values() for _, seconds in each[:1])
    return max(0.0, whole / (_LAYERS * _ITS_OPERATORS) - smallest)
