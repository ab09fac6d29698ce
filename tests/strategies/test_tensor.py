"""Tensor parallelism's words before it starts, and its watch over what is not cut."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel

from tests.processes import Processes
from tests.strategies.toys import CLASSES, WIDTH, Net, Plain, Rows, ToyData, make_optimizer, whole
from trainer import Plan, Task
from trainer.data.dataset_reader import LoaderOptions
from trainer.data.loader import TrainLoader
from trainer.launch.rendezvous import Launch
from trainer.messages import Refusal
from trainer.strategies.machine import Machine
from trainer.strategies.tp import TP


class Planned(Net):
    def __init__(self, plan: Plan) -> None:
        super().__init__()
        self._plan = plan

    def plan(self) -> Plan:
        return self._plan


class Sparse(Net):
    def __init__(self) -> None:
        super().__init__()
        self.bag = nn.EmbeddingBag(4, 4, sparse=True)


@pytest.mark.parametrize(
    ("network", "degree", "said"),
    [
        (nn.Linear(3, 3), 2, ["Linear has no tensor-parallel plan", "strategy=ddp"]),
        (Planned(Plan(tensor={"upp": ColwiseParallel()})), 2, ["'upp' matches no module", "did you mean 'up'"]),
        (Planned(Plan(tensor={"up": ColwiseParallel()})), 5, ["up.out_features 24 / 5", "1, 2, 3, 4, 6"]),
        (Planned(Plan(tensor={"down": RowwiseParallel()})), 7, ["down.in_features 24 / 7", "strategy=ddp"]),
        (Planned(Plan(tensor={"norm": ColwiseParallel()})), 2, ["norm, a LayerNorm", "only Linear and Embedding"]),
        (Planned(Plan(tensor={"up": ColwiseParallel()}, divisible={"heads": 3})), 2, ["3 heads / 2", "1, 3"]),
        (Sparse(), 2, ["strategy=tp sends dense gradients", "bag"]),
    ],
)
def test_what_cannot_be_cut_is_refused_before_it_starts(network: nn.Module, degree: int, said: list[str]) -> None:
    with pytest.raises(Refusal) as refused:
        TP().check(Task(), network, degree)
    assert all(part in str(refused.value) for part in said), str(refused.value)


def test_wildcards_stand_within_one_level() -> None:
    deep = nn.Sequential(nn.Sequential(nn.Linear(4, 4)), nn.Linear(4, 4))
    TP().check(_Says({"*.0": ColwiseParallel()}), deep, 2)
    with pytest.raises(Refusal, match="matches no module"):
        TP().check(_Says({"*.*.0": ColwiseParallel()}), deep, 2)


class _Says(Task):
    """A task that says how a network of others is cut."""

    def __init__(self, styles: dict[str, Any]) -> None:
        self._styles = styles

    def plan(self, network: nn.Module) -> Plan:
        return Plan(tensor=self._styles)


def test_processes_that_make_up_no_whole_copies_are_refused_with_degrees_that_do() -> None:
    with pytest.raises(Refusal, match=r"4 processes / \(strategy.tensor 3 = 3\) is not whole; nearest: .*tensor=4, or"):
        TP(replicate=None, tensor=3).data_ranks(4)


def drifting(launch: Launch) -> tuple[bool, str]:
    """Build from unequal weights, then let one rank's norm drift."""
    torch.manual_seed(launch.rank)  # a network that was not seeded: rank 0's weights must become everyone's
    with TP(machine=Machine(launch=launch, device="cpu")) as strategy:
        network = Net()
        parallel_model = strategy.build(Task(), network, None)
        first = network.head.weight.detach().clone()
        shared = strategy.world.all_gather(first)
        with torch.no_grad():
            network.norm.weight[0] += 0.1 * launch.rank
            network.head.weight[0] += 1e-6 * launch.rank  # what rounding adds up to is no drift
        try:
            parallel_model.state(
                parallel_model.optimizer(
                    torch.optim.SGD, [{"params": list(parallel_model.network.parameters()), "lr": 0.1}]
                )
            )
        except RuntimeError as error:
            return torch.equal(shared[0], shared[1]), str(error)
    return False, ""


def test_parameters_outside_the_plan_are_made_equal_and_watched(processes: Processes) -> None:
    for equal, said in processes.run(2, drifting):
        assert equal
        assert "norm.weight" in said
        assert "head" not in said


class Rounding(torch.autograd.Function):
    """The identity, whose gradient is off by so much of itself on the second rank: as of kernels with atomics."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, off: float) -> Tensor:
        ctx.off = off
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None]:
        return grads[0] * (1 + ctx.off * dist.get_rank()), None


class Uneven(Net):
    def __init__(self, off: float) -> None:
        super().__init__()
        self.off = off
        self.last = nn.BatchNorm1d(CLASSES)

    def forward(self, x: Tensor) -> Tensor:
        y = self.last(super().forward(x))
        if self.training:
            with torch.no_grad():
                self.last.running_mean.data += 1e-7 * dist.get_rank()
        return Rounding.apply(y, self.off)


def apart(launch: Launch, off: float) -> tuple[list[list[float]], str]:
    """The weights outside the plan after some steps whose gradients are not the same everywhere, or what was said."""
    with TP(machine=Machine(launch=launch, device="cpu")) as strategy:
        torch.manual_seed(3)
        stream = TrainLoader(ToyData(), Rows(96, 1), strategy.slice, 24, 1, LoaderOptions())
        parallel_model = strategy.build(Plain(), Uneven(off), stream.example())
        optimizer = parallel_model.optimizer(
            make_optimizer("adamw"), [{"params": list(parallel_model.network.parameters())}]
        )
        try:
            for step, batches in enumerate(stream.epoch(0)):
                parallel_model.forward_backward(batches, step)
                parallel_model.optimizer_step(optimizer, 1.0)
            parallel_model.settle()
            state = parallel_model.state(optimizer)
        except RuntimeError as error:
            return [], f"step {step}: {error}"
        names = ("norm.weight", "head.bias", "down.bias", "last.running_mean", "optimizer/head.bias/exp_avg")
        return [whole(state[name]) for name in names], ""


def test_rounding_moves_no_copy_away_from_the_others_and_stops_no_save(processes: Processes) -> None:
    (one, _), (other, said) = processes.run(2, apart, 1e-6)
    assert not said
    assert one == other


def test_gradients_that_are_no_rounding_apart_are_found_before_anything_is_learned(processes: Processes) -> None:
    for _, said in processes.run(2, apart, 1.0):
        assert said.startswith("step 0: gradients of parameters outside the tensor plan differ")
        assert "head.weight" in said


class Hidden(nn.Module):
    """Dropout on what tensor ranks have parts of, in attention there, and on what all of them have. x: (B, WIDTH)."""

    def __init__(self, whole: float) -> None:
        super().__init__()
        self.whole = whole  # the part of the latter that is hidden
        self.up = nn.Linear(WIDTH, 24)
        self.down = nn.Linear(24, WIDTH)
        self.drawn: list[Tensor] = []

    def forward(self, x: Tensor) -> Tensor:
        h = torch.tanh(self.up(x))
        part = F.dropout(torch.ones_like(h), 0.5, self.training)
        heads = h.unflatten(-1, (-1, 4, 1))  # (B, heads, 4, 1)
        values = torch.eye(4, dtype=h.dtype).expand(*heads.shape[:3], 4)
        attention = F.scaled_dot_product_attention(heads, heads, values, dropout_p=0.5 * self.training)
        y = self.down(h * part + attention.sum(-1).flatten(1))
        whole = F.dropout(torch.ones_like(y), self.whole, self.training)
        self.drawn += [(mask != 0).detach() for mask in (part, attention, whole)]
        return x + y * whole


class Twice(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList([Hidden(0.0), Hidden(0.5)])  # from cut to cut nothing is drawn
        self.head = nn.Linear(WIDTH, CLASSES)

    def forward(self, x: Tensor) -> Tensor:
        for block in self.blocks:
            x = block(x)
        return self.head(x)

    def plan(self) -> Plan:
        return Plan({"blocks.*.up": ColwiseParallel(), "blocks.*.down": RowwiseParallel()}, shard=("blocks.*",))


def masks(launch: Launch) -> list[list[Any]]:
    """What each block has drawn in the second of two steps: in its forward, then once more in its backward."""
    machine = Machine(launch=launch, device="cpu", dropout="native")
    with TP(machine=machine, activation_checkpointing="units") as strategy:
        torch.manual_seed(3)
        stream = TrainLoader(ToyData(), Rows(96, 1), strategy.slice, 24, 1, LoaderOptions())
        parallel_model = strategy.build(Plain(), Twice(), stream.example())
        blocks: Any = parallel_model.network.get_submodule("blocks")
        for step, batches in zip((0, 1), stream.epoch(0), strict=False):
            for block in blocks:
                block.drawn.clear()
            parallel_model.forward_backward(batches, step)
        return [[mask.tolist() for mask in block.drawn] for block in blocks]


def test_parts_are_hidden_by_masks_of_their_own_and_the_whole_by_one(processes: Processes) -> None:
    first, second = processes.run(2, masks)
    assert processes.run(2, masks) == [first, second]
    for rank in (first, second):
        for block in rank:
            assert block[:3] == block[3:]  # recomputed
        assert all(one != other for one, other in zip(rank[0][:3], rank[1][:3], strict=True))  # from block to block
    for one, other in zip(first, second, strict=True):
        assert one[0] != other[0]
        assert one[1] != other[1]
        assert one[2] == other[2]
