"""The moving average of the weights (ema.decay) in a run; that every strategy has the same one: test_contract."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor, nn
from torch.optim.swa_utils import AveragedModel, get_ema_multi_avg_fn

from tests.commands import SMALL, curve, lines
from tests.inside import product
from tests.test_trainer import made
from trainer.launch.rendezvous import Launch
from trainer.learning.intervals import Interval, Trigger
from trainer.loop.evaluation import evaluate
from trainer.messages import Refusal
from trainer.strategies.ema import MovingAverage

WORDS = [*SMALL, "schedule=constant", "loop.global_batch=120", "loop.eval_every=4", "loop.save_every=4"]


def run(place: Path, name: str, *words: str) -> Path:
    assert product(Launch(), place, [*WORDS, f"run.dir={name}", *words]) == 0
    return place / name


def stored(folder: Path, step: int) -> dict[str, Tensor]:
    files = (folder / "checkpoints" / f"step-{step:08d}").glob("*.safetensors")
    return {name: tensor for file in files for name, tensor in load_file(file).items()}


def averages(folder: Path, step: int) -> dict[str, Tensor]:
    return {name.removeprefix("ema/"): one for name, one in stored(folder, step).items() if name.startswith("ema/")}


@pytest.mark.parametrize("every", [pytest.param(1, marks=pytest.mark.long), 3])
def test_it_is_torchs_and_the_curve_is_the_one_without(tmp_path: Path, every: int) -> None:
    words = ["loop.steps=8", "loop.save_every=1", "checkpoint.keep=9"]
    with_it = run(tmp_path, "with", "ema.decay=0.8", f"ema.every={every}", *words)
    without = run(tmp_path, "without", *words)
    assert curve(with_it, "loss_hex") == curve(without, "loss_hex")
    network, averaged = nn.ParameterDict(), None
    for step in range(1, 9):
        own = {name: one for name, one in stored(with_it, step).items() if "/" not in name}
        network = nn.ParameterDict({name.replace(".", "_"): one for name, one in own.items()})
        if step % every == 0:
            averaged = averaged or AveragedModel(network, multi_avg_fn=get_ema_multi_avg_fn(0.8))
            averaged.update_parameters(network)
        wanted = {} if averaged is None else averaged.module.state_dict()
        found = {name.replace(".", "_"): one for name, one in averages(with_it, step).items()}
        assert found.keys() == wanted.keys()
        assert all(torch.equal(found[name], wanted[name]) for name in wanted)


def test_its_figures_are_those_of_a_network_that_holds_it(tmp_path: Path) -> None:
    with made(tmp_path, steps=8, best="-ema_loss", log_trigger=Trigger([Interval(steps=1)])) as whole:
        trainer = whole.trainer
        trainer.model.keep_average(0.7, every=1)
        trainer.fit(None)
        said = whole.lines("eval")[-1]
        kept = {name.removeprefix("ema/"): one for name, one in trainer.model.average.state().items()}
        trainer.model.network.load_state_dict(kept, strict=False)
        assert trainer.eval_loader is not None
        found = evaluate(trainer.strategy, trainer.model, trainer.task, trainer.eval_loader, lambda: False)
    assert found is not None
    for name in ("loss", "perplexity", "macro"):
        assert found[name] == said[f"ema_{name}"]
    assert said["ema_loss"] != said["loss"]


def test_a_run_that_goes_on_goes_on_with_it_to_the_bit_and_says_where_there_is_none(tmp_path: Path) -> None:
    whole = run(tmp_path, "whole", "ema.decay=0.9", "loop.steps=8")
    for steps in (4, 8):
        parts = run(tmp_path, "parts", "ema.decay=0.9", f"loop.steps={steps}")
    assert lines(parts, "eval") == lines(whole, "eval")
    one, other = averages(parts, 8), averages(whole, 8)
    assert one.keys() == other.keys() != set()
    assert all(torch.equal(one[name], other[name]) for name in one)
    # a run without it goes on from such a checkpoint, and one with it from a checkpoint that has none
    run(tmp_path, "whole", "loop.steps=12")
    assert "moving average is dropped: ema.decay=null" in (whole / "logs" / "rank-0.log").read_text()
    assert averages(whole, 12) == {}
    run(tmp_path, "whole", "loop.steps=13", "ema.decay=0.5")
    assert "has no moving average; it starts from the weights" in (whole / "logs" / "rank-0.log").read_text()
    assert all(torch.equal(one, stored(whole, 13)[name]) for name, one in averages(whole, 13).items())
    assert curve(whole)[:8] == curve(parts)


def test_it_goes_on_where_other_parameters_are_frozen(tmp_path: Path) -> None:
    words = ["ema.decay=0.5", "loop.save_every=1", "checkpoint.keep=9"]
    folder = run(tmp_path, "run", *words, "loop.steps=3", "model.freeze=['1']")
    assert set(averages(folder, 3)) == {"3.weight", "3.bias", "5.weight", "5.bias"}
    run(tmp_path, "run", *words, "loop.steps=4", "run.accept_changes=true")
    # what did not move until then is its own average
    before, weights, after = averages(folder, 3), stored(folder, 3), stored(folder, 4)
    assert len(averages(folder, 4)) == 6
    for name, average in averages(folder, 4).items():
        assert torch.equal(average, torch.lerp(before.get(name, weights[name]), after[name], 0.5)), name


def test_a_step_that_was_left_out_moves_nothing() -> None:
    network = nn.Linear(2, 2)
    average = MovingAverage(network, 0.5, 1)
    average.update(1, 0.0)
    first = network.weight.detach().clone()
    nn.init.zeros_(network.weight)
    average.update(2, torch.tensor(1.0))
    assert torch.equal(average.state()["ema/weight"], first)
    average.update(3, torch.tensor(0.0))
    assert torch.equal(average.state()["ema/weight"], first / 2)


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["ema.decay=1"], "ema.decay=1: expected a number from 0 on and below 1"),
        (["ema.every=0"], "ema.every=0"),
        (["checkpoint.best=ema_accuracy"], "those of a moving average come with ema.decay=0.999"),
        (["checkpoint.best=ema_acuracy", "ema.decay=0.9"], "did you mean 'ema_accuracy'"),
    ],
)
def test_what_cannot_be_is_refused(tmp_path: Path, words: Any, said: str) -> None:
    with pytest.raises(Refusal, match=said):
        run(tmp_path, "no", *words)
