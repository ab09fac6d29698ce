"""Mistakes as users make them, in networks, tasks and data: what `job=verify` must find and name.

Each class is right in one process, and wrong in several or with micro-batches.
"""

from __future__ import annotations

import itertools
import random
import time
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.data import Dataset, TensorDataset

from trainer import Data, Schedule, Task

WIDTH, CLASSES, SAMPLES = 12, 4, 96


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


class OwnEps(nn.LayerNorm):
    """A norm with another epsilon on one rank."""

    def forward(self, x: Tensor) -> Tensor:
        return F.layer_norm(x, self.normalized_shape, self.weight, self.bias, 1e-3 if rank() else self.eps)


class PythonRandom(nn.Linear):
    """It draws from Python's generator, which nobody puts back to where a step begins."""

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x) * (1 + 1e-3 * random.random())


class NativeDrop(nn.Linear):
    """Dropout that is no module."""

    def forward(self, x: Tensor) -> Tensor:
        return F.dropout(super().forward(x), 0.1, self.training)


class Centred(nn.Linear):
    """It subtracts the mean of the samples that are there."""

    def forward(self, x: Tensor) -> Tensor:
        y = super().forward(x)
        return y - y.mean(0)


class Chosen(nn.Linear):
    """It chooses by its own samples what it computes."""

    def forward(self, x: Tensor) -> Tensor:
        y = super().forward(x)
        return y if bool(x[0, 0] > x[1, 0]) else 1.01 * y


class ChosenLayer(nn.Module):
    """It chooses by its own samples which of its layers it uses: under fsdp, ranks then gather different ones.

    By way of NumPy, so that no forward on shapes sees that both are used.
    """

    def __init__(self, inside: int, outside: int) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Sequential(nn.Linear(inside, outside)) for _ in range(2))

    def forward(self, x: Tensor) -> Tensor:
        first, second, *_ = x[:, 0].detach().numpy()
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


KINDS: dict[str, Callable[[int, int], nn.Module]] = {
    "own_rank": OwnRank,
    "own_buffer": OwnBuffer,
    "python_random": PythonRandom,
    "native_drop": NativeDrop,
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
    "own_eps": lambda inside, _: OwnEps(inside),
}


def net(kind: str = "") -> nn.Module:
    """The network, with one of these mistakes or none."""
    return Net(KINDS[kind](16, 16) if kind else None)


class ScaledRate(torch.optim.SGD):
    """It multiplies its rate by the number of processes, as large batches would ask for."""

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:
        size = dist.get_world_size() if dist.is_initialized() else 1
        for group in self.param_groups:
            for parameter in (one for one in group["params"] if one.grad is not None):
                parameter.sub_(parameter.grad, alpha=group["lr"] * size)


class Remembering(Schedule):
    """It counts how often it is asked, where no checkpoint keeps it."""

    asked = 0

    def at(self, step: int, epoch: int, progress: float) -> float:
        self.asked += 1
        return 1.0 / self.asked


class Numbers(Data):
    """Right everywhere."""

    def train(self) -> Any:
        x = torch.randn(SAMPLES, WIDTH, generator=torch.Generator().manual_seed(1))
        return TensorDataset(x, x[:, :CLASSES].argmax(1))

    def evaluation(self) -> Any:
        return self.train()


class Counting(TensorDataset):
    """An item depends on how many this process has read before it."""

    read = itertools.count()

    def __getitem__(self, index: int) -> Any:
        x, y = super().__getitem__(index)
        return x + 1e-3 * (next(self.read) % 7), y


class Counted(Numbers):
    def train(self) -> Any:
        return Counting(*super().train().tensors)


class Recalling(Numbers):
    """What it does to a batch depends on how many came before."""

    batches = 0

    def augment(self, inputs: Any, targets: Any, random: Any, training: bool) -> Any:
        self.batches += training
        return inputs * (1 + 1e-3 * self.batches), targets


class SameOrder(Numbers):
    """One rank forgets that there is another epoch."""

    def order(self, epoch: int, generator: torch.Generator) -> Tensor:
        drawn = torch.randperm(SAMPLES, generator=generator)
        return drawn.flip(0) if epoch and rank() else drawn


class Scaled(Numbers):
    """A batch is divided by its largest number."""

    def collate(self, items: Any) -> Any:
        x, y = super().collate(items)
        return x / x.abs().max(), y


class Rows(Dataset[Any]):
    """Samples of three to six rows, and what is known of each: a dict, in which not all have the same."""

    def __len__(self) -> int:
        return SAMPLES

    def __getitem__(self, index: int) -> tuple[Tensor, dict[str, Tensor]]:
        rows = torch.randn(3 + index % 4, WIDTH, generator=torch.Generator().manual_seed(index))
        known = {"label": rows.sum(0)[:CLASSES].argmax(), "first": rows[0]}
        return rows, known | ({"odd": rows[1]} if index % 2 else {})


class Listed(Numbers):
    """A batch as torchvision's detection has it: a list of samples, a list of dicts. This is right everywhere."""

    def train(self) -> Any:
        return Rows()

    def collate(self, items: Any) -> Any:
        return tuple(zip(*items, strict=True))


class Read(Listed):
    """A batch in which each sample is what it is times its place among those of its rank."""

    def collate(self, items: Any) -> Any:
        inputs, targets = super().collate(items)
        return tuple(x * (1 + 1e-3 * at) for at, x in enumerate(inputs)), targets


class InDict(Listed):
    """The same, as a dict of lists."""

    def collate(self, items: Any) -> Any:
        inputs, targets = super().collate(items)
        return {"rows": list(inputs), "first": [known["first"] for known in targets]}, targets


class OfRows(Net):
    """The mean of what it computes of each row of a sample."""

    def forward(self, x: Any) -> Tensor:
        return torch.stack(
            [super(OfRows, self).forward(rows).mean(0) for rows in (x if type(x) is tuple else x["rows"])]
        )


class OfDicts(Task):
    """Labels that lie in a list of dicts."""

    def loss(self, output: Tensor, target: Any) -> Tensor:
        return F.cross_entropy(output, torch.stack([known["label"] for known in target]))


class Triples(Numbers):
    """Graphs of three nodes each, which follow each other in a batch. This is right everywhere."""

    def train(self) -> Any:
        x = torch.randn(SAMPLES, 3, WIDTH, generator=torch.Generator().manual_seed(1))
        return TensorDataset(x, x.sum(1)[:, :CLASSES].argmax(1))

    def collate(self, items: Any) -> Any:
        x, labels = super().collate(items)
        first = 3 * torch.arange(len(x))  # (B,): the first node of each
        edges = torch.tensor([[0, 1, 2], [1, 2, 0]])  # a ring
        return {
            "x": x.flatten(0, 1),
            "edges": (edges[:, None] + first[:, None]).flatten(1),  # (2, 3·B)
            "owner": torch.arange(len(x)).repeat_interleave(3),
            "first": first,
        }, labels


class OfNodes(Net):
    """What each node hears of another one, and the mean of each graph."""

    def forward(self, graph: Any) -> Tensor:
        source, target = graph["edges"]
        y = super().forward(graph["x"] + torch.zeros_like(graph["x"]).index_add(0, target, graph["x"][source]))
        return y.new_zeros(len(graph["first"]), CLASSES).index_add(0, graph["owner"], y)


class Classes(Task):
    """Right everywhere."""

    def loss(self, output: Tensor, target: Tensor) -> Tensor:
        return F.cross_entropy(output, target)

    def metrics(self, output: Tensor, target: Tensor) -> dict[str, Tensor]:
        return {"accuracy": (output.argmax(1) == target).sum()}


class Summed(Classes):
    """It divides by the global batch, though it is asked for the mean over its own samples."""

    def loss(self, output: Tensor, target: Tensor) -> Tensor:
        return F.cross_entropy(output, target, reduction="sum") / 24


class Meaned(Classes):
    """A metric that is a mean, though sums are asked for."""

    def metrics(self, output: Tensor, target: Tensor) -> dict[str, Tensor]:
        return {"accuracy": (output.argmax(1) == target).float().mean()}


class OwnDecay(Classes):
    """It changes a weight after each step, on each rank in another way."""

    def after_step(self, network: nn.Module, step: int) -> None:
        network.get_parameter("middle.weight").mul_(1 - 1e-3 * rank())


class Counts(Classes):
    """It counts steps, where no checkpoint keeps it, and its loss depends on them."""

    done = 0

    def after_step(self, network: nn.Module, step: int) -> None:
        self.done += 1

    def loss(self, output: Tensor, target: Tensor) -> Tensor:
        return super().loss(output, target) * (1 + 0.5 * self.done)


class LastDecay(Classes):
    """One rank changes a weight a little, after the last step of a proof."""

    def __init__(self, name: str = "middle.weight") -> None:
        self.name = name

    def after_step(self, network: nn.Module, step: int) -> None:
        if step == 3:
            network.get_parameter(self.name).mul_(1 - 1e-5 * rank())


class LateMetric(Classes):
    """A metric that one rank gets wrong from its third batch on."""

    batches = 0

    def metrics(self, output: Tensor, target: Tensor) -> dict[str, Tensor]:
        self.batches += 1
        return {"accuracy": (output.argmax(1) == target).sum() + (rank() if self.batches > 2 else 0)}
