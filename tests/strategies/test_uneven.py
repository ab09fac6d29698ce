"""`loop.uneven`: where the ranks do not divide the global batch the gradient is still that of one process."""

from __future__ import annotations

from typing import Any

import pytest
from torch import Tensor

from tests.run import far, quickly
from tests.strategies.networks import BatchNormNet, Contrast, Plain, Weighted
from tests.strategies.runs import SGD, Train, alike
from trainer import gather

# name → (processes, words); over 3 ranks 50 are 17, 17 and 16 samples; over 4 ranks 13, 13, 12 and 12
SPREAD = {
    "ddp on 3": (3, "strategy=ddp"),
    "ddp on 4": (4, "strategy=ddp"),
    "ddp_tp on 4": (4, "strategy=ddp_tp strategy.tensor=2 loop.global_batch=49"),
    "tp on 2": (2, "strategy=tp loop.global_batch=49"),  # one data rank: only its micro-batches differ
    "fsdp on 3": (3, "strategy=fsdp"),
    "hsdp on 4": (4, "strategy=hsdp loop.global_batch=49"),
    "fsdp_tp on 4": (4, "strategy=fsdp_tp strategy.tensor=2 loop.global_batch=49"),
    "zero1 on 3": (3, "strategy=zero1"),
}
COMMON = "loop.uneven=true loop.global_batch=50"


def compare(train: Train, where: str, words: str, alone: str = "", **parts: Any) -> None:
    """With the whole global batch at once, unless the loss depends on what a micro-batch holds."""
    ranks, own = SPREAD[where]
    batch = "loop.global_batch=49" if "49" in own else ""
    alike(train(f"{COMMON} {own} {words}", ranks, **parts), train(f"{COMMON} {batch} {alone}", **parts))


@pytest.mark.parametrize("where", quickly(SPREAD, "fsdp on 3"))
def test_the_curve_is_that_of_one_process(train: Train, where: str) -> None:
    compare(train, where, "loop.micro_batches=4", task=Weighted)


@pytest.mark.long
@pytest.mark.parametrize("where", ["ddp on 3", "ddp on 4", "ddp_tp on 4", "fsdp on 3", "zero1 on 3"])
def test_gathered_rows_and_synchronised_statistics_are_those_of_one_process(train: Train, where: str) -> None:
    micro = "loop.micro_batches=4"
    compare(train, where, micro, micro, task=Contrast)
    if "tp" not in where:
        compare(train, where, f"{SGD} {micro} strategy.sync_bn=true", f"{SGD} {micro}", model=BatchNormNet)


@pytest.mark.long
@pytest.mark.parametrize("task", [Plain, Weighted, Contrast])
def test_a_share_of_one_sample_is_enough(train: Train, task: Any) -> None:
    """2, 1, 1 and 1 samples."""
    words = f"{COMMON} loop.global_batch=5 loop.steps=6"
    alike(train(f"{words} strategy=ddp", 4, task=task), train(words, task=task))


@pytest.mark.long
def test_other_numbers_of_processes_go_on(train: Train) -> None:
    reference = train(f"{COMMON} loop.steps=8")
    resume = "run.resume=fresh"
    for start, ranks in zip((0, 2, 4, 6), (3, 2, 4, 1), strict=True):
        strategy = "strategy=ddp" if ranks > 1 else ""
        seen = train(f"{COMMON} {strategy} loop.steps={start + 2} {resume}", ranks)
        assert far(seen.losses, reference.losses[start : start + 2]) < 1e-10
        resume = f"run.resume={seen.folder}"
    alike(seen, reference, 6)


class Twice(Plain):
    """Two rows for each sample."""

    def loss(self, output: Tensor, target: Any) -> Tensor:
        return super().loss(output, target) + gather(output.repeat(2, 1)).square().mean()


def test_rows_that_are_not_one_a_sample_are_refused(train: Train) -> None:
    assert "must have one" in train.refused(f"{COMMON} strategy=ddp", 3, code=None, task=Twice)
