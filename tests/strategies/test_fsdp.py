"""fully_shard: what travels when, tied and odd weights, and words before it starts."""

from __future__ import annotations

from collections import Counter
from typing import Any

import pytest
import torch
from torch import nn
from torch.distributed.tensor import DTensor

from tests.processes import Processes
from tests.quick import quickly
from tests.strategies.counting import collectives_of_a_step
from tests.strategies.toys import STRATEGIES, Case, Net, Plain, Rows, ToyData, built, make_optimizer, run, whole
from trainer.data.dataset_reader import LoaderOptions
from trainer.data.loader import TrainLoader
from trainer.data.rng import seed_all
from trainer.launch.rendezvous import Launch
from trainer.messages import Refusal
from trainer.strategies.fsdp import FSDP
from trainer.strategies.machine import Machine


def kinds(sent: list[tuple[str, int]]) -> Counter[str]:
    """How often each kind of collective took place."""
    return Counter(name for name, _ in sent)


@pytest.mark.long
def test_gradients_travel_once_a_step_unless_each_micro_batch_is_to_send_its_own(processes: Processes) -> None:
    def sent(**changes: Any) -> Counter[str]:
        fields, micro_batches = changes.get("fields", {}), changes.get("micro_batches", 1)
        return kinds(processes.run(2, collectives_of_a_step, Case("fsdp", fields, micro_batches=micro_batches))[0])

    once, four = sent(), sent(micro_batches=4)
    each = sent(micro_batches=4, fields={"sync_micro_batches": True})
    reduce = "gloo:all_reduce"  # gloo scatters what it has reduced for everyone
    assert four[reduce] == once[reduce] > 0
    assert each[reduce] == 4 * once[reduce]


def test_zero_2_gathers_once_and_zero_3_twice(processes: Processes) -> None:
    three, two = (
        kinds(processes.run(2, collectives_of_a_step, Case("fsdp", {"reshard_after_forward": again}))[0])
        for again in (True, False)
    )
    assert three["gloo:all_gather"] == 2 * two["gloo:all_gather"] > 0


def test_gathered_in_bf16_the_masters_stay_whole(processes: Processes) -> None:
    (reference,) = processes.run(1, run, Case(steps=8))
    ranks = processes.run(2, run, Case("fsdp", {"param_dtype": "bf16"}, steps=8))
    for mine, theirs in zip(ranks[0]["losses"], reference["losses"], strict=True):
        assert 0 < abs(mine - theirs) < 0.05
    assert any(value != float(torch.tensor(value).bfloat16()) for value in ranks[0]["weights"]["norm.weight"])


@pytest.mark.long
def test_experts_that_are_not_gathered_compute_in_bf16_as_those_that_are(processes: Processes) -> None:
    case = Case("fsdp", {"param_dtype": "bf16"}, network="experts behind", task="next", steps=6)
    gathered, _ = processes.run(2, run, case)
    spread, _ = processes.run(2, run, case.but(fields={**case.fields, "expert": 2}))
    # a gradient over the tokens of both ranks is rounded once, and not that of each rank
    assert max(abs(a - b) for a, b in zip(spread["losses"], gathered["losses"], strict=True)) < 1e-3
    masters = torch.tensor(spread["weights"]["blocks.1.mlp.experts.gate"])
    assert not torch.equal(masters, masters.bfloat16().float())


def test_degrees_and_plans_are_checked_before_it_starts() -> None:
    with pytest.raises(Refusal, match=r"replicate 3 .* 4 processes|4 processes / .*replicate 3"):
        FSDP(replicate=3).data_ranks(4)
    with pytest.raises(Refusal, match="Linear has no tensor-parallel plan"):
        FSDP(tensor=2).check(Plain(), nn.Linear(4, 4), 4)
    FSDP().check(Plain(), nn.Linear(4, 4), 4)  # without tensor ranks nothing is asked of a network


def test_it_says_its_degrees_and_is_named_for_them() -> None:
    assert [FSDP().name, FSDP(replicate=2).name, FSDP(tensor=2).name] == ["fsdp", "hsdp", "fsdp_tp"]
    machine = Machine(device="cpu")
    with FSDP(machine=machine) as strategy:
        assert strategy.notes(Net())[0] == "mesh replicate 1 × shard 1 × tensor 1"


class Tied(nn.Module):
    """A head that is the embedding, as in many language models."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(16, 8)
        self.up = nn.Linear(8, 8)
        self.head = nn.Linear(8, 16, bias=False)
        self.head.weight = self.embed.weight

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.head(torch.tanh(self.up(self.embed((x.abs() * 4).long().clamp(max=15)).mean(1))))


def tied(launch: Launch, word: str) -> list[Any]:
    """Weights after three steps of a tied network, and whether they are still tied."""
    with STRATEGIES[word](machine=Machine(launch=launch, device="cpu", precision="fp64")) as strategy:
        seed_all(5)
        parallel_model = strategy.build(Plain(), built(strategy, Tied), None)
        optimizer = parallel_model.optimizer(
            make_optimizer("adamw"), [{"params": list(parallel_model.network.parameters())}]
        )
        rows = Rows(48, 1)
        stream = TrainLoader(ToyData(), rows, strategy.slice, 24, 1, LoaderOptions())
        for step in range(3):
            parallel_model.forward_backward(next(iter(stream.epoch(step))), step)
            parallel_model.optimizer_step(optimizer, 1.0)
        network: Any = parallel_model.network
        assert parallel_model.network.state_dict().keys() == Tied().state_dict().keys()
        return [network.head.weight is network.embed.weight, whole(network.embed.weight), whole(network.up.weight)]


def test_tied_weights_stay_tied(processes: Processes) -> None:
    (reference,) = processes.run(1, tied, "single")
    for one, embed, up in processes.run(3, tied, "fsdp"):
        assert one
        assert torch.allclose(torch.tensor(embed), torch.tensor(reference[1]), atol=1e-12, rtol=0)
        assert torch.allclose(torch.tensor(up), torch.tensor(reference[2]), atol=1e-12, rtol=0)


class Odd(nn.Module):
    """A single number, a weight whose rows do not lie in order, a BatchNorm, and first dimensions of one."""

    def __init__(self) -> None:
        super().__init__()
        self.up = nn.Linear(12, 16)
        self.norm = nn.BatchNorm1d(16)
        self.turned = nn.Parameter(torch.randn(4, 16).t() / 4)
        self.scale = nn.Parameter(torch.tensor(0.5))
        self.positions = nn.Parameter(torch.randn(1, 12) / 4)  # 2, 3 and 4 divide its second dimension
        self.few = nn.Parameter(torch.randn(1, 5))  # and none of this one's

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = (torch.tanh(self.norm(self.up(x + self.positions))) @ self.turned) * self.scale
        return y * self.few.cosh().mean()


def odd(launch: Launch, word: str, fields: dict[str, Any], precision: str) -> tuple[list[float], dict[str, int]]:
    """Losses by step; how many numbers of each parameter this rank holds."""
    with STRATEGIES[word](machine=Machine(launch=launch, device="cpu", precision=precision), **fields) as strategy:
        seed_all(5)
        stream = TrainLoader(ToyData(), Rows(96, 1), strategy.slice, 24, 2, LoaderOptions())
        parallel_model = strategy.build(Plain(), built(strategy, Odd), stream.example())
        optimizer = parallel_model.optimizer(
            make_optimizer("sgd"), [{"params": list(parallel_model.network.parameters())}]
        )
        losses = []
        for step, batches in enumerate(stream.epoch(0)):
            parts = parallel_model.forward_backward(batches, step)
            parallel_model.optimizer_step(optimizer, 1.0)
            losses.append(float(strategy.totals(parts).read()["loss"]))
        parameters = parallel_model.network.named_parameters()
        held = {name: (p.to_local() if isinstance(p, DTensor) else p).numel() for name, p in parameters}
    return losses, held


@pytest.mark.parametrize(
    ("size", "word", "fields"),
    quickly([(3, "fsdp", {}), (4, "fsdp", {"replicate": 2}), (4, "pp", {"pipe": 2, "shard": 2})], (3, "fsdp", {})),
)
def test_numbers_and_turned_weights_are_trained_too(
    processes: Processes, size: int, word: str, fields: dict[str, Any]
) -> None:
    ((reference, _),) = processes.run(1, odd, "single", {}, "fp64")
    parts = fields.get("shard", size // fields.get("replicate", 1))
    for losses, held in processes.run(size, odd, word, {**fields, "sync_bn": True}, "fp64"):
        assert max(abs(a - b) for a, b in zip(losses, reference, strict=True)) < 1e-10
        assert held.get("positions", 12 / parts) == 12 / parts  # a pipeline's rank has some of the parameters
        assert held.get("few", 5) == 5
    for losses, _ in processes.run(size, odd, word, {**fields, "param_dtype": "bf16"}, "bf16"):
        assert max(abs(a - b) for a, b in zip(losses, reference, strict=True)) < 0.1
