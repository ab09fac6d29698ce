"""What all programs have in common: networks, data, loss, optimizer, and the clock that reads the time of each step."""

from __future__ import annotations

import json
import os
import resource
import time
from dataclasses import asdict, dataclass
from itertools import pairwise
from pathlib import Path
from statistics import median
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.optim.optimizer import Optimizer, register_optimizer_step_post_hook
from torch.utils.data import DataLoader, DistributedSampler, RandomSampler, TensorDataset

FEW = 1000  # numbers; every network below has more


@dataclass(frozen=True)
class Work:
    """One workload. Of `overhead` the others get their batches made beforehand; of the rest through a DataLoader."""

    name: str
    steps: int
    batch: int  # samples of one process in a step
    ranks: int = 1

    def __str__(self) -> str:
        return self.name + (f", ddp on {self.ranks}" if self.ranks > 1 else "")

    @classmethod
    def asked(cls) -> Work:
        """What this process is to do, as the one that started it says."""
        return cls(**json.loads(os.environ["BENCH_WORK"]))

    def words(self) -> str:
        """The same, for the environment of a process."""
        return json.dumps(asdict(self))

    @property
    def eval_batch(self) -> int:
        """Samples of one process in a batch of the evaluation."""
        return self.batch if self.name.startswith("overhead") else 2 * self.batch


class GPT(nn.Module):
    """A decoder of 0.9 million parameters over 256 tokens."""

    def __init__(self) -> None:
        super().__init__()
        self.tokens, self.positions = nn.Embedding(256, 128), nn.Embedding(128, 128)
        block = nn.TransformerEncoderLayer(128, 4, 512, dropout=0, activation="gelu", batch_first=True, norm_first=True)
        self.blocks, self.head = nn.TransformerEncoder(block, 4, enable_nested_tensor=False), nn.Linear(128, 256)
        self.register_buffer("mask", nn.Transformer.generate_square_subsequent_mask(128), persistent=False)

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.tokens(tokens) + self.positions.weight  # (B, 128, 128): samples, tokens, width
        return self.head(self.blocks(x, mask=self.mask, is_causal=True))


def network(work: Work) -> nn.Module:
    """The network of a workload, always with the same values."""
    torch.manual_seed(0)
    if work.name == "gpt":
        return GPT()
    if work.name == "resnet18":
        from torchvision.models import resnet18

        made = resnet18(num_classes=10)
        made.conv1, made.maxpool = nn.Conv2d(3, 64, 3, 1, 1, bias=False), nn.Identity()  # for 32×32 pixels
        return made
    return nn.Sequential(nn.Linear(64, 64), nn.ReLU(), nn.Linear(64, 10))


def optimizer(work: Work, parameters: Any) -> torch.optim.Optimizer:
    """As people make one; compare.py says the same in words."""
    if work.name == "gpt":
        return torch.optim.AdamW(parameters, lr=3e-4)
    return torch.optim.SGD(parameters, lr=0.01, momentum=0.9)


def loss(output: Tensor, target: Tensor) -> Tensor:
    """Cross entropy over classes or tokens."""
    return F.cross_entropy(output.flatten(0, -2), target.flatten())


def tensors(work: Work) -> list[tuple[Tensor, Tensor]]:
    """(inputs, targets) in memory: as many as training needs, and those of the evaluation."""
    generator = torch.Generator().manual_seed(1)

    def draw(count: int) -> tuple[Tensor, Tensor]:
        if work.name == "gpt":
            text = torch.randint(256, (count, 129), generator=generator)
            return text[:, :-1].contiguous(), text[:, 1:].contiguous()
        if work.name == "resnet18":
            return torch.randn(count, 3, 32, 32, generator=generator), torch.randint(10, (count,), generator=generator)
        x = torch.randn(count, 64, generator=generator)
        return x, x[:, :10].argmax(1)

    evaluated = (500 if work.name.startswith("overhead") else 4) * work.eval_batch * work.ranks
    return [draw(work.steps * work.batch * work.ranks), draw(evaluated)]


@torch.no_grad()
def evaluate(model: nn.Module, batches: DataLoader) -> Tensor:
    """How many are right, and of how many: as people write it."""
    right, seen = 0, 0
    model.eval()
    for x, y in batches:
        right += int((model(x).argmax(-1) == y).sum())
        seen += y.numel()
    return torch.tensor([right, seen])


def loaders(work: Work, distributed: bool = False) -> list[DataLoader]:
    """DataLoaders of training and evaluation. `distributed`: with a sampler that cuts them for the ranks."""
    sets: list[Any]
    if work.name == "overhead":
        rank = int(os.environ.get("RANK", "0"))
        sets = [list(zip(x.split(work.batch), y.split(work.batch), strict=True)) for x, y in tensors(work)]
        return [DataLoader(batches[rank :: work.ranks], batch_size=None) for batches in sets]
    sets = [TensorDataset(*pair) for pair in tensors(work)]
    samplers: list[Any] = [RandomSampler(sets[0], generator=torch.Generator().manual_seed(0)), None]
    if distributed:
        samplers = [DistributedSampler(sets[0]), DistributedSampler(sets[1], shuffle=False)]
    triples = zip(sets, (work.batch, work.eval_batch), samplers, strict=True)
    return [DataLoader(each, size, sampler=how) for each, size, how in triples]


class Clock:
    """Reads the time after each step of any optimizer of this process."""

    def __init__(self, steps: int) -> None:
        self._steps = steps  # that count
        self._walls: list[float] = []  # seconds, at the end of each step
        self._young = min(20, steps // 4)  # steps that do not count: caches fill, files are opened
        # of this process, all threads: hardly moves when others use the machine. Read twice: it may take 40 µs
        self._cpus: list[float] = []
        register_optimizer_step_post_hook(self._tick)

    def _tick(self, optimizer: Optimizer, *_: Any) -> None:
        # ours tries an optimizer on a few numbers before it starts: no step of the network
        if sum(parameter.numel() for group in optimizer.param_groups for parameter in group["params"]) > FEW:
            self.read()

    def read(self) -> None:
        """A step ends; or, before an evaluation, what is not part of it."""
        if not self._walls:
            self._first, self._first_cpu = time.time(), time.process_time()
        self._walls.append(time.perf_counter())
        if len(self._walls) in (self._young + 1, self._steps):
            self._cpus.append(time.process_time())

    @property
    def over(self) -> bool:
        """Have all steps been done?"""
        return len(self._walls) == self._steps

    def report(self, batches: int, accuracy: float) -> None:
        """The evaluation of so many batches is over: leave the figures, on rank 0."""
        evaluation = time.perf_counter() - self._walls[-1]
        if int(os.environ.get("RANK", "0")):
            return
        walls = self._walls[self._young : self._steps]
        figures = {
            "first": self._first - float(os.environ["BENCH_START"]),  # seconds from the command to the first step
            "first_cpu": self._first_cpu,  # seconds of the processors, all threads; other work adds less to them
            "step": 1e6 * median(after - before for before, after in pairwise(walls)),  # microseconds
            "cpu": 1e6 * (self._cpus[-1] - self._cpus[0]) / (len(walls) - 1),  # microseconds, the mean
            "evaluation": 1e6 * evaluation / batches,  # microseconds a batch
            "memory": resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024,  # MiB at most
            "accuracy": accuracy,
        }
        Path(os.environ["BENCH_RESULT"]).write_text(json.dumps(figures))
