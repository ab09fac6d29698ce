"""fully_shard: what is gathered in another precision, and words before it starts."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn

from tests.run import far
from tests.strategies.networks import Net, Next, Plain
from tests.strategies.runs import Train
from trainer import Refusal
from trainer.strategies.fsdp import FSDP
from trainer.strategies.machine import Machine


def test_gathered_in_bf16_the_masters_stay_whole(train: Train) -> None:
    seen, alone = train("precision=fp32 strategy=fsdp strategy.param_dtype=bf16", 2), train("precision=fp32")
    assert 0 < far(seen.losses, alone.losses) < 0.05
    masters = seen.tensors["norm.weight"]
    assert masters.dtype == torch.float32
    assert not torch.equal(masters, masters.bfloat16().float())


@pytest.mark.long
def test_experts_that_are_not_gathered_compute_in_bf16_as_those_that_are(train: Train) -> None:
    parts: dict[str, Any] = {"model": "experts behind", "task": Next}
    words = "precision=fp32 strategy=fsdp strategy.param_dtype=bf16 loop.steps=6"
    gathered, spread = train(words, 2, **parts), train(f"{words} strategy.expert=2", 2, **parts)
    # a gradient over the tokens of both ranks is rounded once, and not that of each rank
    assert far(spread.losses, gathered.losses) < 1e-3
    masters = spread.tensors["blocks.1.mlp.experts.gate"]
    assert not torch.equal(masters, masters.bfloat16().float())


def test_degrees_and_plans_are_checked_before_it_starts() -> None:
    with pytest.raises(Refusal, match=r"replicate 3 .* 4 processes|4 processes / .*replicate 3"):
        FSDP(replicate=3).data_ranks(4)
    with pytest.raises(Refusal, match="Linear has no tensor-parallel plan"):
        FSDP(tensor=2).check(Plain(), nn.Linear(4, 4), 4)
    FSDP().check(Plain(), nn.Linear(4, 4), 4)  # without tensor ranks nothing is asked of a network
    assert [FSDP().name, FSDP(replicate=2).name, FSDP(tensor=2).name] == ["fsdp", "hsdp", "fsdp_tp"]
    with FSDP(machine=Machine(device="cpu")) as strategy:
        assert strategy.notes(Net())[0] == "mesh replicate 1 × shard 1 × tensor 1"
