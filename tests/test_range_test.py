"""`job=lr`: which learning rate suits a run? The same answer under every strategy, and nothing stays but a picture."""

from __future__ import annotations

import math
import shlex
from pathlib import Path
from typing import Any
from unittest.mock import patch

import pytest
from omegaconf import OmegaConf
from PIL import Image

from tests.commands import SMALL, TRANSFORMER, curve
from tests.inside import here, product
from tests.processes import Processes
from tests.quick import quickly
from trainer.configuration.compose import compose
from trainer.jobs.range_test import RangeTest
from trainer.jobs.rate_curve import RateCurve, draw_blocks
from trainer.launch.rendezvous import Launch
from trainer.messages import Refusal

TEST = ["job=lr", "job.lowest=1e-4", "job.highest=1000", "job.steps=60", "loop.global_batch=120"]
WORDS = [*SMALL, *TEST]


def swept(loss: Any, steps: int = 200) -> RateCurve:
    """A test whose loss is a function of log10 of the rate, with noise."""
    result = RateCurve(1e-6, 10.0, steps, 0)
    for step in range(steps):
        result.train({"loss": loss(math.log10(result.rate(step))) + 0.02 * math.sin(step * 37.0)})
    return result


@pytest.mark.parametrize("below", [0.0, 5.0])
def test_it_suggests_where_the_fall_ends_and_stops_where_the_loss_explodes(below: float) -> None:
    # falls around 1e-4 as a logistic, is flat from 1e-3 on, and explodes at 0.1; of losses below 0 too
    seen = swept(lambda at: 2.0 / (1 + math.exp(5 * (at + 4))) + 0.3 + 10.0 ** max(0.0, 8 * (at + 1)) - 1 - below)
    found = seen.find_rates()
    assert found is not None
    assert seen.diverged
    assert 0.1 < seen.rate(len(seen.losses)) < 0.25
    assert seen.rate(found.steepest) == pytest.approx(1e-4, rel=0.5)
    assert 2e-4 < seen.rate(found.chosen) < 3e-3
    assert found.steepest < found.chosen <= found.lowest
    blocks, mark = draw_blocks(seen.smoothed(), found.chosen)
    assert 0 < len(mark) < len(blocks) == 60


def test_a_loss_that_does_not_fall_or_is_no_number_suggests_nothing() -> None:
    flat, broken = swept(lambda at: 2.3), swept(lambda at: math.nan)
    assert not flat.diverged
    assert len(flat.losses) == 200
    assert flat.find_rates() is None
    assert broken.diverged
    assert (broken.losses, broken.smoothed(), broken.find_rates()) == ([], [], None)


def test_the_rate_that_it_suggests_trains_and_no_trace_is_left(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    assert here(*WORDS, "job.plot=null", "run.name=first", "seed=1") == 0
    assert [*tmp_path.iterdir()] == []
    assert here(*WORDS) == 0
    assert [path.name for path in tmp_path.iterdir()] == ["lr.png"]
    with Image.open("lr.png") as picture:
        assert picture.size == (900, 480)
    said = capsys.readouterr().out.rstrip().splitlines()
    at = next(number for number, line in reversed([*enumerate(said)]) if line.startswith("suggestion  optimizer.lr="))
    command = shlex.split(said[at + 1])
    assert command[:3] == ["python", "-m", "trainer"]
    assert not [word for word in command if word.startswith("job")]
    assert here(*command[3:], "loop.steps=60", "loop.eval_every=null", "run.dir=run") == 0
    losses = curve(Path("run"))
    assert sum(losses[-5:]) < 0.25 * sum(losses[:5])
    # refused before anything is read
    for words, what in (
        (["job.lowest=1", "job.highest=0.1"], "job.highest=0.1"),
        (["job.plot=nowhere/lr.png"], "in a folder that there is"),
        (["run.resume=run"], "init_from=run takes its weights"),
        (["optimizer.lr=0"], "optimizer.lr is 0"),
    ):
        with pytest.raises(Refusal, match=what):
            here(*WORDS, *words)


def seen_by_rank(launch: Launch, place: Path, words: list[str]) -> RateCurve:
    """What a rank has seen of a test."""
    seen: list[RateCurve] = []
    train = RangeTest._train

    def keep(self: RangeTest, run: Any, curve: RateCurve, *others: Any) -> bool:
        seen.append(curve)
        return train(self, run, curve, *others)

    with patch.object(RangeTest, "_train", keep):
        assert product(launch, place, words) == 0
    return seen[0]


STRATEGIES = ["ddp", "fsdp", "zero1", "tp"]


@pytest.mark.parametrize("strategy", quickly(STRATEGIES))
def test_every_strategy_sees_the_same_losses_and_all_ranks_stop_alike(
    processes: Processes, tmp_path: Path, strategy: str
) -> None:
    words = [*TEST, "job.plot=null", "precision=fp64", "optimizer=sgd"]
    # a group with a rate of its own rises in proportion
    words += [*TRANSFORMER, "model.depth=1", "optimizer.groups=[{pattern:head,lr:1e-4}]"]
    (alone,) = processes.run(1, seen_by_rank, tmp_path, words)
    spread = processes.run(2, seen_by_rank, tmp_path, [*words, f"strategy={strategy}"])
    found = alone.find_rates()
    assert alone.diverged
    assert found is not None
    for seen in spread:
        assert (seen.diverged, seen.find_rates()) == (True, found)
        # behind it the smallest difference becomes a large one, under any strategy
        assert seen.losses[: found.lowest] == pytest.approx(alone.losses[: found.lowest], rel=1e-10)
    assert len(spread[0].losses) == len(spread[1].losses)
    assert [*tmp_path.iterdir()] == []


def test_rates_of_their_own_are_in_the_command_as_they_were_in_the_test(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    groups = "optimizer.groups=[{pattern:'1',lr:0.002},{pattern:'3',weight_decay:0}]"
    words = ["optimizer=muon", "optimizer.lr=0.001", "optimizer.adamw_lr=0.004", groups]
    assert here(*WORDS, *words, "job.plot=null") == 0
    command = shlex.split(capsys.readouterr().out.rstrip().splitlines()[-1])
    optimizer: Any = OmegaConf.to_container(compose(command[3:]).optimizer)
    rate = optimizer["lr"]
    assert rate != 0.001
    assert optimizer["adamw_lr"] == pytest.approx(4 * rate, rel=0.05)
    assert optimizer["groups"] == [
        {"pattern": "1", "lr": pytest.approx(2 * rate, rel=0.05)},
        {"pattern": "3", "weight_decay": 0},
    ]
