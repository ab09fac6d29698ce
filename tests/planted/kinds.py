"""Layers for the middle of the network: of kinds that people use, all right everywhere; and two that count."""

from __future__ import annotations

from collections.abc import Callable

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.utils import parametrizations


class Complex(nn.Module):
    """A complex weight."""

    def __init__(self, inside: int, outside: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(outside, inside, dtype=torch.complex64) / inside**0.5)

    def forward(self, x: Tensor) -> Tensor:
        return F.linear(x.to(self.weight.dtype), self.weight).abs()


class Twice(nn.Module):
    """One layer that is called twice, and a single number."""

    def __init__(self, inside: int, outside: int) -> None:
        super().__init__()
        self.layer, self.gain = nn.Linear(inside, outside), nn.Parameter(torch.ones(()))

    def forward(self, x: Tensor) -> Tensor:
        return self.gain * self.layer(F.silu(self.layer(x)))


class Recurrent(nn.Module):
    """A GRU over the numbers of a sample."""

    def __init__(self, inside: int, outside: int) -> None:
        super().__init__()
        self.cells = nn.GRU(1, outside, batch_first=True)

    def forward(self, x: Tensor) -> Tensor:
        return self.cells(x[:, :, None])[1][0]


class Packed(nn.Module):
    """An LSTM over packed sequences of three or all numbers of a sample."""

    def __init__(self, inside: int, outside: int) -> None:
        super().__init__()
        self.cells = nn.LSTM(1, outside, batch_first=True)

    def forward(self, x: Tensor) -> Tensor:
        lengths = torch.where(x[:, 0] > 0, 3, x.shape[1])
        packed = nn.utils.rnn.pack_padded_sequence(x[:, :, None], lengths, batch_first=True, enforce_sorted=False)
        return self.cells(packed)[1][0][0]


class Empty(nn.Linear):
    """A parameter and a buffer without numbers."""

    def __init__(self, inside: int, outside: int) -> None:
        super().__init__(inside, outside)
        self.nothing = nn.Parameter(torch.zeros(0, inside))
        self.register_buffer("none", torch.zeros(0))

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x) + self.nothing.sum()


class Spare(nn.Linear):
    """A layer beside it that no sample uses."""

    def __init__(self, inside: int, outside: int) -> None:
        super().__init__(inside, outside)
        self.spare = nn.Linear(inside, outside)


class Instances(nn.Sequential):
    """A norm of each sample that learns running statistics."""

    def __init__(self, inside: int, _: int) -> None:
        norm = nn.InstanceNorm1d(4, affine=True, track_running_stats=True)
        super().__init__(nn.Unflatten(1, (4, inside // 4)), norm, nn.Flatten())


class Momentum(nn.Linear):
    """A second layer that does not learn, and in each forward follows this one, as MoCo's encoder of keys."""

    def __init__(self, inside: int, outside: int) -> None:
        super().__init__(inside, outside)
        self.keys = nn.Linear(inside, outside).requires_grad_(False)

    def forward(self, x: Tensor) -> Tensor:
        if self.training:
            with torch.no_grad():
                self.keys.weight.lerp_(self.weight, 0.01)
        return super().forward(x) + self.keys(x)


class Attending(nn.Module):
    """Attention among the numbers of a sample, with a mask and a padded place."""

    def __init__(self, inside: int, outside: int) -> None:
        super().__init__()
        self.up, self.heads = nn.Linear(1, 8), nn.MultiheadAttention(8, 2, batch_first=True)
        self.down = nn.Linear(8, outside)

    def forward(self, x: Tensor) -> Tensor:
        y = self.up(x[:, :, None])
        away = torch.zeros(x.shape, dtype=torch.bool)
        away[:, -1] = True
        return self.down(self.heads(y, y, y, key_padding_mask=away, need_weights=False)[0].mean(1))


class Chosen(nn.Module):
    """Each sample goes to the expert with the highest score, times that score: some experts may have none."""

    def __init__(self, inside: int, outside: int) -> None:
        super().__init__()
        self.gate, self.experts = nn.Linear(inside, 4), nn.Parameter(torch.randn(4, inside, outside) / inside**0.5)

    def forward(self, x: Tensor) -> Tensor:
        score, which = self.gate(x).softmax(-1).max(-1)
        return score[:, None] * torch.bmm(x[:, None], self.experts[which])[:, 0]


class Steps(nn.Linear):
    """It counts in a buffer, which checkpoints keep, and divides by what it counted."""

    def __init__(self, inside: int, outside: int) -> None:
        super().__init__(inside, outside)
        self.steps: Tensor
        self.register_buffer("steps", torch.zeros((), dtype=torch.int64))

    def forward(self, x: Tensor) -> Tensor:
        if self.training:
            self.steps += 1
        return super().forward(x) / (1 + 0.1 * self.steps)


class Frequencies(nn.Module):
    """The strengths of the frequencies of a sample, each with a weight."""

    def __init__(self, inside: int, outside: int) -> None:
        super().__init__()
        self.weight, self.out = nn.Parameter(torch.ones(inside // 2 + 1)), nn.Linear(inside // 2 + 1, outside)

    def forward(self, x: Tensor) -> Tensor:
        return self.out(self.weight * torch.fft.rfft(x).abs().log1p())


class Unrolled(nn.Module):
    """A fixed point: the same step until it is near, at most ten times, as many for all samples."""

    def __init__(self, inside: int, outside: int) -> None:
        super().__init__()
        self.step = parametrizations.spectral_norm(nn.Linear(outside, outside), n_power_iterations=5)
        self.inward = nn.Linear(inside, outside)

    def forward(self, x: Tensor) -> Tensor:
        z, given = torch.zeros_like(x), self.inward(x)
        for _ in range(4):
            z = torch.tanh(0.5 * self.step(z) + given)
        return z


class Merging(nn.Linear):
    """A layer with a LoRA beside it, which is added to the weight in evaluation mode and taken out again."""

    def __init__(self, inside: int, outside: int) -> None:
        super().__init__(inside, outside)
        self.down, self.up = nn.Linear(inside, 2, bias=False), nn.Linear(2, outside, bias=False)

    @torch.no_grad()
    def train(self, mode: bool = True) -> Merging:
        if mode != self.training:
            self.weight.add_(self.up.weight @ self.down.weight, alpha=-1 if mode else 1)
        return super().train(mode)

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x) + (self.up(self.down(x)) if self.training else 0)


class Calls(nn.Linear):
    """It counts its calls, of which a step has as many as micro-batches. This is wrong."""

    calls = 0

    def forward(self, x: Tensor) -> Tensor:
        self.calls += self.training
        return super().forward(x) * (1 + 1e-3 * self.calls)


class Adapted(nn.Linear):
    """It counts the samples of evaluations, which each rank has others of. This is wrong."""

    seen = 0

    def forward(self, x: Tensor) -> Tensor:
        self.seen += 0 if self.training else len(x)
        return super().forward(x) * (1 + 1e-3 * self.seen)


RIGHT: dict[str, Callable[[int, int], nn.Module]] = {
    "weight_norm": lambda inside, outside: parametrizations.weight_norm(nn.Linear(inside, outside)),
    "spectral_norm": lambda inside, outside: parametrizations.spectral_norm(nn.Linear(inside, outside)),
    "orthogonal": lambda inside, outside: parametrizations.orthogonal(nn.Linear(inside, outside)),
    "complex": Complex,
    "twice": Twice,
    "gru": Recurrent,
    "packed": Packed,
    "empty": Empty,
    "spare": Spare,
    "instance_norm": Instances,
    "momentum": Momentum,
    "attending": Attending,
    "top_one": Chosen,
    "steps": Steps,
    "frequencies": Frequencies,
    "fixed_point": Unrolled,
    "merging": Merging,
}
COUNTING: dict[str, Callable[[int, int], nn.Module]] = {"calls": Calls, "adapted": Adapted}
