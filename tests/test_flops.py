"""Tokens a second, and how much of what the devices could compute a run does."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from recipes.language.decoder import Decoder
from recipes.language.next_token import NextToken
from tests.ranks import Processes
from tests.run import run
from trainer.jobs.flops import count_step_flops, peak_flops

LENGTH, WIDTH, DEPTH, VOCABULARY, BATCH, PEAK = 16, 32, 2, 64, 8, 1e10
WORDS = ["data=synthetic_tokens", "task=language", "model=gpt_nano", "data.evaluation_size=0", "loop.steps=4"]
WORDS += [f"data.length={LENGTH}", f"data.vocab_size={VOCABULARY}", f"model.width={WIDTH}", f"model.depth={DEPTH}"]
WORDS += [f"loop.global_batch={BATCH}", "loop.log_every=2", f"loop.peak_flops={PEAK:g}", "run.dir=run"]


def by_hand() -> float:
    """Operations of a step: for each weight and token 2 forwards, 4 backwards; for attention 4 and 8 · T²·width."""
    weights = DEPTH * 12 * WIDTH**2 + VOCABULARY * WIDTH
    attention = DEPTH * 12 * LENGTH**2 * WIDTH
    return BATCH * (LENGTH * 6 * weights + attention)


class Masked(NextToken):
    """Looks into the batch, as networks of transformers do: it is counted with one."""

    def forward(self, network: nn.Module, inputs: Any, targets: Any) -> Any:
        return network(inputs if (inputs >= 0).all() else inputs.clamp_min(0))


def test_a_decoders_operations_are_those_of_the_formula() -> None:
    example = (torch.zeros(2, LENGTH, dtype=torch.int64),) * 2
    cases: list[tuple[NextToken, dict[str, Any]]] = [
        (NextToken(), {"rotary": 1e4, "norm": "rms"}),
        (Masked(), {"tied": False}),
    ]
    for task, more in cases:
        network = Decoder(VOCABULARY, LENGTH, WIDTH, DEPTH, **more)
        assert count_step_flops(task, network, example, BATCH) == by_hand()
        assert all(parameter.grad is None and not parameter.is_meta for parameter in network.parameters())
    # where nothing before the head learns, nothing goes backward through it
    network.requires_grad_(False)
    network.head.requires_grad_(True)
    head = BATCH * LENGTH * VOCABULARY * WIDTH
    assert count_step_flops(NextToken(), network, example, BATCH) == by_hand() / 3 + 2 * head


def test_a_line_tells_tokens_and_utilisation_and_only_where_the_peak_is_known(tmp_path: Path) -> None:
    done = run([*WORDS, "strategy=single", "log=[console]"], place=tmp_path)
    first, last = done.lines("train")
    for line in (first, last):
        assert line["utilisation"] == pytest.approx(by_hand() / line["step_s"] / PEAK)
        assert line["tokens_per_s"] == pytest.approx(LENGTH * line["samples_per_s"])
    assert f"{last['tokens_per_s']:,.0f} tokens/s  {100 * last['utilisation']:.1f} % of peak" in done.out
    line = run([*WORDS, "strategy=single", "run.dir=plain", "loop.peak_flops=null"], place=tmp_path).lines("train")[-1]
    assert "samples_per_s" in line
    assert "utilisation" not in line


@pytest.mark.long
def test_all_ranks_count_and_what_is_computed_again_does_not(processes: Processes, tmp_path: Path) -> None:
    words = ["strategy=fsdp", "strategy.activation_checkpointing=units", "loop.micro_batches=2"]
    line = run([*WORDS, *words], 2, "group", place=tmp_path).lines("train")[-1]
    assert line["utilisation"] == pytest.approx(by_hand() / line["step_s"] / PEAK / 2)
    assert line["tokens_per_s"] == pytest.approx(LENGTH * line["samples_per_s"])


@pytest.mark.parametrize(
    ("name", "arithmetic", "tera"),
    [
        ("NVIDIA H100 80GB HBM3", "bf16", 989.4),
        ("NVIDIA A100-SXM4-80GB", "tf32", 156),
        ("NVIDIA H100 80GB HBM3 MIG 1g.10gb", "bf16", None),  # a part of one
        ("NVIDIA GeForce RTX 4090 Laptop GPU", "bf16", None),  # another chip
    ],
)
def test_peaks_are_those_of_data_sheets(name: str, arithmetic: str, tera: float | None) -> None:
    assert peak_flops(name, arithmetic) == (tera and pytest.approx(tera * 1e12))
