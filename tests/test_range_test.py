"""`job=lr`: which learning rate suits a run? The same answer under every strategy, and nothing stays but a picture."""

from __future__ import annotations

import math
import re
import shlex
from pathlib import Path
from typing import Any

import pytest
from PIL import Image

from tests.ranks import Processes
from tests.run import SMALL, TRANSFORMER, quickly, run
from trainer.jobs.rate_curve import RateCurve

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


def test_a_loss_that_does_not_fall_or_is_no_number_suggests_nothing() -> None:
    flat, broken = swept(lambda at: 2.3), swept(lambda at: math.nan)
    assert not flat.diverged
    assert len(flat.losses) == 200
    assert flat.find_rates() is None
    assert broken.diverged
    assert (broken.losses, broken.smoothed(), broken.find_rates()) == ([], [], None)


def test_the_rate_that_it_suggests_trains_and_no_trace_is_left(tmp_path: Path) -> None:
    run([*WORDS, "job.plot=null", "run.name=first", "seed=1"], place=tmp_path)
    assert [*tmp_path.iterdir()] == []
    said = run(WORDS, place=tmp_path).out.rstrip().splitlines()
    assert [path.name for path in tmp_path.iterdir()] == ["lr.png"]
    with Image.open(tmp_path / "lr.png") as picture:
        assert picture.size == (900, 480)
    at = next(number for number, line in enumerate(said) if line.startswith("suggestion  optimizer.lr="))
    command = shlex.split(said[at + 1])
    assert command[:3] == ["python", "-m", "trainer"]
    assert not [word for word in command if word.startswith("job")]
    losses = run([*command[3:], "loop.steps=60", "loop.eval_every=null", "run.dir=run"], place=tmp_path).curve()
    assert sum(losses[-5:]) < 0.25 * sum(losses[:5])


@pytest.mark.parametrize(
    ("words", "said"),
    [
        ("job.lowest=1 job.highest=0.1", "job.highest=0.1"),
        ("job.plot=nowhere/lr.png", "in a folder that there is"),
        ("run.resume=run", "init_from=run takes its weights"),
        ("optimizer.lr=0", "optimizer.lr is 0"),
    ],
)
def test_what_cannot_be_tested_is_refused(tmp_path: Path, words: str, said: str) -> None:
    assert said in run([*WORDS, *words.split()], place=tmp_path, code=2).out


def rows(said: str) -> list[list[str]]:
    """Rate and loss of the table, up to the rate that is suggested: behind it small differences become large ones."""
    (rate,) = re.findall(r"^suggestion  optimizer.lr=([\d.e+-]+)", said, re.MULTILINE)
    table = [line.split() for line in re.findall(r"^  (\d\.\d\de[+-]\d\d +\S+)$", said, re.MULTILINE)]
    return [row for row in table if float(row[0]) <= float(rate)] + [[rate]]


@pytest.mark.parametrize("strategy", quickly(["ddp", "fsdp", "zero1", "tp"], "ddp"))
def test_every_strategy_sees_the_same_losses_and_all_ranks_stop_alike(
    processes: Processes, tmp_path: Path, strategy: str
) -> None:
    words = [*TEST, "job.plot=null", "precision=fp64", "optimizer=sgd", *TRANSFORMER, "model.depth=1"]
    words += ["optimizer.groups=[{pattern:head,lr:1e-4}]"]  # a rate of its own rises in proportion
    alone = run(words, place=tmp_path)
    assert len(rows(alone.out)) > 5
    assert rows(run([*words, f"strategy={strategy}"], 2, "group", place=tmp_path).out) == rows(alone.out)
    assert [*tmp_path.iterdir()] == []
