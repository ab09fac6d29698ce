"""What only zero1 has: owners of parameters, and optimizers that see whole ones."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn

from tests.ranks import Processes
from tests.strategies.networks import CLASSES, WIDTH, Net, Plain, ToyData
from tests.strategies.runs import Train, alike
from trainer.data.loader import TrainLoader
from trainer.launch.rendezvous import Launch
from trainer.strategies.machine import Machine
from trainer.strategies.zero1 import Zero1


class HeadOnly(nn.Linear):
    """Two parameters; of four ranks two own nothing."""

    def __init__(self) -> None:
        super().__init__(WIDTH, CLASSES)


OPTIMIZERS = {
    "of rows and columns": "optimizer=torch optimizer._target_=torch.optim.Adafactor optimizer.lr=0.01",
    "many at once": "+optimizer.foreach=true optimizer.fused=false",
}


@pytest.mark.long
@pytest.mark.parametrize("optimizer", OPTIMIZERS)
def test_every_optimizer_that_treats_parameters_one_by_one_is_exact(train: Train, optimizer: str) -> None:
    alike(train(f"{OPTIMIZERS[optimizer]} strategy=zero1", 2), train(OPTIMIZERS[optimizer]))


def shared_out(launch: Launch, network: type[nn.Module]) -> dict[str, Any]:
    """One step; then what this rank's optimizer holds."""
    torch.manual_seed(0)
    with Zero1(machine=Machine(launch=launch, device="cpu")) as strategy:
        stream = TrainLoader(ToyData(), ToyData().train(), strategy.slice, 48, 2)
        model = strategy.build(Plain(), network(), stream.example())
        whole = list(model.network.parameters())
        groups: list[dict[str, Any]] = [
            {"params": [one for one in whole if one.dim() > 1]},
            {"params": [one for one in whole if one.dim() <= 1], "weight_decay": 0.0, "lr": 0.5},
        ]
        optimizer = model.optimizer(lambda groups: torch.optim.AdamW(groups, lr=0.01), groups)
        model.forward_backward(next(iter(stream.epoch(0))), 0)
        kept = [name for name, parameter in model.network.named_parameters() if parameter.grad is not None]
        model.optimizer_step(optimizer, None)
        owned = {id(one) for group in optimizer.param_groups for one in group["params"]}
        return {
            "names": [name for name, parameter in model.network.named_parameters() if id(parameter) in owned],
            "gradients": kept,
            "rates": [group["lr"] for group in optimizer.param_groups],
            "bytes": sum(value.nbytes for memory in optimizer.state.values() for value in memory.values()),
        }


def test_the_optimizer_and_the_gradients_that_stay_are_shared_out(processes: Processes) -> None:
    (whole,) = processes.run(1, shared_out, Net)
    for size in (2, 3):
        ranks = processes.run(size, shared_out, Net)
        assert sorted(name for rank in ranks for name in rank["names"]) == sorted(whole["names"])
        assert sum(rank["bytes"] for rank in ranks) == whole["bytes"]
        largest = 8 * 24 * WIDTH  # two moments of `up`
        assert max(rank["bytes"] for rank in ranks) < (
            0.55 * whole["bytes"] if size == 2 else whole["bytes"] / 3 + largest
        )
        for rank in ranks:
            assert rank["gradients"] == rank["names"]  # nobody keeps the gradients of what is not its own
            assert rank["rates"] == [0.01, 0.5]
    ranks = processes.run(4, shared_out, HeadOnly)  # of four ranks two own nothing, and have every group
    assert sorted(len(rank["names"]) for rank in ranks) == [0, 0, 1, 1]
    assert [rank["rates"] for rank in ranks] == [[0.01, 0.5]] * 4
