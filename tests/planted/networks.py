"""Networks with a mistake each, as users make them: right in one process, wrong in several or with micro-batches."""

from __future__ import annotations

import random
import time
from collections.abc import Callable
from typing import Any

import numpy
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn

from tests.planted.kinds import COUNTING, RIGHT

WIDTH, CLASSES = 12, 4


def rank() -> int:
    return dist.get_rank() if dist.is_initialized() else 0


class Net(nn.Module):
    """Right everywhere: what the others are but for one thing. `middle` is where they put it."""

    def __init__(self, middle: nn.Module | None = None) -> None:
        super().__init__()
        self.embed, self.norm = nn.Linear(WIDTH, 16), nn.LayerNorm(16)
        self.middle = middle or nn.Linear(16, 16)
        self.head = nn.Linear(16, CLASSES)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(F.gelu(self.middle(self.norm(self.embed(x)))))


class OwnRank(nn.Linear):
    """It asks which rank it is."""

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x) * (1 + 1e-4 * rank())


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


class OwnField(nn.Linear):
    """The same in a field that is no buffer, as a cache or a center is kept."""

    mean: Tensor | float = 0.0

    def forward(self, x: Tensor) -> Tensor:
        y = super().forward(x - self.mean)
        if self.training:
            self.mean = 0.9 * self.mean + 0.1 * x.detach().mean(0)
        return y


class Mixed(nn.Linear):
    """It mixes each sample with another one of its micro-batch, as a mixup in the forward does."""

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(0.7 * x + 0.3 * x[torch.randperm(len(x))])


class OwnEps(nn.LayerNorm):
    """A norm with another epsilon on one rank."""

    def forward(self, x: Tensor) -> Tensor:
        return F.layer_norm(x, self.normalized_shape, self.weight, self.bias, 1e-3 if rank() else self.eps)


class PythonRandom(nn.Linear):
    """It draws from Python's generator, a number for each of its samples."""

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x) * (1 + 1e-3 * x.new_tensor([random.random() for _ in x])[:, None])


class NumpyRandom(nn.Linear):
    """The same from NumPy's, as masks of spectrograms are drawn."""

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x) * (1 + 1e-3 * x.new_tensor(numpy.random.rand(len(x), 1)))


class OwnGenerator(nn.Linear):
    """The same from a generator that it keeps, which nobody seeds and no checkpoint has."""

    def __init__(self, inside: int, outside: int) -> None:
        super().__init__(inside, outside)
        self.generator = numpy.random.default_rng(0)

    def forward(self, x: Tensor) -> Tensor:
        drawn = x.new_tensor(self.generator.random((len(x), 1))) if self.training else 0.5
        return super().forward(x) * (1 + 1e-3 * drawn)


class NativeDrop(nn.Linear):
    """Dropout that is no module."""

    def forward(self, x: Tensor) -> Tensor:
        return F.dropout(super().forward(x), 0.1, self.training)


class DrawnInTurn(nn.Linear):
    """It draws for one of its samples after the other: no number belongs to a sample."""

    def forward(self, x: Tensor) -> Tensor:
        drawn = [torch.rand(1).item() if self.training else 0.5 for _ in x]
        return super().forward(x) * (1 + 0.1 * x.new_tensor(drawn)[:, None])


class Views(nn.Linear):
    """Dropout of two views of a batch, one behind the other: (2 · B, …), as siamese networks have it. It is right."""

    def forward(self, x: Tensor) -> Tensor:
        y = super().forward(x)
        one, other = F.dropout(torch.cat([y, -y]), 0.1, self.training).chunk(2)
        return one - 0.5 * other


class Centred(nn.Linear):
    """It subtracts the mean of the samples that are there."""

    def forward(self, x: Tensor) -> Tensor:
        y = super().forward(x)
        return y - y.mean(0)


class Chosen(nn.Linear):
    """It chooses by its own samples what it computes."""

    def forward(self, x: Tensor) -> Tensor:
        y = super().forward(x)
        return y if bool(x[0, 0] > x[:2][-1, 0]) else 1.01 * y


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


class _Even(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return x.clone()

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> Tensor:
        return grads[0] / grads[0].norm()


class OwnBackward(nn.Linear):
    """A backward of its own that is not linear in the samples."""

    def forward(self, x: Tensor) -> Tensor:
        return _Even.apply(super().forward(x))


class OwnHook(nn.Linear):
    """A hook that changes a gradient on one rank."""

    def __init__(self, inside: int, outside: int) -> None:
        super().__init__(inside, outside)
        self.weight.register_hook(lambda gradient: gradient * (1 + 1e-3 * rank()))


class OwnSeed(nn.Linear):
    """It begins with numbers that no seed reaches."""

    def reset_parameters(self) -> None:
        nn.init.normal_(self.weight, std=0.2, generator=torch.Generator().manual_seed(time.time_ns() % 2**31))
        nn.init.zeros_(self.bias)


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


class Versioned(nn.Linear):
    """It asks what it loads which version of it that is, as torchvision's MNASNet does. This is right everywhere."""

    _version = 2

    def _load_from_state_dict(self, state: Any, prefix: str, metadata: Any, *rest: Any) -> None:
        if metadata.get("version") != self._version:
            raise ValueError(f"version {metadata.get('version')}")
        super()._load_from_state_dict(state, prefix, metadata, *rest)


class Masked(nn.Linear):
    """It keeps a mask of -inf, as a causal attention does. This is right everywhere."""

    def __init__(self, inside: int, outside: int) -> None:
        super().__init__(inside, outside)
        self.mask: Tensor
        self.register_buffer("mask", torch.full((outside, outside), float("-inf")).triu(1))

    def forward(self, x: Tensor) -> Tensor:
        y = super().forward(x)
        return y + (y[:, :, None] * y[:, None] + self.mask).softmax(-1).sum(1)


class Narrow(nn.Linear):
    """It makes a tensor of one precision, as if there were no other. In that one it is right everywhere."""

    def forward(self, x: Tensor) -> Tensor:
        y = super().forward(x)
        return torch.zeros(y.shape, dtype=torch.float32).index_add(0, torch.arange(len(y)), y)


class NarrowRank(Narrow):
    """The same, and it asks which rank it is."""

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x) * (1 + 1e-3 * rank())


class LowRank(nn.Linear):
    """A layer with a LoRA beside it: the first gradient of what goes down is exactly 0."""

    def __init__(self, inside: int, outside: int) -> None:
        super().__init__(inside, outside)
        self.down, self.up = nn.Linear(inside, 2, bias=False), nn.Linear(2, outside, bias=False)
        nn.init.zeros_(self.up.weight)

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x) + self.up(self.down(x))


class Places(nn.Linear):
    """It keeps a buffer of large numbers, which nothing changes."""

    def __init__(self, inside: int, outside: int) -> None:
        super().__init__(inside, outside)
        self.register_buffer("places", torch.arange(200000.0))


class Experts(nn.Module):
    """Two experts, of which each sample is sent to one. This is right everywhere."""

    def __init__(self, inside: int, outside: int) -> None:
        super().__init__()
        self.experts = nn.ModuleList(nn.Linear(inside, outside) for _ in range(2))

    def forward(self, x: Tensor) -> Tensor:
        first, second = (expert(x) for expert in self.experts)
        return torch.where(x[:, :1] > 0, first, second)


KINDS: dict[str, Callable[[int, int], nn.Module]] = {
    **RIGHT,
    **COUNTING,
    "own_rank": OwnRank,
    "own_buffer": OwnBuffer,
    "own_field": OwnField,
    "mixed": Mixed,
    "python_random": PythonRandom,
    "numpy_random": NumpyRandom,
    "own_generator": OwnGenerator,
    "native_drop": NativeDrop,
    "drawn_in_turn": DrawnInTurn,
    "views": Views,
    "centred": Centred,
    "chosen": Chosen,
    "chosen_layer": ChosenLayer,
    "own_backward": OwnBackward,
    "own_hook": OwnHook,
    "own_seed": OwnSeed,
    "unsaved": Unsaved,
    "versioned": Versioned,
    "masked": Masked,
    "low_rank": LowRank,
    "places": Places,
    "narrow": Narrow,
    "narrow_rank": NarrowRank,
    # the first layer of a unit changes what it is given; torchvision's EfficientNet ends like that, and is right
    "in_place": lambda inside, outside: nn.Sequential(nn.Dropout(0.2, inplace=True), nn.Linear(inside, outside)),
    "batch_norm": lambda inside, _: nn.BatchNorm1d(inside),
    "experts": Experts,
    "own_eps": lambda inside, _: OwnEps(inside),
}


def net(kind: str = "") -> nn.Module:
    """The network, with one of these mistakes or none."""
    return Net(KINDS[kind](16, 16) if kind else None)
