"""data=shards: tars in a folder or a bucket, one curve on any number of ranks, and what goes wrong with a storage."""

from __future__ import annotations

import io
import os
import re
import subprocess
import sys
import tarfile
from collections.abc import Iterator
from pathlib import Path

import numpy
import pytest
from PIL import Image

from tests.run import ROOT, curve, run
from tests.s3_server import BUCKET, S3Server, s3_server

SHARDS, PER_SHARD, CLASSES = 8, 60, 4
WORDS = ["data=shards", "data.image_size=32", "model=cnn", "model.width=8", "loop.global_batch=24"]
WORDS += ["loop.log_every=1", "precision=fp64", "loader.workers=0", "loop.steps=20"]
URL = f"s3://{BUCKET}/set"


def write_shards(folder: Path) -> None:
    """Pictures in which a bright stripe says the class: 8 tars of 60."""
    folder.mkdir()
    random = numpy.random.default_rng(0)
    for shard in range(SHARDS):
        with tarfile.open(folder / f"{shard:03}.tar", "w") as file:
            for number in range(shard * PER_SHARD, (shard + 1) * PER_SHARD):
                label = number % CLASSES
                picture = random.integers(0, 80, (32, 32, 3)).astype("uint8")
                picture[:, label * 8 : label * 8 + 8] += 150
                content = io.BytesIO()
                Image.fromarray(picture).save(content, "PNG")
                for ending, data in (("png", content.getvalue()), ("cls", str(label).encode())):
                    entry = tarfile.TarInfo(f"{number:06}.{ending}")
                    entry.size = len(data)
                    file.addfile(entry, io.BytesIO(data))


def index(*words: str, code: int = 0, environment: dict[str, str] | None = None) -> str:
    """What scripts/index_shards.py says."""
    command = [sys.executable, str(ROOT / "scripts/index_shards.py"), *words]
    ended = subprocess.run(command, capture_output=True, text=True, env={**os.environ, **(environment or {})})
    assert ended.returncode == code, ended.stderr
    return ended.stdout + ended.stderr


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Shards on the disk, indexed."""
    folder = tmp_path_factory.mktemp("shards") / "set"
    write_shards(folder)
    index(str(folder))
    return folder


@pytest.fixture
def server(folder: Path) -> Iterator[S3Server]:
    """The same in a bucket, with its index."""
    pytest.importorskip("s3fs")
    pytest.importorskip("moto")
    with s3_server() as server:
        server.files().put(str(folder), f"{BUCKET}/set", recursive=True)
        server.requests.clear()
        yield server


def at(place: Path, root: Path | str, *words: str) -> list[str]:
    return [*WORDS, f"data.root={root}", f"data.cache={place}/cache", f"run.dir={place}/run", *words]


@pytest.mark.long
@pytest.mark.parametrize("ranks", [(1, 1), (2, 3)])
def test_ranks_come_and_go_and_the_curve_is_that_of_one_process(
    folder: Path, tmp_path: Path, ranks: tuple[int, int]
) -> None:
    """A run that stops in the middle of an epoch goes on with other ranks and another strategy."""
    words = ["schedule=constant", "device=cpu", "log=[]", "run.accept_changes=true"]
    whole = run(at(tmp_path / "whole", folder, "strategy=single", *words), place=tmp_path)
    for size, steps in ((ranks[0], 7), (ranks[1], 14), (1, 20)):
        strategy = {1: "single", 2: "ddp", 3: "fsdp"}[size]
        again = at(tmp_path / "parts", folder, f"strategy={strategy}", f"loop.steps={steps}", *words)
        parts = run(again, size, "here" if size == 1 else "process", place=tmp_path)
    assert parts.curve("sample_digest") == whole.curve("sample_digest")
    assert parts.curve() == pytest.approx(whole.curve(), abs=1e-10)
    assert parts.lines("eval")[-1]["accuracy"] == whole.lines("eval")[-1]["accuracy"]


@pytest.mark.long
def test_a_bucket_gives_the_curve_of_a_folder_whatever_goes_wrong_on_the_way(
    server: S3Server, folder: Path, tmp_path: Path
) -> None:
    run(at(tmp_path / "local", folder, "strategy=single"), place=tmp_path)
    for kind in ("503", "cut", "slow", "lost"):
        server.plant(kind, "GET", ".tar")
    words = at(tmp_path / "bucket", URL, "strategy=single")
    run(words, place=tmp_path, environment=server.environment)
    for key in ("loss", "sample_digest"):
        assert curve(tmp_path / "bucket/run", key) == curve(tmp_path / "local/run", key)
    # a missing shard is named and has its budget
    server.files().rm_file(f"{BUCKET}/set/003.tar")
    for name, more, code in (
        ("strict", [], 1),
        ("budget", ["data.on_bad=skip", "data.bad_budget=0.05"], 1),
        ("lenient", ["data.on_bad=skip", "data.bad_budget=0.2"], 0),
    ):
        words = at(tmp_path / name, URL, "strategy=single", *more)
        said = run(words, place=tmp_path, environment=server.environment, code=code).out
        assert ("003.tar is missing" in said) or not code


@pytest.mark.long
def test_what_is_no_set_of_shards_is_refused(tmp_path: Path) -> None:
    (tmp_path / "set").mkdir()
    said = run(at(tmp_path, tmp_path / "set"), place=tmp_path, code=2).out
    assert re.search(r"has no index of its shards .*: python scripts/index_shards.py", said)
    assert "expected files ending in .tar or .parquet" in index(str(tmp_path / "set"), code=2)
