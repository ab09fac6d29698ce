"""Folders of very many pictures: listed once on a machine, and again as soon as anything has changed in them."""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path
from unittest.mock import patch

import pytest
import torch
from PIL import Image

from recipes.vision.cached import cache_folder
from tests.commands import curve
from tests.inside import product
from tests.processes import Processes
from tests.recipes.test_folder import data, memory_peak, write
from trainer.launch.rendezvous import Launch
from trainer.messages import Refusal

WORDS = (
    "data=imagefolder",
    "data.image_size=8",
    "model=mlp",
    "model.width=8",
    "loop.global_batch=6",
    "loop.steps=2",
    "loop.log_every=1",
)


@pytest.fixture(autouse=True)
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    return tmp_path / "cache" / "trainer" / "listings"


def count_listed(launch: Launch, home: Path, root: Path, words: list[str]) -> int:
    """Run the product; how many folders of pictures this rank has listed meanwhile."""
    listed: list[str] = []
    scandir = os.scandir

    def counting(path: str = ".") -> object:
        listed.append(os.fspath(path))
        return scandir(path)

    with patch.dict("os.environ", XDG_CACHE_HOME=str(home)), patch("os.scandir", counting):
        assert product(launch, root.parent, [f"data.root={root}", *WORDS, *words]) == 0
    return sum(Path(path).parent.name in ("train", "val") for path in listed)


def test_one_rank_of_a_machine_lists_the_files(tmp_path: Path, processes: Processes) -> None:
    root = write(tmp_path / "data", {"train": 4, "val": 1})
    two = ["strategy=ddp", "loader.workers=0", "run.dir=two"]
    # three classes of two parts; a later start looks at the folders, not into them
    assert sorted(processes.run(2, count_listed, tmp_path / "cache", root, two)) == [0, 6]
    assert count_listed(Launch(), tmp_path / "cache", root, ["loader.workers=0", "run.dir=later"]) == 0
    assert curve(tmp_path / "two", "sample_digest") == curve(tmp_path / "later", "sample_digest")


def add(root: Path) -> None:
    (root / "ant" / "new.jpg").touch()


def swap(root: Path) -> None:
    """Another folder in the place of one, of the same age by all that `cp -a` keeps."""
    old, new = root / "bee", root.parent / "other"
    new.mkdir()
    (new / "other.png").touch()
    os.utime(new, ns=(old.stat().st_atime_ns, old.stat().st_mtime_ns))
    old.rename(root.parent / "gone")
    new.rename(old)


def add_and_set_back(root: Path) -> None:
    before = (root / "bee").stat().st_mtime_ns
    (root / "bee" / "new.jpg").touch()
    os.utime(root / "bee", ns=(before, before))


def move_into_new(path: Path) -> None:
    (path.parent / "in").mkdir()
    path.rename(path.parent / "in" / path.name)


CHANGES: dict[str, Callable[[Path], object]] = {
    "added": add,
    "removed": lambda root: (root / "cat" / "01.jpg").unlink(),
    "renamed": lambda root: (root / "ant" / "00.jpg").rename(root / "ant" / "9.jpg"),
    "in a subfolder": lambda root: (root / "cat" / "more" / "deep" / "1.jpg").unlink(),
    "a new subfolder": lambda root: move_into_new(root / "ant" / "02.jpg"),
    "a class": lambda root: (root / "cat").rename(root / "dog"),
    "swapped": swap,
    "set back": add_and_set_back,
    "torn cache": lambda root: os.truncate(next((root.parent / "cache/trainer/listings").iterdir()), 200),
}


def test_after_each_change_the_files_are_listed_anew(tmp_path: Path, cache: Path) -> None:
    root = write(tmp_path / "data", {"": 3})
    (root / "cat" / "more" / "deep").mkdir(parents=True)
    Image.new("RGB", (8, 8)).save(root / "cat" / "more" / "deep" / "1.jpg")
    for name, change in {"nothing": lambda root: None, **CHANGES}.items():
        change(root)
        # at once after the change, within the tick of the file system's clock; then from the cache
        for _ in range(2):
            train = data(root, held_out=0.0).train()
            files = [train.sources.name(at) for at in range(len(train))]
            assert files == sorted(str(path) for path in root.rglob("*.*")), name
    assert len([*cache.iterdir()]) == 1


def test_without_a_cache_the_files_are_listed_all_the_same(
    tmp_path: Path, cache: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    root = write(tmp_path / "data", {"": 3})
    cache.parent.parent.write_text("no folder")
    assert len(data(root, held_out=0.0).train()) == 9
    for variable in ("XDG_CACHE_HOME", "HOME"):
        monkeypatch.delenv(variable)
    # a container of a user who has a number and no name
    with patch("pwd.getpwuid", side_effect=KeyError):
        assert len(data(root, held_out=0.0).train()) == 9
        with pytest.raises(Refusal, match=r"user \d+ has no home folder, .*: set XDG_CACHE_HOME to a folder"):
            cache_folder()


@pytest.mark.long
def test_memory_of_a_hundred_thousand_files(tmp_path: Path) -> None:
    root = write(tmp_path / "data", {"": 1})
    for folder in root.iterdir():
        for at in range(30_000):
            os.link(folder / "00.jpg", folder / f"picture_{at:08}.JPEG")
    peaks = []
    for _ in range(2):
        before = memory_peak(fresh=True)
        one = data(root)
        sizes = len(one.train()), len(one.evaluation())
        peaks.append(memory_peak() - before)
        assert torch.equal(*(one.order(1, torch.Generator().manual_seed(0)) for _ in range(2)))
    assert sizes == (81_003, 9_000)
    # as lists of paths they took 30 MB; from the cache they are pages that all ranks share
    assert peaks[0] < 25 * 2**20, peaks
    assert peaks[1] < 12 * 2**20, peaks
