"""`optimizer=muon`: which parameters it takes, what it does to them."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from recipes.language.decoder import Decoder
from tests.run import TRANSFORMER, run
from tests.test_initial_weights import STILL, everything, saved
from trainer import Plan, Refusal
from trainer.learning.muon import Muon, orthogonalize


def roles(network: nn.Module, plan: Plan | None = None, **keys: Any) -> dict[str, str]:
    return Muon([nn.Parameter(torch.ones(2, 2))], **keys).find_roles(network, plan or Plan())


def taken(network: nn.Module, **keys: Any) -> set[str]:
    """The names of what Muon steps itself."""
    elsewhere = {name for name, role in roles(network, **keys).items() if role == "elementwise"}
    return {name for name, _ in network.named_parameters()} - elsewhere


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


def test_the_matrix_of_each_expert_is_stepped_as_a_matrix() -> None:
    network = nn.Module()
    network.router, network.experts = nn.Linear(4, 2, bias=False), nn.Module()
    weight = nn.Parameter(torch.randn(2, 6, 4, generator=torch.Generator().manual_seed(1)))
    network.experts.register_parameter("weight", weight)
    network.experts.register_parameter("bias", nn.Parameter(torch.ones(2, 6)))  # a vector for each expert
    plan = Plan(experts=("experts",))
    assert roles(network, plan, adamw=()) == {"experts.weight": "stacked", "experts.bias": "elementwise"}
    assert roles(network, plan, adamw=("experts.weight",))["experts.weight"] == "elementwise"
    matrices = [nn.Parameter(matrix.detach().clone()) for matrix in weight]
    optimizers = [Muon([{"params": [weight], "stacked": True}], lr=0.1), Muon([{"params": matrices}], lr=0.1)]
    for step in range(3):
        for parameter in (weight, *matrices):
            parameter.grad = (parameter.detach() + step).sin()
        for optimizer in optimizers:
            optimizer.step()
    torch.testing.assert_close(weight, torch.stack([*matrices]))


def test_a_run_steps_each_kind_by_its_own_rate_and_decay(tmp_path: Path) -> None:
    words = [*TRANSFORMER, "optimizer=muon", "loop.steps=1", "loop.eval_every=null", "schedule=constant"]
    begun = saved(run([*words, *STILL, "run.dir=begun"], place=tmp_path).folder)
    done = run([*words, "optimizer.lr=0.01", "optimizer.adamw_lr=0", "run.dir=run"], place=tmp_path)
    after = saved(done.folder)
    moved = {name for name in after if not torch.equal(after[name], begun[name])}
    matrices = {name for name in after if name.startswith("blocks.") and after[name].dim() == 2}
    assert matrices <= moved <= {name for name in after if after[name].dim() > 1 and not name.startswith("head")}
    kept = {name for name in everything(done.folder) if name.endswith("/momentum_buffer")}
    assert kept == {f"optimizer/{name}/momentum_buffer" for name in moved}
    # an update is as long as one of AdamW's is on the average, and the matrix decays
    one = "blocks.0.mlp.up.weight"
    update = (begun[one] * (1 - 0.01 * 0.1) - after[one]) / 0.01
    assert 0.1 < float(update.square().mean().sqrt()) < 0.3


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


@pytest.mark.parametrize(
    ("word", "said"),
    [
        ("optimizer.fused=true", "Muon has no fused step"),
        ("optimizer.newton_schulz=fp8", "expects one of fp32, bf16"),
        ("optimizer.scaling=none", "expects one of moonshot, jordan"),
        ("optimizer.adamw_lr=-1", "adamw_lr, weight_decay and eps are 0 or more"),
        ("optimizer.betas=[1.5,2]", "momentum and betas from 0 to below 1"),
    ],
)
def test_what_cannot_be_is_refused_in_words(tmp_path: Path, word: str, said: str) -> None:
    words = ["model=mlp", "optimizer=muon", "loop.steps=1", "run.dir=no", word]
    assert said in run(words, place=tmp_path, code=2).out
