"""Networks, data and tasks small enough to prove a strategy with, and one run of them."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import Any, Literal, Self

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from tests.strategies import sequences
from trainer import Data, Plan, Task, gather
from trainer.data.dataset_reader import LoaderOptions
from trainer.data.loader import EvalLoader, TrainLoader, digest_indices
from trainer.data.sampler import RankSampler
from trainer.launch.rendezvous import Launch
from trainer.learning.freezing import freeze
from trainer.learning.muon import Muon
from trainer.learning.optimizer import find_roles, parameter_groups
from trainer.loop.evaluation import evaluate
from trainer.parallel.device_mesh import to_local
from trainer.parallel.meta_model import all_in_state_dict
from trainer.records.checkpoint.manager import CheckpointManager
from trainer.strategies.base import Strategy
from trainer.strategies.ddp import DDP
from trainer.strategies.dp import DP
from trainer.strategies.fsdp import FSDP
from trainer.strategies.machine import Machine
from trainer.strategies.mesh import mesh
from trainer.strategies.pp import PP
from trainer.strategies.single import Single
from trainer.strategies.tp import TP
from trainer.strategies.zero1 import Zero1

STRATEGIES: dict[str, Callable[..., Strategy]] = {
    "single": Single,
    "dp": DP,
    "ddp": DDP,
    "tp": TP,
    "ddp_tp": partial(TP, replicate=None),
    "cp": partial(TP, context=None, tensor=1),
    "ddp_cp": partial(TP, replicate=None, context=2, tensor=1),
    "fsdp": FSDP,
    "zero1": Zero1,
    "pp": PP,
    "mesh": mesh,
}
WIDTH, CLASSES, BATCH = 12, 4, 48


class Net(nn.Module):
    """Two cut layers, a whole norm between them and an unplanned head; no dropout, no batch statistics."""

    def __init__(self, dropout: float = 0.0) -> None:
        super().__init__()
        self.up = nn.Linear(WIDTH, 24)
        self.down = nn.Linear(24, WIDTH)
        self.norm = nn.LayerNorm(WIDTH)
        self.dropout = nn.Dropout(dropout)
        self.head = nn.Linear(WIDTH, CLASSES)
        self.register_buffer("scale", torch.ones(1))

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.dropout(self.norm(x + self.down(F.gelu(self.up(x)))))) * self.scale

    def plan(self) -> Plan:
        from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel

        return Plan(tensor={"up": ColwiseParallel(), "down": RowwiseParallel()})


class Block(nn.Module):
    """What a transformer repeats, but for its attention: a mask says who sees whom."""

    def __init__(self, width: int, dropout: float) -> None:
        super().__init__()
        self.norm, self.up = nn.LayerNorm(width), nn.Linear(width, 2 * width)
        self.down, self.dropout = nn.Linear(2 * width, width), nn.Dropout(dropout)

    def forward(self, hidden: Tensor, *, mask: Tensor) -> tuple[Tensor, Tensor]:
        return hidden + self.dropout(self.down(F.gelu(self.up(mask @ self.norm(hidden))))), mask


class Blocks(nn.Module):
    """A network as people write it: a len(), a type that is asked for, a train() of its own."""

    def __init__(self, depth: int = 4, dropout: float = 0.0) -> None:
        super().__init__()
        self.embed = nn.Linear(1, 8)
        self.place = nn.Parameter(torch.linspace(-1, 1, 8))
        self.blocks = nn.ModuleList(Block(8, dropout) for _ in range(depth))
        self.norm, self.head = nn.LayerNorm(8), nn.Linear(8, CLASSES)
        self.scale: Tensor
        self.register_buffer("scale", torch.tensor(2.0), persistent=False)
        self.spare = nn.Linear(3, 3)  # nobody calls it

    def train(self, mode: bool = True) -> Self:
        super().train(mode)
        self.blocks[-1].eval()  # as those do that keep a part frozen
        return self

    def begin(self, x: Tensor) -> Tensor:
        """(B, WIDTH) to (B, WIDTH, 8)."""
        return self.embed(x[..., None]) + self.place

    def through(self, hidden: Tensor, x: Tensor) -> Tensor:
        size = len(hidden[0])
        mask = (
            hidden.new_ones(size, size).tril() * (x > -1)[:, None] / size
        )  # (B, WIDTH, WIDTH), of every batch another
        for block in self.blocks:
            hidden, mask = block(hidden, mask=mask) if isinstance(hidden, Tensor) else (hidden, mask)
        return hidden

    def end(self, hidden: Tensor) -> Tensor:
        return self.head(self.norm(hidden[:, -1] * self.scale))

    def forward(self, x: Tensor) -> Tensor:
        return self.end(self.through(self.begin(x), x))

    def plan(self) -> Plan:
        from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel

        return Plan(tensor={"blocks.*.up": ColwiseParallel(), "blocks.*.down": RowwiseParallel()})


class Routed(Net):
    """A layer that only some samples use: some ranks have no gradient for it."""

    def __init__(self) -> None:
        super().__init__()
        self.rare = nn.Linear(WIDTH, CLASSES)

    def forward(self, x: Tensor) -> Tensor:
        y, some = super().forward(x), x[:, 0] > 1.8
        return y + torch.where(some[:, None], self.rare(x), 0.0) if bool(some.any()) else y


class Activated(nn.BatchNorm1d):
    """A BatchNorm that does more, as timm's do."""

    def forward(self, x: Tensor) -> Tensor:
        return F.relu(super().forward(x))


class BatchNormNet(nn.Sequential):
    def __init__(self) -> None:
        super().__init__(nn.Linear(WIDTH, 16), Activated(16), nn.Linear(16, CLASSES))


class SequenceNet(nn.Module):
    """A norm on cut sequences, and a head whose output stays cut by class. x: (B, WIDTH) read as (B, 6, 2).

    Dropout is given whole tensors, local parts and DTensors of cut sequences, and parts that are cut by channel.
    """

    def __init__(self, dropout: float = 0.0) -> None:
        super().__init__()
        self.dropout = nn.Dropout(dropout)
        self.embed = nn.Linear(2, 8)
        self.norm = nn.LayerNorm(8)
        self.up = nn.Linear(8, 16)
        self.down = nn.Linear(16, 8)
        self.last = nn.LayerNorm(8)
        self.head = nn.Linear(8, CLASSES)

    def forward(self, x: Tensor) -> Tensor:
        x = self.norm(self.dropout(self.embed(x.unflatten(1, (6, 2)))))
        y = self.dropout(self.down(self.dropout(F.gelu(self.up(self.dropout(x))))))
        return self.head(self.dropout(self.last(x + y)))

    def plan(self) -> Plan:
        from torch.distributed.tensor import Replicate, Shard
        from torch.distributed.tensor.parallel import (
            ColwiseParallel,
            PrepareModuleOutput,
            RowwiseParallel,
            SequenceParallel,
        )

        return Plan(
            tensor={
                "embed": PrepareModuleOutput(output_layouts=Replicate(), desired_output_layouts=Shard(1)),
                "norm": SequenceParallel(use_local_output=False),
                "up": ColwiseParallel(input_layouts=Shard(1)),
                "down": RowwiseParallel(output_layouts=Shard(1), use_local_output=False),
                "last": SequenceParallel(),
                "head": ColwiseParallel(input_layouts=Shard(1), output_layouts=Shard(-1), use_local_output=False),
            }
        )


class DrawingBlock(nn.Module):
    """Dropout on what tensor ranks have parts of, in attention there, and on what all have; stochastic depth; noise."""

    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(WIDTH, 24), nn.Linear(24, WIDTH)
        self.dropout = nn.Dropout(0.2)

    def forward(self, x: Tensor) -> Tensor:
        heads = self.dropout(torch.tanh(self.up(x))).unflatten(-1, (-1, 4, 1))  # (B, heads, 4, 1)
        heads = F.scaled_dot_product_attention(heads, heads, heads, dropout_p=0.2 * self.training)
        y = self.dropout(self.down(heads.flatten(1)))
        if self.training:
            y = y * x.new_empty(x.shape[0], 1).bernoulli_(0.8) + 0.1 * torch.randn_like(x) * torch.rand(1)
        return x + y


class DrawingNet(nn.Module):
    """Blocks that draw in every way, batch statistics where they are asked for, and a head."""

    def __init__(self, normed: bool = False) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(DrawingBlock() for _ in range(3))
        self.norm = nn.BatchNorm1d(WIDTH) if normed else nn.LayerNorm(WIDTH)
        self.head = nn.Linear(WIDTH, CLASSES)

    def forward(self, x: Tensor) -> Tensor:
        for block in self.blocks:
            x = block(x)
        return self.head(self.norm(x))

    def plan(self) -> Plan:
        from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel

        return Plan({"blocks.*.up": ColwiseParallel(), "blocks.*.down": RowwiseParallel()}, shard=("blocks.*",))


class Foreign(nn.Module):
    """What others have written: batch statistics, stochastic depth, dropout of channels, a transformer with its usual.

    x: (B, WIDTH) read as (B, 3, 2, 2). The transformer has time first, as torch's own by default.
    """

    def __init__(self) -> None:
        from torchvision.models.efficientnet import MBConv, MBConvConfig  # here, because the import takes seconds

        super().__init__()
        layer = nn.TransformerEncoderLayer(8, 2, 16)
        self.begin = nn.Sequential(nn.Conv2d(3, 8, 1), nn.BatchNorm2d(8), nn.SiLU())
        self.conv = MBConv(MBConvConfig(2, 3, 1, 8, 8, 1), 0.3, nn.BatchNorm2d)
        self.channels = nn.Dropout2d(0.2)
        self.encoder = nn.TransformerEncoder(layer, 2, enable_nested_tensor=False)
        self.head = nn.Linear(8, CLASSES)

    def forward(self, x: Tensor) -> Tensor:
        x = self.channels(self.conv(self.begin(x.view(-1, 3, 2, 2))))
        return self.head(self.encoder(x.flatten(2).permute(2, 0, 1)).mean(0))

    def plan(self) -> Plan:
        return Plan(shard=("conv", "encoder.layers.*"), cuts=("encoder",))


NETWORKS: dict[str, Callable[[], nn.Module]] = {
    "net": Net,
    "drawing": DrawingNet,
    "normed": partial(DrawingNet, normed=True),
    "foreign": Foreign,
    "batch_norm": BatchNormNet,
    "sequence": SequenceNet,
    "drawing sequence": partial(SequenceNet, 0.3),
    "dropout": lambda: Net(dropout=0.3),
    "frozen": lambda: freeze(Net(), ["up", "down"]),
    **sequences.NETWORKS,
}


def built(strategy: Strategy, make: Callable[[], nn.Module]) -> nn.Module:
    """A network as a run makes it: whole on the main rank, elsewhere as the strategy wants it."""
    return make() if strategy.machine.launch.is_main else strategy.outline(make)[0]


class Rows:
    """Samples in memory, in whole batches; the target holds the class and whether the sample counts."""

    def __init__(self, size: int, seed: int) -> None:
        generator = torch.Generator().manual_seed(seed)
        self.x = torch.randn(size, WIDTH, generator=generator)
        self.y = (self.x @ torch.randn(WIDTH, CLASSES, generator=generator)).argmax(1)
        self.counts = torch.rand(size, generator=generator) < 0.7

    def __len__(self) -> int:
        return len(self.x)

    def __getitem__(self, index: int) -> Any:
        return self.x[index], (self.y[index], self.counts[index])

    def batch(self, indices: Tensor) -> Any:
        return self.x[indices], (self.y[indices], self.counts[indices])


class ToyData(Data):
    def train(self) -> Any:
        return Rows(220, 1)

    def evaluation(self) -> Any:
        return Rows(101, 2)

    def augment(self, inputs: Any, targets: Any, random: Any, training: bool) -> Any:
        return inputs + (0.1 * random.normal(*inputs.shape) if training else 0.0), targets


class NestedData(ToyData):
    """The same samples, in a dict."""

    def augment(self, inputs: Any, targets: Any, random: Any, training: bool) -> Any:
        x, targets = super().augment(inputs, targets, random, training)
        return {"x": x}, targets


class Plain(Task):
    """Every sample weighs the same."""

    def loss(self, output: Tensor, target: Any) -> Any:
        return F.cross_entropy(output, target[0])

    def metrics(self, output: Tensor, target: Any) -> dict[str, Tensor]:
        cells = target[0] * CLASSES + output.argmax(-1)
        return {
            "confusion": torch.bincount(cells, minlength=CLASSES**2),
            "correct": (output.argmax(-1) == target[0]).sum(),
        }

    def finish(self, totals: dict[str, Tensor]) -> dict[str, float]:
        table = totals["confusion"].view(CLASSES, CLASSES).double()
        macro = (table.diagonal() / table.sum(1).clamp(min=1)).mean()
        mean = totals["loss"] / totals["weight"]
        return {"loss": float(mean), "perplexity": float(mean.exp()), "macro": float(macro)}


class Weighted(Plain):
    """Samples that do not count; how many do differs between micro-batches and ranks."""

    def loss(self, output: Tensor, target: Any) -> Any:
        each = F.cross_entropy(output, target[0], reduction="none") * target[1]
        mean = each.sum() / target[1].sum().clamp(min=1)
        return {"entropy": mean, "decay": 0.1 * mean}

    def weight(self, target: Any) -> Tensor:
        return target[1].sum()


class Steps(Plain):
    """One class for every place of a sequence."""

    def loss(self, output: Tensor, target: Any) -> Any:
        return F.cross_entropy(output.flatten(0, 1), target[0].repeat_interleave(6))

    def metrics(self, output: Tensor, target: Any) -> dict[str, Tensor]:
        return super().metrics(output.mean(1), target)


class Contrast(Plain):
    """Every sample against every other of the global batch."""

    def loss(self, output: Tensor, target: Any) -> Any:
        likeness = gather(output) @ gather(output).T
        return F.cross_entropy(likeness, torch.arange(len(likeness), device=output.device))


class Nested(Plain):
    """Inputs in a dict, of which the network takes one."""

    def forward(self, network: nn.Module, inputs: Any, targets: Any) -> Tensor:
        return network(inputs["x"])


TASKS: dict[str, Callable[[], Task]] = {"nested": Nested, "plain": Plain, "weighted": Weighted, "steps": Steps}
TASKS |= {"contrast": Contrast, **sequences.TASKS}
DATA: dict[str, Callable[[], Data]] = {"nested": NestedData, **sequences.DATA}


@dataclass(frozen=True)
class Case:
    """One run of a toy under a strategy."""

    strategy: str = "single"
    fields: dict[str, Any] = field(default_factory=dict)
    network: str = "net"
    task: str = "plain"
    precision: str = "fp32"
    micro_batches: int = 1
    steps: int = 12  # three epochs
    start: int = 0  # resume from the checkpoint in `folder`, which is of this step
    save: int | None = None  # save to `folder` after this step
    folder: str = ""
    seed: int = 3
    optimizer: str = "adamw"
    batch: int = BATCH
    device: str = "cpu"
    backend: str | None = None
    dropout: Literal["sample", "native"] | None = None
    average: float | None = 0.9  # decay of the weights' moving average
    max_norm: float = 1.0

    def but(self, **changes: Any) -> Case:
        return replace(self, **changes)


def make_optimizer(kind: str) -> Any:
    if kind == "adamw":
        return lambda groups: torch.optim.AdamW(groups, lr=0.01, fused=True)
    if kind == "muon":
        return lambda groups: Muon(groups, lr=0.01, scaling="jordan", adamw_lr=0.003)
    return lambda groups: torch.optim.SGD(groups, lr=0.05, momentum=0.9, fused=True)


def run(launch: Launch, case: Case) -> dict[str, Any]:
    """Train a toy: its losses, gradient norms and sample digests by step, its evaluation, its weights."""
    torch.manual_seed(case.seed)
    task = TASKS[case.task]()
    data = DATA.get(case.task, ToyData)()
    words: dict[str, Any] = {"device": case.device, "precision": case.precision, "backend": case.backend}
    machine = Machine(launch=launch, seed=case.seed, dropout=case.dropout, **words)
    strategy = STRATEGIES[case.strategy](machine=machine, **case.fields)
    strategy.data_ranks(launch.world_size)
    make_network = NETWORKS[case.network]
    # what is read need not be built
    network = strategy.outline(make_network)[0] if case.start else built(strategy, make_network)
    if case.start and not all_in_state_dict(network):
        network = built(strategy, make_network)
    strategy.check(task, network, launch.world_size)
    make = make_optimizer(case.optimizer)
    roles = find_roles(make, network, task.plan(network))
    seen: dict[str, Any] = {"losses": [], "norms": [], "digests": [], "indices": [], "parts": []}
    with strategy:
        stream = TrainLoader(data, data.train(), strategy.slice, case.batch, case.micro_batches, LoaderOptions())
        # of 101 samples the last batch has 2: some of 3 or 4 ranks have none
        evaluation = EvalLoader(data, data.evaluation(), strategy.slice, 33, case.micro_batches, LoaderOptions())
        whole_stream = TrainLoader(data, data.train(), RankSampler(0, 1, torch.device("cpu"), case.seed), case.batch)
        sites = strategy.draw_sites(task, network, whole_stream.example)
        parallel_model = strategy.build(task, network, stream.example())
        parallel_model.rng.learn(sites)
        groups = parameter_groups(parallel_model.network, False, (), roles)
        optimizer = parallel_model.optimizer(make, groups)
        parallel_model.keep_average(case.average, every=2)
        seen["initial"] = {name: whole(value) for name, value in parallel_model.network.state_dict().items()}
        checkpoints = CheckpointManager(Path(case.folder), strategy.world, keep=3) if case.folder else None
        if case.start:
            found = checkpoints.newest()
            assert found is not None
            assert found.step == case.start
            tensors = parallel_model.empty_state(optimizer, found.tensors)
            checkpoints.read(found, tensors)
            parallel_model.load_state(optimizer, tensors)
        copies = strategy.copies(parallel_model.network)
        step, epoch, position = case.start, *divmod(case.start, stream.steps_per_epoch)
        while step < case.steps:
            for batches in stream.epoch(epoch, position * case.batch):
                parts = parallel_model.forward_backward(batches, step)
                norm = parallel_model.optimizer_step(optimizer, case.max_norm)
                parallel_model.after_step(step + 1)
                copies.start(step + 1)
                indices = torch.cat([batch.indices for batch in batches])
                totals = strategy.totals({**parts, "digest": digest_indices(indices)}).read()
                copies.check()  # in every step of every strategy copies hold the same bits
                seen["losses"].append(float(totals["loss"]))
                seen["parts"].append({name: float(value) for name, value in totals.items() if name != "digest"})
                seen["norms"].append(float(norm))
                seen["digests"].append(int(totals["digest"]))
                seen["indices"].append((epoch, indices.tolist()))
                step += 1
                if step == case.save:
                    parallel_model.settle()
                    checkpoints.save(step, parallel_model.state(optimizer), {})
                    parallel_model.unsettle()
                if step == case.steps:
                    break
            epoch, position = epoch + 1, 0
        parallel_model.settle()
        copies.check_before_save(step, parallel_model.state(optimizer))
        before = {name: value.clone() for name, value in parallel_model.network.state_dict().items()}
        seen["figures"] = evaluate(strategy, parallel_model, task, evaluation, lambda: False)
        seen["back"] = all(
            torch.equal(to_local(before[name]), to_local(v)) for name, v in parallel_model.network.state_dict().items()
        )
        seen["averages"] = {name: whole(value) for name, value in parallel_model.average.state().items()}
        seen["data_rank"] = strategy.data_group.rank
        seen["names"] = [name for name, _ in parallel_model.network.named_parameters()]
        seen["state"] = sorted(parallel_model.state(optimizer))
        seen["weights"] = {name: whole(value) for name, value in parallel_model.network.state_dict().items()}
    return seen


def whole(value: Tensor) -> list[Any]:
    """A parameter as nested lists, whoever holds its parts. Collective."""
    return gathered(value).tolist()


def gathered(value: Tensor) -> Any:
    """A parameter as an array, whoever holds its parts: lists of a large one are many times its size. Collective."""
    value = value.detach().cpu()  # first: gloo gathers no shards of a GPU's tensors
    return (value.full_tensor() if isinstance(value, DTensor) else value).numpy()
