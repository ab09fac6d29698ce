"""A network whose middle layer is of any kind: some are wrong in several processes, the others right everywhere."""

from __future__ import annotations

import random
import time
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.utils import parametrizations

WIDTH, CLASSES = 12, 4


def rank() -> int:
    return dist.get_rank() if dist.is_initialized() else 0


class Net(nn.Module):
    """Right everywhere, but for its middle."""

    def __init__(self, kind: str = "linear") -> None:
        super().__init__()
        self.embed, self.norm = nn.Linear(WIDTH, 16), nn.LayerNorm(16)
        self.middle, self.head = KINDS[kind](16, 16), nn.Linear(16, CLASSES)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(F.gelu(self.middle(self.norm(self.embed(x)))))


class OfPadded(Net):
    """The mean over the rows of a sample, padded ones among them."""

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x).mean(1)


class OfRows(Net):
    """The mean of what it computes of each row of a sample, of a list of samples."""

    def forward(self, x: Any) -> Tensor:
        return torch.stack([super(OfRows, self).forward(rows).mean(0) for rows in x["rows"]])


class OfNodes(Net):
    """What each node hears of another one, and the mean of each graph."""

    def forward(self, graph: Any) -> Tensor:
        source, target = graph["edges"]
        y = super().forward(graph["x"] + torch.zeros_like(graph["x"]).index_add(0, target, graph["x"][source]))
        return y.new_zeros(len(graph["first"]), CLASSES).index_add(0, graph["owner"], y)


# --- layers with a mistake each ---


class OwnRank(nn.Linear):
    """It asks which rank it is."""

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x) * (1 + 1e-4 * rank())


class OwnSeed(nn.Linear):
    """It begins with numbers that no seed reaches."""

    def reset_parameters(self) -> None:
        nn.init.normal_(self.weight, std=0.2, generator=torch.Generator().manual_seed(time.time_ns() % 2**31))
        nn.init.zeros_(self.bias)


class PythonRandom(nn.Linear):
    """It draws from Python's generator, a number for each of its samples."""

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x) * (1 + 1e-3 * x.new_tensor([random.random() for _ in x])[:, None])


class Drop(nn.Linear):
    """Dropout that is no module; with torch's own numbers it is wrong."""

    def forward(self, x: Tensor) -> Tensor:
        return F.dropout(super().forward(x), 0.1, self.training)


class Centred(nn.Linear):
    """It subtracts the mean of the samples that are there."""

    def forward(self, x: Tensor) -> Tensor:
        y = super().forward(x)
        return y - y.mean(0)


class ChosenLayer(nn.Module):
    """It chooses by its own samples which of its layers it uses: under fsdp, ranks then gather different ones.

    By way of NumPy, so that no forward on shapes sees that both are used.
    """

    def __init__(self, inside: int, outside: int) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Sequential(nn.Linear(inside, outside)) for _ in range(2))

    def forward(self, x: Tensor) -> Tensor:
        first, second = x[:2][[0, -1], 0].detach().numpy()
        return self.layers[int(first > second)](x)


class OwnBuffer(nn.Linear):
    """It keeps the mean of what it has seen, each rank of its own samples."""

    def __init__(self, inside: int, outside: int) -> None:
        super().__init__(inside, outside)
        self.mean: Tensor
        self.register_buffer("mean", torch.zeros(inside))

    def forward(self, x: Tensor) -> Tensor:
        y = super().forward(x - self.mean)
        if self.training:
            self.mean.lerp_(x.detach().mean(0), 0.1)
        return y


class Unsaved(nn.Linear):
    """It counts its calls where no checkpoint keeps them."""

    def __init__(self, inside: int, outside: int) -> None:
        super().__init__(inside, outside)
        self.seen: Tensor
        self.register_buffer("seen", torch.zeros(()), persistent=False)

    def forward(self, x: Tensor) -> Tensor:
        if self.training:
            self.seen += 1
        return super().forward(x) * (1 + 1e-3 * self.seen)


class Adapted(nn.Linear):
    """It counts the samples of evaluations, of which each rank has others."""

    seen = 0

    def forward(self, x: Tensor) -> Tensor:
        self.seen += 0 if self.training else len(x)
        return super().forward(x) * (1 + 1e-3 * self.seen)


# --- layers that are right everywhere ---


class Complex(nn.Module):
    """A complex weight."""

    def __init__(self, inside: int, outside: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(outside, inside, dtype=torch.complex64) / inside**0.5)

    def forward(self, x: Tensor) -> Tensor:
        return F.linear(x.to(self.weight.dtype), self.weight).abs()


class Versioned(nn.Linear):
    """It asks what it loads which version of it that is, as torchvision's MNASNet does."""

    _version = 2

    def _load_from_state_dict(self, state: Any, prefix: str, metadata: Any, *rest: Any) -> None:
        if metadata.get("version") != self._version:
            raise ValueError(f"version {metadata.get('version')}")
        super()._load_from_state_dict(state, prefix, metadata, *rest)


class Masked(nn.Linear):
    """It keeps a mask of -inf, as a causal attention does."""

    def __init__(self, inside: int, outside: int) -> None:
        super().__init__(inside, outside)
        self.mask: Tensor
        self.register_buffer("mask", torch.full((outside, outside), float("-inf")).triu(1))

    def forward(self, x: Tensor) -> Tensor:
        y = super().forward(x)
        return y + (y[:, :, None] * y[:, None] + self.mask).softmax(-1).sum(1)


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


def _odd(inside: int, outside: int) -> nn.Module:
    """Much that is out of the ordinary, one behind the other."""
    norm = nn.InstanceNorm1d(4, affine=True, track_running_stats=True)
    return nn.Sequential(
        nn.Sequential(nn.Dropout(0.2, inplace=True), Versioned(inside, inside)),  # it changes what it is given
        Masked(inside, inside),
        Empty(inside, inside),
        Packed(inside, inside),
        nn.Unflatten(1, (4, inside // 4)),
        norm,
        nn.Flatten(),
        parametrizations.orthogonal(nn.Linear(inside, outside)),
    )


KINDS: dict[str, Any] = {
    "linear": nn.Linear,
    "own_rank": OwnRank,
    "own_seed": OwnSeed,
    "python_random": PythonRandom,
    "drop": Drop,
    "centred": Centred,
    "batch_norm": lambda inside, _: nn.BatchNorm1d(inside),
    "chosen_layer": ChosenLayer,
    "own_buffer": OwnBuffer,
    "unsaved": Unsaved,
    "adapted": Adapted,
    "complex": Complex,
    "masked": Masked,
    "spare": Spare,
    "odd": _odd,
}
