"""Runs of ten million steps: what a start, and the end of one, read of their files does not grow with them."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.commands import SMALL
from tests.inside import product
from trainer.launch.rendezvous import Launch

HOLE = 2**36  # bytes without a line break, of which the disk holds none: who reads them has no memory left
FILES = ("metrics.jsonl", "tensorboard/events.out.tfevents.1.old.1.0")


def make_long(path: Path) -> None:
    """As if many gigabytes stood between the first line of the file and its last ones."""
    path.touch()
    head, _, tail = path.read_bytes().partition(b"\n")
    with path.open("wb") as file:
        file.write(head + b"\n")
        file.seek(HOLE)
        file.write(b"\n" + tail)


@pytest.mark.long
@pytest.mark.parametrize("evaluation", ["loop.eval_every=5", "data=synthetic_images"])
def test_gigabytes_of_earlier_steps_are_not_read(tmp_path: Path, evaluation: str) -> None:
    words = [*SMALL, evaluation, "loop.steps=10", "loop.global_batch=8", "run.dir=run", "log=[tensorboard]"]
    words += ["data.size=64", "data.evaluation_size=0"] if evaluation.startswith("data") else []
    assert product(Launch(), tmp_path, [*words, "schedule=constant"]) == 0
    for name in FILES:
        make_long(tmp_path / "run" / name)
    assert product(Launch(), tmp_path, [*words, "schedule=constant", "loop.steps=12"]) == 0
    with (tmp_path / "run/metrics.jsonl").open("rb") as file:
        file.seek(HOLE + 1)
        assert b"\0" not in (tail := file.read())
    assert tail.count(b"\n") >= 11
