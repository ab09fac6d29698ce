"""`optimizer=muon`: which parameters it takes, what it does to them; clipping, overflows and averages go with it."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from recipes.language.decoder import Decoder
from recipes.vision.vit import VisionTransformer
from tests.commands import curve
from tests.inside import product
from tests.processes import Processes
from trainer.launch.rendezvous import Launch
from trainer.learning.muon import Muon, orthogonalize
from trainer.learning.optimizer import find_roles, parameter_groups
from trainer.learning.parallel_plan import Plan
from trainer.learning.task import Task
from trainer.messages import Refusal


def taken(network: nn.Module, **keys: Any) -> set[str]:
    """The names of what Muon steps itself."""
    roles = find_roles(lambda groups: Muon(groups, **keys), network, Task().plan(network))
    return {name for name, _ in network.named_parameters() if roles.get(name) != "elementwise"}


def test_hidden_matrices_are_its_own_and_all_else_is_adamws() -> None:
    decoder = Decoder(vocab_size=7, context=8, width=8, depth=1, heads=2)
    hidden = {f"blocks.0.{name}.weight" for name in ("attention.qkv", "attention.out", "mlp.up", "mlp.down")}
    assert taken(decoder) == hidden  # embeddings and the head are not
    # the embedding is tied to the head, so it goes with it
    others = {name for name in hidden if "mlp" not in name}
    assert taken(decoder, adamw=("blocks.*.mlp", "head")) == {"position.weight", *others}
    # a convolution is a matrix, the last linear layer a head by its place; a row is none, nor what may be no stack
    network = nn.Sequential(nn.Conv2d(1, 4, 3), nn.BatchNorm2d(4), nn.Linear(4, 5), nn.Linear(5, 1), nn.Linear(5, 3))
    network.register_parameter("stack", nn.Parameter(torch.ones(2, 3, 4)))
    assert taken(network) == {"0.weight", "2.weight"}
    with pytest.raises(Refusal, match=r"Linear has nothing for Muon.*optimizer.adamw=\['embeddings', 'head'\]"):
        taken(nn.Linear(3, 3))
    with pytest.raises(Refusal, match=r"optimizer\.adamw: 'blocs' matches no parameter"):
        taken(network, adamw=("blocs",))


class Stacks(nn.Module):
    """Two experts of which each has a matrix and a bias, beside a router."""

    def __init__(self) -> None:
        super().__init__()
        draw = torch.Generator().manual_seed(1)
        self.router, self.experts = nn.Linear(4, 2, bias=False), nn.Module()
        self.experts.weight = nn.Parameter(torch.randn(2, 6, 4, generator=draw))
        self.experts.bias = nn.Parameter(torch.randn(2, 6, generator=draw))

    def plan(self) -> Plan:
        return Plan(experts=("experts",))


def test_the_matrix_of_each_expert_is_stepped_as_a_matrix() -> None:
    network = Stacks()
    keys: dict[str, Any] = {"adamw": ()}
    assert taken(network, **keys) == {"router.weight", "experts.weight"}
    assert taken(network, adamw=("experts.weight",)) == {"router.weight"}

    def make(groups: Any) -> Muon:
        return Muon(groups, lr=0.1, **keys)

    optimizer = make(parameter_groups(network, True, (), find_roles(make, network, network.plan())))
    matrices = [nn.Parameter(matrix.detach().clone()) for matrix in network.experts.get_parameter("weight")]
    alone = make([{"params": matrices}])
    for step in range(3):
        for parameter in (*network.parameters(), *matrices):
            parameter.grad = (parameter.detach() + step).sin()
        optimizer.step()
        alone.step()
    torch.testing.assert_close(network.experts.get_parameter("weight"), torch.stack([*matrices]))


def test_its_groups_have_rates_of_their_own() -> None:
    vit = VisionTransformer(image_size=8, patch_size=4, channels=1, num_classes=3, width=8, depth=1, heads=2)

    def make(groups: Any) -> Muon:
        return Muon(groups, lr=0.02, adamw_lr=0.001)

    optimizer = make(parameter_groups(vit, True, (), find_roles(make, vit, vit.plan())))
    assert [(group["lr"], group["elementwise"], group["weight_decay"]) for group in optimizer.param_groups] == [
        (0.02, False, 0.1),
        (0.001, True, 0.1),
        (0.001, True, 0.0),
    ]


@pytest.mark.parametrize("shape", [(6, 20), (20, 6), (8, 8)])
def test_an_update_has_the_singular_vectors_of_its_matrix_and_values_near_one(shape: tuple[int, int]) -> None:
    matrix = torch.randn(shape, dtype=torch.float64, generator=torch.Generator().manual_seed(1))
    for given, precision in ((matrix, "bf16"), (matrix.float(), "fp32"), (matrix.float(), "bf16")):
        update = orthogonalize(given, 5, precision)
        assert update.dtype == given.dtype
        u, _, v = torch.linalg.svd(matrix, full_matrices=False)
        inner = u.mT @ update.double() @ v.mT
        values = inner.diagonal()
        assert 0.5 < values.min() < values.max() < 1.3
        # fp64 stays fp64 whatever the key says: there strategies have one curve
        off = (inner - values.diag()).abs().max()
        assert off < {torch.float64: 1e-9, torch.float32: 1e-3 if precision == "fp32" else 0.1}[given.dtype]


def test_what_is_no_matrix_is_stepped_as_torchs_adamw_steps_it() -> None:
    ours, torchs = (nn.Parameter(torch.linspace(-1, 1, 5)) for _ in range(2))
    optimizers = (
        Muon([{"params": [ours]}], lr=0.1, weight_decay=0.2, betas=(0.9, 0.99)),
        torch.optim.AdamW([torchs], lr=0.1, weight_decay=0.2, betas=(0.9, 0.99), fused=True),
    )
    for step in range(3):
        for parameter, optimizer in zip((ours, torchs), optimizers, strict=True):
            parameter.grad = (parameter.detach() + step).sin()
            optimizer.step()
    assert torch.equal(ours, torchs)


def answer(launch: Launch, place: Path, words: list[str]) -> Any:
    return product(launch, place, words)


@pytest.mark.long
@pytest.mark.parametrize(("size", "strategy"), [(2, "fsdp"), (2, "tp")])
def test_clipping_overflows_and_averages_go_with_it(
    tmp_path: Path, processes: Processes, size: int, strategy: str
) -> None:
    words = ["model=vit_tiny", "model.width=24", "model.heads=4", "model.depth=2", "optimizer=muon", "loop.log_every=1"]
    # fp16 overflows in the first steps, which are left out on all ranks alike
    words += ["precision=fp16", "loop.max_norm=0.5", "ema.decay=0.9", "loop.on_nonfinite=skip", "loop.global_batch=120"]
    words += ["loop.steps=6", "schedule=constant", "loop.eval_every=3"]
    assert product(Launch(), tmp_path, [*words, "run.dir=alone", "strategy=single"]) == 0
    spread = [*words, "run.dir=spread", f"strategy={strategy}"]
    assert processes.run(size, answer, tmp_path, spread) == [0] * size
    for key in ("loss", "grad_norm"):
        assert curve(tmp_path / "spread", key) == pytest.approx(curve(tmp_path / "alone", key), rel=0.05)


@pytest.mark.parametrize(
    ("word", "said"),
    [
        ("optimizer.fused=true", "Muon has no fused step"),
        ("optimizer.newton_schulz=fp8", "expects one of fp32, bf16"),
        ("optimizer.scaling=none", "expects one of moonshot, jordan"),
        ("optimizer.momentum=1", "momentum and betas from 0 to below 1"),
        ("optimizer.adamw_lr=-1", "adamw_lr, weight_decay and eps are 0 or more"),
        ("optimizer.weight_decay=-1", "adamw_lr, weight_decay and eps are 0 or more"),
        ("optimizer.betas=[1.5,2]", "momentum and betas from 0 to below 1"),
    ],
)
def test_what_cannot_be_is_refused_in_words(tmp_path: Path, word: str, said: str) -> None:
    with pytest.raises(Refusal, match=said):
        product(Launch(), tmp_path, ["model=mlp", "optimizer=muon", "loop.steps=1", "run.dir=no", word])
