"""A run that resumes learns from the samples that it began with, or says that they are others."""

from __future__ import annotations

import json
import random
from pathlib import Path
from typing import Any

import numpy
import pytest
import torch
from PIL import Image
from torch import Tensor
from torch.utils.data import Dataset, TensorDataset

from tests.run import SMALL, run
from trainer import Data


def picture(path: Path, grey: int) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    Image.fromarray(numpy.full((8, 8), grey, dtype=numpy.uint8)).save(path)


@pytest.fixture
def place(tmp_path: Path) -> Path:
    """Pictures of two classes, as a user's folder has them."""
    for part, count in (("train", 20), ("val", 4)):
        for name in "ab":
            for number in range(count):
                picture(tmp_path / "set" / part / name / f"{number:02}.bmp", number)
    return tmp_path


def words(place: Path, steps: int, *more: str) -> list[str]:
    """A run on that folder, of so many steps of 8 samples."""
    data = ["data=imagefolder", f"data.root={place / 'set'}", "data.image_size=8"]
    own = ["strategy=single", "schedule=constant", "loop.global_batch=8", "loader.workers=0", f"loop.steps={steps}"]
    return [*SMALL, *data, *own, f"run.dir={place / 'run'}", *more]


@pytest.mark.long
def test_other_samples_than_before_are_refused_until_they_are_accepted(place: Path) -> None:
    first, log = place / "set" / "train" / "a", place / "run" / "logs" / "rank-0.log"
    run(words(place, 2))
    run(words(place, 3))  # the same ones
    for number in range(8):  # fewer
        (first / f"{number:02}.bmp").unlink()
    said = run(words(place, 4), code=2).out
    assert "other data:\n  samples of the training set: 40 → 32\nadd run.accept_changes=true" in said
    said = run(words(place, 4, f"run.resume={place / 'run'}", f"run.dir={place / 'new'}"), code=2).out
    assert "  samples of the training set: 40 → 32\n" in said
    assert not (place / "new").exists()
    run(words(place, 4, "run.accept_changes=true"))
    assert "changed     samples of the training set: 40 → 32" in log.read_text()
    run(words(place, 5))  # what was accepted is known from then on
    # as many, of other names
    (first / "19.bmp").rename(first / "99.bmp")
    assert "the training set: 32 samples → as many, but other samples" in run(words(place, 6), code=2).out
    # the old one is back; what is only evaluated may change, and that is said
    (first / "99.bmp").rename(first / "19.bmp")
    picture(place / "set" / "val" / "b" / "99.bmp", 0)
    ended = run(words(place, 6))
    assert "changed     samples of the evaluation set: 8 → 9" in log.read_text()
    assert (ended.status["step"], len(ended.curve())) == (6, 6)


def test_what_a_checkpoint_says_of_the_data(place: Path) -> None:
    saved = run(words(place, 1, "data.repeat=2")).folder / "checkpoints" / "step-00000001" / "state.json"
    said = json.loads(saved.read_text())["data"]
    assert [said[part]["samples"] for part in ("training", "evaluation")] == [40, 8]
    run(words(place, 2, "data.repeat=2"))  # the same samples
    (place / "set" / "train" / "a" / "00.bmp").unlink()
    assert "samples of the training set: 40 → 39" in run(words(place, 3, "data.repeat=2"), code=2).out


class Items(Dataset):
    """Ten items of whatever a function makes; what it opens when it is first read must not be open later."""

    def __init__(self, make: Any) -> None:
        self._make, self.opened = make, False

    def __len__(self) -> int:
        return 10

    def __getitem__(self, at: int) -> Any:
        self.opened = True
        return self._make(at)


def known(dataset: Any) -> str:
    return Data().fingerprint(dataset)


SURPRISE = random.Random()  # seeded by nobody


@pytest.mark.parametrize(
    "make",
    [
        lambda at: (torch.rand(3, 8, 8), at),  # noise from a generator that the run seeds
        lambda at: {"image": numpy.random.rand(4), "text": f"number {at}", "more": (None, [1.5])},
        lambda at: (SURPRISE.random(), at),
        lambda at: (object(), at, numpy.array([object()])),  # of which nothing can be seen
        lambda at: (Image.fromarray(numpy.full((4, 4), at, dtype=numpy.uint8)), at),
        lambda at: torch.full((4,), at * (1 + 1e-6 * SURPRISE.random())),  # other last bits, as on another processor
    ],
)
def test_what_is_random_in_items_gives_no_false_alarm_and_nothing_is_touched(make: Any) -> None:
    before, dataset = torch.random.get_rng_state(), Items(make)
    assert len({known(dataset), known(dataset), known(Items(make))}) == 1
    assert known(dataset) != known(Items(lambda at: make(at + 1)))  # the rest still tells sets apart
    assert not dataset.opened
    assert torch.equal(torch.random.get_rng_state(), before)


def test_a_set_may_say_what_it_is_and_one_that_cannot_be_read_says_nothing() -> None:
    class Told(TensorDataset):
        def fingerprint(self) -> str:
            return "version 3"

    class Pair(Dataset):
        def __len__(self) -> int:
            return 3

        def __getitem__(self, at: int) -> Tensor:
            raise OSError("a file that is not there")

    assert known(Told(torch.zeros(3))) == "version 3"
    assert known(Pair()) == ""
    assert known(TensorDataset(torch.zeros(3))) != known(TensorDataset(torch.zeros(4)))
