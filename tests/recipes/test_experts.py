"""A mixture of experts: the sum that it should be, what belongs to a sample, balance."""

from __future__ import annotations

import re
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
    Routing,
    compute_even_shares,
    compute_grouped,
    compute_one_by_one,
)
from tests.ranks import Processes
from tests.run import run
from trainer import Refusal

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


@pytest.mark.parametrize(("counts", "way"), [*((counts, compute_grouped) for counts in COUNTS), ((4,) * 4, None)])
def test_grouped_products_are_those_of_one_expert_after_the_other(counts: tuple[int, ...], way: Any) -> None:
    """And so are the even shares that a plan computes."""
    module, rows = stacks(24, 16), torch.randn(16, 24)
    one, grouped = (
        results_and_gradients(each, module, rows, torch.tensor(counts))
        for each in (compute_one_by_one, way or compute_even_shares)
    )
    torch.testing.assert_close(grouped, one)


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


def test_what_cannot_be_is_refused() -> None:
    for words, said in (
        ({"active": 5}, "model.active=5: of model.experts 4 a token gets 1 to 4"),
        ({"scores": "softmx"}, "model.scores=softmx: there are softmax, sigmoid; did you mean 'softmax'?"),
        ({"experts": 0}, "model.experts=0: 1 or more stand in the place of one MLP; null: none"),
        ({"auxiliary": -1.0}, "model.auxiliary=-1.0: it is 0 or more"),
        ({"expert_inner": 0}, "model.expert_inner=0: the width inside an expert is 1 or more; null: model.inner"),
        ({"dense_first": 2}, "model.dense_first=2 of model.depth 2 blocks leaves none for experts; at most 1"),
    ):
        with pytest.raises(Refusal, match=re.escape(said)):
            Decoder(**LLAMA, **{"experts": 4} | words)


def test_it_generates_as_it_scores() -> None:
    network = Decoder(**LLAMA, experts=4, expert_inner=8, shared=1, auxiliary=0.1).eval()
    text = torch.randint(30, (1, 4))
    whole = network.generate(text, 6, do_sample=False)
    for length in range(4, 10):
        scores = network(whole[:, :length])["tokens"][:, -1]
        assert int(scores.argmax()) == int(whole[0, length])


WORDS = ["model=moe_nano", "model.depth=2", "model.dense_first=0", "model.width=32", "model.heads=2", "data=text"]
WORDS += ["model.groups=null", "model.expert_inner=32", "loop.steps=4", "loop.global_batch=8", "loop.log_every=1"]
WORDS += ["loop.eval_every=null", "optimizer=adamw", "data.length=16"]


def test_degrees_and_ways_that_do_not_go_with_experts_are_refused(tmp_path: Path, processes: Processes) -> None:
    for words, said in (
        (["strategy.expert=3"], r"2 data ranks .* / strategy.expert 3 is not whole; .*or start 3 data ranks"),
        (["model.experts=3", "strategy.expert=2"], r"3 experts of blocks.0.mlp.experts / strategy.expert 2 is not"),
        (["model=gpt_nano", "strategy.expert=2"], r"strategy\.expert=2: Decoder has no experts"),
        (["strategy.expert=2", "compile.fullgraph=true", "compile.mode=default"], r"compile\.fullgraph=true: the gra"),
    ):
        keys = WORDS if "model=gpt_nano" not in words else [word for word in WORDS if not word.startswith("model")]
        ended = run([*keys, "strategy=fsdp", *words, "run.dir=run"], 2, "group", place=tmp_path, code=2)
        assert re.search(said, ended.out), ended.out


@pytest.mark.long
def test_experts_elsewhere_are_the_same_curve_and_lines_say_what_each_gets(
    tmp_path: Path, processes: Processes
) -> None:
    alone = run([*WORDS, "run.dir=alone", "strategy=single"], place=tmp_path)
    spread = run([*WORDS, "run.dir=spread", "strategy=fsdp", "strategy.expert=2"], 2, "group", place=tmp_path)
    for key in ("loss", "grad_norm", "cross_entropy", "balance"):
        assert spread.curve(key) == pytest.approx(alone.curve(key), rel=1e-5)
    assert alone.curve("experts/busiest") == spread.curve("experts/busiest")
