"""What a loss of tokens takes; `task.loss_chunk`: the same losses, gradients and curves, without the scores of all
tokens in memory."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional

from recipes.language.next_token import NextToken
from recipes.language.token_losses import Head
from tests.ranks import Processes
from tests.recipes.test_language import PLACES
from tests.run import Finished, quickly, run
from trainer import BadData, Refusal

VOCABULARY = 48
WORDS = ["data=synthetic_tokens", "data.length=8", f"data.vocab_size={VOCABULARY}", "data.size=64"]
WORDS += ["data.evaluation_size=12", "task=language", "model=gpt_nano", "model.width=16", "model.depth=2"]
WORDS += ["loop.steps=4", "loop.global_batch=12", "loop.log_every=1", "loop.max_norm=1", "precision=fp64"]
CHUNKS = "task.loss_chunk=7"  # divides nothing here
MORE: dict[str, tuple[int, tuple[str, ...]]] = {
    "single, recomputing": (1, ("strategy=single", "strategy.activation_checkpointing=units")),
    "dp": (1, ("strategy=dp",)),
    "ddp": (2, ("strategy=ddp", "loop.micro_batches=3")),
    "fsdp, released": (2, ("strategy=fsdp", "strategy.reshard_after_forward=true", "strategy.cpu_offload=true")),
    "fsdp_pp": (4, ("strategy=fsdp_pp", "strategy.pipe=2", "loop.micro_batches=2")),
}
EVERY = PLACES | MORE
TIED = ("single, recomputing", "tp", "tp, sequence", "fsdp", "cp")  # heads that are the embedding, too


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("chunks")


def losses(ended: Finished) -> list[float]:
    """Of all steps, and of the evaluations."""
    return [line["loss"] for kind in ("train", "eval") for line in ended.lines(kind)]


@pytest.fixture(scope="module")
def whole(folder: Path) -> Any:
    """The curve of one process with all scores; by whether the head is tied."""
    return {
        tied: losses(run([*WORDS, f"model.tied={tied}", "strategy=single", f"run.dir=whole-{tied}"], place=folder))
        for tied in (False, True)
    }


@pytest.mark.parametrize(("chunk", "autocast"), [(5, False), (16, True), (1000, False)])
def test_losses_and_gradients_are_those_of_all_scores(chunk: int, autocast: bool) -> None:
    torch.manual_seed(0)
    dtype = torch.float32 if autocast else torch.float64
    head, x = Head(32, 101, bias=False).to(dtype), torch.randn(4, 16, 32, dtype=dtype, requires_grad=True)
    targets, factor = torch.randint(101, (4, 16)), torch.randn(4, 16, dtype=dtype)  # another gradient for each token
    targets[:, ::3] = -1

    def results(compute: Any) -> tuple[Tensor, ...]:
        with torch.autocast("cpu", torch.bfloat16, enabled=autocast):
            each = compute()
        return each, *torch.autograd.grad((each * factor).sum(), [x, head.weight])

    def all_scores() -> Tensor:
        return functional.cross_entropy(head(x).mT, targets, reduction="none", ignore_index=-1)

    expected = results(all_scores)
    given = results(lambda: head(x, targets=targets, ignored=-1, chunk=chunk))
    # of the weight's gradient whole scores make one sum, which is rounded to bf16 once
    relative, absolute = (1e-2, 3e-2) if autocast else (1e-12, 1e-12)
    torch.testing.assert_close(given, expected, rtol=relative, atol=absolute)
    torch.testing.assert_close(given[0], expected[0], rtol=1e-6, atol=1e-6)


@pytest.mark.parametrize("place", quickly(EVERY, "single, recomputing", "ddp"))
def test_chunks_give_the_curve_of_the_whole_loss(processes: Processes, folder: Path, whole: Any, place: str) -> None:
    size, words = EVERY[place]
    tied = place in TIED
    own = [*WORDS, *words, f"model.tied={tied}", CHUNKS, f"run.dir={place.replace(', ', '-')}"]
    assert len(whole[tied]) > 4  # evaluations, too
    assert losses(run(own, size, "group", place=folder)) == pytest.approx(whole[tied], rel=1e-10)


def test_what_is_no_loss_of_tokens_is_refused() -> None:
    with pytest.raises(Refusal, match=r"task\.loss_chunk=4: Linear has no method losses\(.*loss_chunk=null works"):
        NextToken(loss_chunk=4).check(nn.Linear(2, 2))
    NextToken().check(nn.Linear(2, 2))
    with pytest.raises(Refusal, match=r"task\.loss_chunk=0: it is a number of tokens"):
        NextToken(loss_chunk=0)
    for output, target in (((6, 10), (6,)), ((2, 3, 5), (2, 4)), ((2, 3, 5), (2,))):
        with pytest.raises(BadData, match=r"the network gives .*; task=language takes scores \(samples, tokens, voca"):
            NextToken().loss(torch.zeros(output), torch.zeros(target, dtype=torch.int64))
