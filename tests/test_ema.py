"""The moving average of the weights (ema.decay) in a run; that every strategy has the same one: test_contract."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor, nn
from torch.optim.swa_utils import AveragedModel, get_ema_multi_avg_fn

from tests.run import SMALL, Finished, run
from tests.test_initial_weights import STILL, equal

WORDS = [*SMALL, "schedule=constant", "loop.global_batch=120", "loop.eval_every=4", "loop.save_every=4"]


def train(place: Path, name: str, *words: str) -> Finished:
    return run([*WORDS, f"run.dir={name}", *words], place=place)


def stored(done: Finished, step: int) -> dict[str, Tensor]:
    files = (done.folder / "checkpoints" / f"step-{step:08d}").glob("*.safetensors")
    return {name: tensor for file in files for name, tensor in load_file(file).items()}


def averages(done: Finished, step: int) -> dict[str, Tensor]:
    return {name.removeprefix("ema/"): one for name, one in stored(done, step).items() if name.startswith("ema/")}


@pytest.mark.parametrize("every", [pytest.param(1, marks=pytest.mark.long), 3])
def test_it_is_torchs_its_figures_are_those_of_its_weights_and_the_curve_is_the_one_without(
    tmp_path: Path, every: int
) -> None:
    words = ["loop.steps=8", "loop.save_every=1", "checkpoint.keep=9"]
    done = train(tmp_path, "with", "ema.decay=0.8", f"ema.every={every}", *words)
    assert done.curve("loss_hex") == train(tmp_path, "without", *words).curve("loss_hex")
    averaged = None
    for step in range(1, 9):
        own = {name: one for name, one in stored(done, step).items() if "/" not in name}
        network = nn.ParameterDict({name.replace(".", "_"): one for name, one in own.items()})
        if step % every == 0:
            averaged = averaged or AveragedModel(network, multi_avg_fn=get_ema_multi_avg_fn(0.8))
            averaged.update_parameters(network)
        wanted = {} if averaged is None else averaged.module.state_dict()
        assert equal({name.replace(".", "_"): one for name, one in averages(done, step).items()}, wanted), step
    # an evaluation of a network that holds it
    torch.save(averages(done, 8), tmp_path / "average.pt")
    still = train(tmp_path, "still", *STILL, "init_from=average.pt", "loop.steps=1", "loop.eval_every=1")
    figures, last = still.lines("eval")[0], done.lines("eval")[-1]
    for name in ("loss", "accuracy"):
        assert figures[name] == pytest.approx(last[f"ema_{name}"], rel=1e-6)
    assert last["ema_loss"] != last["loss"]


def test_a_run_that_goes_on_goes_on_with_it_to_the_bit_and_says_where_there_is_none(tmp_path: Path) -> None:
    whole = train(tmp_path, "whole", "ema.decay=0.9", "loop.steps=8")
    for steps in (4, 8):
        parts = train(tmp_path, "parts", "ema.decay=0.9", f"loop.steps={steps}")
    assert parts.lines("eval") == whole.lines("eval")
    assert equal(averages(parts, 8), averages(whole, 8))
    assert averages(parts, 8)
    # a run without it goes on from such a checkpoint, and one with it from a checkpoint that has none
    train(tmp_path, "whole", "loop.steps=12")
    log = whole.folder / "logs" / "rank-0.log"
    assert "moving average is dropped: ema.decay=null" in log.read_text()
    assert averages(whole, 12) == {}
    train(tmp_path, "whole", "loop.steps=13", "ema.decay=0.5")
    assert "has no moving average; it starts from the weights" in log.read_text()
    assert all(torch.equal(one, stored(whole, 13)[name]) for name, one in averages(whole, 13).items())
    assert whole.curve()[:8] == parts.curve()


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["ema.decay=1"], "ema.decay=1: expected a number from 0 on and below 1"),
        (["ema.every=0"], "ema.every=0"),
        (["checkpoint.best=ema_accuracy"], "those of a moving average come with ema.decay=0.999"),
        (["checkpoint.best=ema_acuracy", "ema.decay=0.9"], "did you mean 'ema_accuracy'"),
    ],
)
def test_what_cannot_be_is_refused(tmp_path: Path, words: list[str], said: str) -> None:
    assert said in run([*WORDS, *words, "run.dir=no"], place=tmp_path, code=2).out
