"""A mixture of experts: the sum that it should be, what belongs to a sample, balance."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.nn import functional

from recipes.language.decoder import Decoder
from recipes.language.experts import (
    Experts,
    Mixture,
    Router,
    Routing,
    compute_even_shares,
    compute_grouped,
    compute_one_by_one,
    figures,
)
from recipes.language.next_token import NextToken
from tests.commands import curve
from tests.inside import product
from tests.processes import Processes
from trainer.launch.rendezvous import Launch
from trainer.messages import Refusal
from trainer.parallel.compile import CompileSettings
from trainer.parallel.expert_parallel import ExpertRanks
from trainer.strategies.fsdp import FSDP
from trainer.strategies.machine import Machine
from trainer.strategies.mesh import mesh

SIZES: dict[str, Any] = {"vocab_size": 30, "context": 16, "width": 16, "depth": 2, "heads": 4}
LLAMA: dict[str, Any] = {**SIZES, "norm": "rms", "mlp": "swiglu", "rotary": 1e4, "bias": False, "tied": False}


def mixture(**words: Any) -> Mixture:
    torch.manual_seed(0)
    module = Mixture(16, 8, Routing(4, **words), None)
    for parameter in module.parameters():
        torch.nn.init.normal_(parameter, std=0.5)
    return module.double()


def by_hand(module: Mixture, token: Tensor) -> Tensor:
    """One token, one expert after the other."""
    scores = (module.router.weight @ token).softmax(0)
    kept = scores.argsort(descending=True)[: module.router.routing.active]
    e = module.experts
    results = [e.down[i] @ (functional.silu(e.gate[i] @ token) * (e.up[i] @ token)) for i in kept]
    return sum(scores[i] / scores[kept].sum() * y for i, y in zip(kept, results, strict=True))  # type: ignore[return-value]


def test_a_token_gets_the_weighted_sum_of_its_experts() -> None:
    module, x = mixture(active=3), torch.randn(2, 5, 16, dtype=torch.float64)
    expected = torch.stack([torch.stack([by_hand(module, token) for token in sample]) for sample in x])
    torch.testing.assert_close(module(x), expected)
    assert int(module.router.counts.sum()) == 2 * 5 * 3


def test_every_weight_has_a_gradient_though_no_token_came() -> None:
    module = mixture(active=1)
    module(torch.randn(1, 1, 16, dtype=torch.float64)).sum().backward()
    gradients = [parameter.grad for parameter in module.experts.parameters()]
    assert all(g is not None and int((g.flatten(1) != 0).any(1).sum()) == 1 for g in gradients)


def stacks(width: int, inner: int) -> Experts:
    torch.manual_seed(0)
    module = Experts(width, inner, 4)
    for parameter in module.parameters():
        torch.nn.init.normal_(parameter, std=0.3)
    return module


def results_and_gradients(compute: Any, module: Experts, rows: Tensor, counts: Any) -> list[Tensor]:
    """What comes of the rows, and the gradients of these and of the weights."""
    rows = rows.clone().requires_grad_()
    results = compute(rows, counts, module.gate, module.up, module.down)
    factors = torch.linspace(-1, 1, results.numel(), device=rows.device).view_as(results)
    return [results, *torch.autograd.grad((results * factors).sum(), [rows, *module.parameters()])]


# of 16 rows, those of each expert
COUNTS = [(5, 0, 9, 2), (0, 7, 9, 0), (0, 0, 0, 16)]


@pytest.mark.parametrize("counts", COUNTS)
def test_grouped_products_are_those_of_one_expert_after_the_other(counts: tuple[int, ...]) -> None:
    module, rows = stacks(24, 16), torch.randn(16, 24)
    one, grouped = (
        results_and_gradients(way, module, rows, torch.tensor(counts)) for way in (compute_one_by_one, compute_grouped)
    )
    torch.testing.assert_close(grouped, one)


def test_so_are_the_even_shares_that_a_plan_computes() -> None:
    module, rows, counts = stacks(24, 16), torch.randn(16, 24), torch.tensor((4, 4, 4, 4))
    one, even = (results_and_gradients(way, module, rows, counts) for way in (compute_one_by_one, compute_even_shares))
    torch.testing.assert_close(even, one)


@pytest.mark.gpu
@pytest.mark.filterwarnings("ignore:Synchronization debug mode:UserWarning")  # torch calls it a prototype
@pytest.mark.parametrize("compiled", [False, True])
@pytest.mark.parametrize("counts", COUNTS)
def test_so_they_are_on_a_gpu_for_which_nothing_waits(counts: tuple[int, ...], compiled: bool) -> None:
    if not (8, 0) <= torch.cuda.get_device_capability() < (10, 0):
        pytest.skip("experts are computed one after the other on this GPU")
    module, rows, counted = stacks(64, 32).cuda(), torch.randn(16, 64).cuda(), torch.tensor(counts).cuda()
    chosen = torch.arange(4, device="cuda").repeat_interleave(counted)
    expected = results_and_gradients(compute_one_by_one, module, rows, counted)
    # memory that was freed holds no zeros: what a kernel leaves unwritten shows
    dirty = [torch.full((1 << 20,), torch.nan, device="cuda") for _ in range(8)]
    del dirty

    def compute(rows: Tensor, *_: Any) -> Tensor:
        with torch.autocast("cuda", torch.bfloat16):
            return module.compute(rows, chosen)

    if compiled:
        compute = torch.compile(compute, fullgraph=True)
        results_and_gradients(compute, module, rows, counted)
    torch.cuda.set_sync_debug_mode("error")
    try:
        grouped = results_and_gradients(compute, module, rows, counted)
    finally:
        torch.cuda.set_sync_debug_mode("default")
    assert grouped[0].dtype == torch.bfloat16
    for result, exact in zip(grouped, expected, strict=True):  # in bf16: of some numbers hardly a digit is left
        assert (result.float() - exact).norm() <= 0.02 * exact.norm()


def test_the_bias_moves_against_the_load_and_weighs_nothing() -> None:
    module = mixture(bias_rate=0.5, active=1)
    module.router.counts.copy_(torch.tensor([5, 1, 3, 3]))
    x = torch.randn(1, 4, 16, dtype=torch.float64)
    module.router.counted()
    assert module.router.bias is not None
    assert module.router.bias.tolist() == [-0.5, 0.5, 0.0, 0.0]
    module.router.bias.fill_(0.0)[2] = 100.0
    weights, chosen, _ = module.router(x)
    assert (chosen == 2).all()
    assert torch.equal(weights, torch.ones_like(weights))  # normalised, of one


def test_the_loss_of_even_experts_is_its_factor() -> None:
    module = mixture(auxiliary=0.25, active=4)  # every token uses every expert
    balance = module.router(torch.randn(2, 6, 16, dtype=torch.float64))[2]
    torch.testing.assert_close(balance, torch.full_like(balance, 0.25))


def test_the_router_computes_in_fp32_where_all_else_is_bf16() -> None:
    module = mixture().float()
    seen: list[torch.dtype] = []
    module.router.register_forward_hook(lambda _, __, out: seen.append(out[0].dtype))
    x = torch.randn(2, 8, 16)
    with torch.autocast("cpu", torch.bfloat16):
        weights, chosen, _ = module.router(x)
        assert module(x).dtype == torch.float32
    own = module.router(x)
    assert seen == [torch.float32] * 3
    assert torch.equal(weights, own[0])
    assert torch.equal(chosen, own[1])


def test_figures_of_a_line() -> None:
    said = figures({"a": torch.tensor([4, 0, 0, 0]), "b": torch.tensor([1, 1, 1, 1])})
    assert {name: float(value) for name, value in said.items()} == {
        "experts/busiest": 4.0,
        "experts/idlest": 0.0,
        **{f"experts/00{number}": load for number, load in enumerate((5.0, 1.0, 1.0, 1.0))},
    }


@pytest.mark.parametrize(
    ("words", "said"),
    [
        ({"active": 5}, "model.active=5: of model.experts 4 a token gets 1 to 4"),
        ({"scores": "softmx"}, "model.scores=softmx: there are softmax, sigmoid; did you mean 'softmax'?"),
        ({"experts": 0}, "model.experts=0: 1 or more stand in the place of one MLP; null: none"),
        ({"bias_rate": -0.1}, "model.bias_rate=-0.1: it is 0 or more"),
        ({"auxiliary": -1.0}, "model.auxiliary=-1.0: it is 0 or more"),
        ({"scaling": 0.0}, "model.scaling=0.0: it is above 0"),
        ({"shared": -1}, "model.shared=-1: 0 or more experts compute every token"),
        ({"expert_inner": 0}, "model.expert_inner=0: the width inside an expert is 1 or more; null: model.inner"),
        ({"dense_first": 2}, "model.dense_first=2 of model.depth 2 blocks leaves none for experts; at most 1"),
    ],
)
def test_what_cannot_be_is_refused(words: dict[str, Any], said: str) -> None:
    with pytest.raises(Refusal, match=said[:40]) as caught:
        Decoder(**LLAMA, **{"experts": 4} | words)
    assert said in str(caught.value)


def test_it_generates_as_it_scores() -> None:
    network = Decoder(**LLAMA, experts=4, expert_inner=8, shared=1, auxiliary=0.1).eval()
    text = torch.randint(30, (1, 4))
    whole = network.generate(text, 6, do_sample=False)
    for length in range(4, 10):
        scores = network(whole[:, :length])["tokens"][:, -1]
        assert int(scores.argmax()) == int(whole[0, length])
    assert any(isinstance(module, Router) for module in network.modules())


@pytest.mark.parametrize(
    ("expert", "data_ranks", "said"),
    [
        (
            3,
            4,
            "4 data ranks (replicate × shard × context) / strategy.expert 3 is not whole; degrees that work: 1, 2, 4;"
            " or start 6 data ranks",
        ),
        (3, 6, "4 experts of blocks.0.mlp.experts / strategy.expert 3 is not whole; degrees that work: 1, 2, 4"),
    ],
)
def test_degrees_that_do_not_divide_are_refused(expert: int, data_ranks: int, said: str) -> None:
    network = Decoder(**LLAMA, experts=4)
    with pytest.raises(Refusal) as caught:
        ExpertRanks.refuse(network, network.plan(), expert, data_ranks)
    assert str(caught.value) == said


def test_so_are_networks_without_experts_and_what_experts_do_not_go_with() -> None:
    dense = Decoder(**LLAMA)
    machine = Machine(device="cpu")
    with pytest.raises(Refusal, match=r"strategy\.expert=2: Decoder has no experts"):
        FSDP(machine=machine, expert=2).check(NextToken(), dense, 2)
    with pytest.raises(Refusal, match=r"strategy\.pipe=2 and strategy\.expert=2"):
        mesh(machine, pipe=2, shard=2, expert=2)
    for how, fields, said in (
        (CompileSettings("reduce-overhead"), {}, r"compile\.mode=reduce-overhead"),
        (CompileSettings(fullgraph=True), {}, r"compile\.fullgraph=true"),
        (CompileSettings(), {"activation_checkpointing": "units"}, r"strategy\.activation_checkpointing=units"),
    ):
        compiled = FSDP(machine=Machine(device="cpu", compile=how), expert=2, **fields)  # type: ignore[arg-type]
        with pytest.raises(Refusal, match=rf"strategy\.expert=2 {said}: the graph of a unit ends"):
            compiled.refuse_compile()


def answer(launch: Launch, place: Path, words: list[str]) -> Any:
    return product(launch, place, words)


@pytest.mark.long
@pytest.mark.slow
def test_compiled_around_experts_elsewhere_it_is_the_same_curve(tmp_path: Path, processes: Processes) -> None:
    words = ["model=moe_nano", "model.depth=2", "model.dense_first=0", "model.width=32", "model.heads=2"]
    words += ["model.groups=null", "model.expert_inner=32", "data=text", "loop.steps=4", "loop.global_batch=8"]
    words += ["loop.eval_every=null", "loop.log_every=1", "optimizer=adamw"]
    assert product(Launch(), tmp_path, [*words, "run.dir=alone", "strategy=single"]) == 0
    spread = [*words, "run.dir=spread", "strategy=fsdp", "strategy.expert=2", "compile.mode=default"]
    assert processes.run(2, answer, tmp_path, spread) == [0, 0]
    for key in ("loss", "grad_norm"):
        assert curve(tmp_path / "spread", key) == pytest.approx(curve(tmp_path / "alone", key), rel=1e-5)
