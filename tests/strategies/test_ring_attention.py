"""Keys and values in a ring: the same curve, the bytes that must travel, equal work, and the kernels."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from torch import Tensor
from torch.nn.attention.bias import causal_lower_right
from torch.nn.functional import scaled_dot_product_attention
from torch.utils.flop_counter import FlopCounterMode

from tests.commands import curve
from tests.inside import product
from tests.processes import Processes
from tests.quick import quickly
from tests.strategies.counting import collectives_of_a_step
from tests.strategies.sequences import LENGTH
from tests.strategies.toys import BATCH, Case
from trainer.launch.rendezvous import Launch
from trainer.parallel.ring_attention import _merge_, find_kernel

SMALL = ["model.width=16", "model.depth=2", "model.heads=4", "model.dropout=0.2", "model.tied=false"]
TEXT = ["data=text", "data.length=12", "data.held=0", "task=language", "precision=fp64", "schedule=constant"]
SHAPES = {"gpt": ["model=gpt_nano"], "llama": ["model=llama", "model.groups=2", "model.inner=32"]}
RUN = [*TEXT, "loop.global_batch=4", "loop.log_every=1"]


@pytest.mark.parametrize(
    ("ranks", "shape", "recomputed"),
    quickly(
        [(ranks, shape, mode) for ranks in (2, 3) for shape in SHAPES for mode in ("none", "units", "operators")],
        (2, "gpt", "operators"),
        (3, "llama", "none"),
    ),
)
def test_a_ring_gives_the_curve_of_one_process(
    processes: Processes, tmp_path: Path, ranks: int, shape: str, recomputed: str
) -> None:
    words = [*SHAPES[shape], *SMALL, *RUN, "loop.steps=4"]
    assert processes.run(1, product, tmp_path, [*words, "run.dir=alone", "strategy=single"]) == [0]
    ring = ["strategy=cp", "strategy.attention=ring", f"strategy.activation_checkpointing={recomputed}"]
    with_ring = [*words, "run.dir=ring", *ring]
    assert processes.run(ranks, product, tmp_path, with_ring) == [0] * ranks
    assert curve(tmp_path / "ring") == pytest.approx(curve(tmp_path / "alone"), rel=1e-10)


@pytest.mark.long
def test_a_ring_that_is_resumed_goes_on_to_the_bit(processes: Processes, tmp_path: Path) -> None:
    words = [*SHAPES["llama"], *SMALL, *RUN, "strategy=cp", "strategy.attention=ring"]
    assert processes.run(2, product, tmp_path, [*words, "run.dir=through", "loop.steps=4"]) == [0, 0]
    for steps in (2, 4):
        assert processes.run(2, product, tmp_path, [*words, "run.dir=again", f"loop.steps={steps}"]) == [0, 0]
    assert curve(tmp_path / "again", "loss_hex") == curve(tmp_path / "through", "loss_hex")


@pytest.mark.parametrize("ranks", quickly([2, 4], 2))
def test_a_ring_sends_what_is_seen_and_no_more(processes: Processes, ranks: int) -> None:
    case = Case("cp", {"attention": "ring"}, network="llama", task="next")
    sent = [
        [size for name, size in events if name == "gloo:send"]
        for events in processes.run(ranks, collectives_of_a_step, case)
    ]
    # keys and values of a piece, in two layers with two heads of width 4
    piece = 4 * BATCH * 2 * (LENGTH // (2 * ranks)) * (4 + 4)
    # a front piece is seen by all other ranks, a back piece by those before its own; and gradients come back
    seen = ranks * (ranks - 1) + ranks * (ranks - 1) // 2
    assert sum(map(sum, sent)) == 2 * piece * (seen + seen + seen)


def computed(launch: Launch, place: Path, words: list[str]) -> int:
    """The floating-point operations of a run on this rank."""
    with FlopCounterMode(display=False) as counter:
        assert product(launch, place, words) == 0
    return counter.get_total_flops()


@pytest.mark.parametrize(
    ("ranks", "attention"), quickly([(ranks, way) for ranks in (2, 3) for way in ("gather", "ring")], (2, "ring"))
)
def test_context_ranks_compute_as_much(processes: Processes, tmp_path: Path, ranks: int, attention: str) -> None:
    words = [*SHAPES["llama"], *SMALL, *TEXT, "loop.steps=1", "loop.global_batch=2", "strategy=cp"]
    words += [f"strategy.attention={attention}", "run.dir=run"]
    first, *others = processes.run(ranks, computed, tmp_path, words)
    assert others == [first] * (ranks - 1)


KERNELS = [
    ("cpu", torch.float64, 1e-14),
    ("cpu", torch.float32, 1e-6),
    ("cpu", torch.bfloat16, 2e-2),
    pytest.param("cuda", torch.bfloat16, 2e-2, marks=pytest.mark.gpu),
    pytest.param("cuda", torch.float16, 3e-3, marks=pytest.mark.gpu),
    pytest.param("cuda", torch.float32, 1e-5, marks=pytest.mark.gpu),
]


# torch's backward has a thread of its own on a GPU, which meets the GPU first in a product of matrices
@pytest.mark.filterwarnings("ignore:Attempting to run cuBLAS")
@pytest.mark.parametrize("heads", [2, 4])
@pytest.mark.parametrize(("device", "dtype", "tolerance"), KERNELS)
def test_parts_of_attention_make_up_the_whole(device: str, dtype: torch.dtype, tolerance: float, heads: int) -> None:
    """Of 10 tokens the last 6 ask: first those that are their own answer, then the 4 before them."""
    generator = torch.Generator().manual_seed(1)
    shapes = [(3, 4, 6, 8), (3, heads, 10, 8), (3, heads, 10, 8), (3, 4, 6, 8)]
    q, k, v, gradient = (torch.randn(shape, generator=generator).to(device, dtype) for shape in shapes)
    kernel = find_kernel(device, dtype, 8, 8)
    assert kernel is not None
    own, before = ((k[:, :, part], v[:, :, part]) for part in (slice(4, 10), slice(0, 4)))
    output, logsumexp = (
        x.to(torch.promote_types(dtype, torch.float32), copy=True) for x in kernel.forward(q, *own, True)
    )
    _merge_(output, logsumexp, *kernel.forward(q, *before, False))
    rows = gradient, q, output.to(dtype), logsumexp
    (of_q, *of_own), (more, *of_before) = kernel.backward(*rows, *own, True), kernel.backward(*rows, *before, False)
    parts = [output, of_q + more, *(torch.cat(both, 2) for both in zip(of_before, of_own, strict=True))]

    wholes = [x.double().requires_grad_() for x in (q, k, v)]
    query, key, value = wholes
    whole = scaled_dot_product_attention(query, key, value, attn_mask=causal_lower_right(6, 10), enable_gqa=heads < 4)
    expected = [whole, *torch.autograd.grad(whole, wholes, gradient.double())]
    for part, other in zip(parts, expected, strict=True):
        assert _furthest(part, other) < tolerance * 4


def _furthest(one: Tensor, other: Tensor) -> float:
    return float((one.double() - other).detach().abs().max())
