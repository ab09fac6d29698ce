"""`job=lr`: which learning rate suits a run? The same answer under every strategy, and nothing stays but a picture."""

from __future__ import annotations

import re
import shlex
from pathlib import Path

import pytest
from PIL import Image

from tests.ranks import Processes
from tests.run import SMALL, TRANSFORMER, run

TEST = ["job=lr", "job.lowest=1e-4", "job.highest=1000", "job.steps=60", "loop.global_batch=120"]
WORDS = [*SMALL, *TEST]


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


@pytest.mark.long
@pytest.mark.parametrize("strategy", ["ddp", "fsdp", "zero1", "tp"])
def test_every_strategy_sees_the_same_losses_and_all_ranks_stop_alike(
    processes: Processes, tmp_path: Path, strategy: str
) -> None:
    words = [*TEST, "job.plot=null", "precision=fp64", "optimizer=sgd", *TRANSFORMER, "model.depth=1"]
    words += ["optimizer.groups=[{pattern:head,lr:1e-4}]"]  # a rate of its own rises in proportion
    alone = run(words, place=tmp_path)
    assert len(rows(alone.out)) > 5
    assert rows(run([*words, f"strategy={strategy}"], 2, "group", place=tmp_path).out) == rows(alone.out)
    assert [*tmp_path.iterdir()] == []
