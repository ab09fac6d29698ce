"""`task.loss_chunk`: the same losses, gradients and curves, without the scores of all tokens in memory."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor, nn
from torch.nn import functional

from recipes.language.next_token import NextToken
from recipes.language.token_losses import Head
from tests.commands import finish, lines, single
from tests.inside import here, product
from tests.processes import Processes
from tests.quick import quickly
from tests.recipes.test_language import PLACES, UNTIED
from trainer.jobs.flops import count_step_flops
from trainer.launch.rendezvous import Launch
from trainer.messages import Refusal

VOCABULARY = 48
WORDS = [
    "data=synthetic_tokens",
    "data.length=8",
    f"data.vocab_size={VOCABULARY}",
    "data.size=64",
    "data.evaluation_size=12",
    "task=language",
    "model=gpt_nano",
    "model.width=16",
    "model.depth=2",
    "loop.steps=4",
    "loop.global_batch=12",
    "loop.log_every=1",
    "loop.max_norm=1",
    "precision=fp64",
]
CHUNKS = "task.loss_chunk=7"  # divides nothing here
MORE: dict[str, tuple[int, tuple[str, ...]]] = {
    "single, recomputing": (1, ("strategy=single", "strategy.activation_checkpointing=units")),
    "dp": (1, ("strategy=dp",)),
    "ddp": (2, ("strategy=ddp", "loop.micro_batches=3")),
    "pp, zero bubble": (2, ("strategy=pp", "strategy.schedule=ZBVZeroBubble", "loop.micro_batches=4")),
    "fsdp, released": (2, ("strategy=fsdp", "strategy.reshard_after_forward=true", "strategy.cpu_offload=true")),
    "fsdp_pp": (4, ("strategy=fsdp_pp", "strategy.pipe=2", "loop.micro_batches=2")),
}
EVERY = PLACES | MORE
CASES = [
    (place, tied) for place in EVERY for tied in (False, True) if not (tied and (place in UNTIED or "pp" in place))
]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("chunks")


def curve(run: Path) -> list[float]:
    """The losses of all steps, and of the evaluations."""
    return [line["loss"] for line in lines(run, "train")] + [line["loss"] for line in lines(run, "eval")]


@pytest.fixture(scope="module")
def whole(folder: Path) -> Any:
    """The curve of one process with all scores; by whether the head is tied."""
    curves = {}
    for tied in (False, True):
        words = [*WORDS, f"model.tied={tied}", "strategy=single", f"run.dir={folder / f'whole-{tied}'}"]
        assert product(Launch(), folder, words) == 0
        curves[tied] = curve(folder / f"whole-{tied}")
    return curves


@pytest.mark.parametrize("autocast", [False, True])
@pytest.mark.parametrize("chunk", [5, 16, 1000])
def test_losses_and_gradients_are_those_of_all_scores(chunk: int, autocast: bool) -> None:
    torch.manual_seed(0)
    dtype = torch.float32 if autocast else torch.float64
    head, x = Head(32, 101, bias=False).to(dtype), torch.randn(4, 16, 32, dtype=dtype, requires_grad=True)
    targets, factor = torch.randint(101, (4, 16)), torch.randn(4, 16, dtype=dtype)  # another gradient for each token
    targets[:, ::3] = -1

    def results(losses: Any) -> tuple[Tensor, ...]:
        with torch.autocast("cpu", torch.bfloat16, enabled=autocast):
            each = losses()
        return each, *torch.autograd.grad((each * factor).sum(), [x, head.weight])

    def all_scores() -> Tensor:
        return functional.cross_entropy(head(x).mT, targets, reduction="none", ignore_index=-1)

    expected = results(all_scores)
    given = results(lambda: head(x, targets=targets, ignored=-1, chunk=chunk))
    # of the weight's gradient whole scores make one sum, which is rounded to bf16 once
    relative, absolute = (1e-2, 3e-2) if autocast else (1e-12, 1e-12)
    torch.testing.assert_close(given, expected, rtol=relative, atol=absolute)
    torch.testing.assert_close(given[0], expected[0], rtol=1e-6, atol=1e-6)


@pytest.mark.parametrize(
    ("place", "tied"),
    quickly(
        CASES,
        ("single, recomputing", True),
        ("ddp", False),
    ),
)
def test_chunks_give_the_curve_of_the_whole_loss(
    processes: Processes, folder: Path, whole: Any, place: str, tied: bool
) -> None:
    size, words = EVERY[place]
    run = folder / f"{place}-{tied}".replace(" ", "").replace(",", "-")
    own = [*WORDS, *(word for word in words if "global_batch" not in word), f"model.tied={tied}", CHUNKS]
    assert processes.run(size, product, folder, [*own, f"run.dir={run}"]) == [0] * size
    assert len(whole[tied]) > 4  # evaluations, too
    assert curve(run) == pytest.approx(whole[tied], rel=1e-10)


@pytest.mark.long
@pytest.mark.parametrize("strategy", quickly(["ddp", "fsdp", "tp", "pp"], "fsdp"))
def test_a_run_in_chunks_resumes_to_the_bit(processes: Processes, tmp_path: Path, strategy: str) -> None:
    words = [*WORDS, CHUNKS, f"strategy={strategy}", "loop.micro_batches=2", "schedule=constant"]
    for more in (["run.dir=unbroken"], ["run.dir=begun", "loop.steps=2"], ["run.dir=on", "run.resume=begun"]):
        assert processes.run(2, product, tmp_path, [*words, *more]) == [0, 0]
    unbroken, on = ([line["loss_hex"] for line in lines(tmp_path / run, "train")] for run in ("unbroken", "on"))
    assert len(on) == 2
    assert on == unbroken[2:]


class Guesses(NextToken):
    """Counts what it guesses right, for which it wants scores."""

    def metrics(self, output: Tensor, target: Tensor) -> dict[str, Tensor]:
        return {"right": (output.argmax(-1) == target).sum()}

    def finish(self, totals: dict[str, Tensor]) -> dict[str, float]:
        return {**super().finish(totals), "right": float(totals["right"] / totals["weight"])}


@pytest.mark.parametrize(("size", "strategy"), quickly([(1, "single"), (2, "pp")], (1, "single")))
def test_who_wants_scores_gets_them(
    processes: Processes, folder: Path, whole: Any, size: int, strategy: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    run = folder / f"guesses-{strategy}"
    own = [f"task._target_={__name__}.Guesses", "trust=[tests]", f"strategy={strategy}", "loop.micro_batches=2"]
    assert processes.run(size, product, folder, [*WORDS, CHUNKS, *own, f"run.dir={run}"]) == [0] * size
    assert curve(run) == pytest.approx(whole[False], rel=1e-10)
    assert 0 <= lines(run, "eval")[-1]["right"] < 0.5
    if size == 1:
        monkeypatch.chdir(folder)
        assert here(f"run.dir={run}", "job=predict", "trust=[tests]") == 0
        assert load_file(run / "predict/predictions.safetensors")["output"].shape == (12, 8, VOCABULARY)


def test_a_network_that_cannot_is_refused_and_so_is_no_chunk() -> None:
    with pytest.raises(Refusal, match=r"task\.loss_chunk=4: Linear has no method losses\(.*loss_chunk=null works"):
        NextToken(loss_chunk=4).check(nn.Linear(2, 2))
    NextToken().check(nn.Linear(2, 2))
    with pytest.raises(Refusal, match=r"task\.loss_chunk=0: it is a number of tokens"):
        NextToken(loss_chunk=0)


@pytest.mark.long
def test_a_plan_shows_the_memory_that_chunks_save(tmp_path: Path) -> None:
    peaks = []
    for chunk in ("null", "32"):
        words = [*WORDS[:-1], "data.length=64", "data.vocab_size=8192", f"task.loss_chunk={chunk}"]
        # a process of its own: a plan forks, which autograd's threads of other tests would not survive
        words += [f"run.dir=chunks-{chunk}", "job=plan", "job.processes=[1]", "job.device=cpu"]
        finish(single(*words), tmp_path)
        peaks.append(json.loads((tmp_path / f"chunks-{chunk}/plan/plan.json").read_text())["rows"][0]["peak"])
    scores = 12 * 64 * 8192 * 4
    assert peaks[0] > 2 * scores  # they, and their gradient
    assert peaks[1] < scores / 2


def test_what_is_computed_again_is_no_operation_of_the_step() -> None:
    from recipes.language.decoder import Decoder

    network, example = Decoder(64, 16, 32, 2), (torch.zeros(2, 16, dtype=torch.int64),) * 2
    assert count_step_flops(NextToken(loss_chunk=4), network, example, 8) == count_step_flops(
        NextToken(), network, example, 8
    )
