"""data=shards: tars in a folder or a bucket, one curve on any number of ranks, and what goes wrong with a storage."""

from __future__ import annotations

import io
import os
import signal
import subprocess
import sys
import tarfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy
import pytest
import torch
from PIL import Image

from recipes.shards.blocks import block_of_samples
from recipes.shards.cache import BlockCache
from recipes.shards.lanes import shuffled
from tests.commands import ROOT, Command, curve, lines, single
from tests.inside import here
from tests.s3_server import BUCKET, S3Server, s3_server
from trainer.messages import BadData, Refusal

SHARDS, PER_SHARD, CLASSES = 8, 60, 4
WORDS = ["data=shards", "data.image_size=32", "model=cnn", "model.width=8", "loop.global_batch=24", "log=[]"]
WORDS += ["loop.log_every=1", "device=cpu", "precision=fp64"]
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
    screen = index(str(folder))
    assert screen.count("\nindexed ") + screen.startswith("indexed ") == SHARDS
    # what is known is not read again, and is the same
    again = index(str(folder))
    assert again.splitlines()[0] == "8 of 8 shards were indexed already"
    assert again.splitlines()[1:] == screen.splitlines()[SHARDS:]
    # as a kill leaves it: some shards are not done, and there is no summary
    whole = (folder / "shards_index/index.json").read_text()
    next((folder / "shards_index/parts").iterdir()).unlink()
    (folder / "shards_index/index.json").unlink()
    resumed = index(str(folder))
    assert "7 of 8 shards were indexed already" in resumed
    assert (folder / "shards_index/index.json").read_text() == whole
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


@pytest.fixture
def in_process(server: S3Server, monkeypatch: pytest.MonkeyPatch) -> S3Server:
    for name, value in server.environment.items():
        monkeypatch.setenv(name, value)
    return server


def at(place: Path, root: Path | str, *words: str) -> list[str]:
    return [*WORDS, f"data.root={root}", f"data.cache={place}/cache", f"run.dir={place}/run", *words]


def read_bytes(server: S3Server) -> int:
    """How much was read of the shards."""
    return sum(request.sent for request in server.requests if request.path.endswith(".tar"))


@pytest.mark.long
def test_a_bucket_gives_the_curve_of_a_folder_whatever_goes_wrong_on_the_way(
    in_process: S3Server, folder: Path, tmp_path: Path
) -> None:
    here(*at(tmp_path / "local", folder, "strategy=single", "loop.steps=20"))
    for kind in ("503", "cut", "slow", "lost"):
        in_process.plant(kind, "GET", ".tar")
    here(*at(tmp_path / "bucket", URL, "strategy=single", "loop.steps=20", "loader.workers=0"))
    assert curve(tmp_path / "bucket/run") == curve(tmp_path / "local/run")
    digests = [curve(tmp_path / name / "run", "sample_digest") for name in ("bucket", "local")]
    assert digests[0] == digests[1]
    # a second epoch, another run: what is on the local disk is not read again
    whole = sum(path.stat().st_size for path in folder.glob("*.tar"))
    assert read_bytes(in_process) < 1.1 * whole
    in_process.requests.clear()
    here(*at(tmp_path / "bucket", URL, "strategy=single", "loop.steps=20", "loader.workers=0", "run.resume=fresh"))
    assert read_bytes(in_process) == 0


@pytest.mark.parametrize("ranks", [2, 3, 4])
def test_ranks_do_not_read_the_same_data(ranks: int) -> None:
    """Of 96 blocks each rank reads its own; only where two lanes meet in a block two ranks do (datasets#6623)."""
    blocks = torch.arange(96).repeat_interleave(5)  # of each sample
    order = shuffled(blocks, 12, torch.Generator().manual_seed(3))
    assert sorted(order.tolist()) == list(range(len(blocks)))  # every sample once
    batch = 12 * ranks
    read = [
        {int(blocks[at]) for start in range(0, len(order), batch) for at in order[start : start + batch][rank::ranks]}
        for rank in range(ranks)
    ]
    assert set.union(*read) == set(range(96))
    assert sum(map(len, read)) - 96 < 12  # the lanes meet eleven times at most


def test_the_cache_is_bounded_and_a_killed_writer_leaves_nothing(tmp_path: Path) -> None:
    cache = BlockCache(tmp_path / "cache", limit=1000)
    for number in range(30):
        cache.fill(number, 100, lambda: bytes(100))
        if number == 20:  # read just now, so others go first
            assert cache.read(20, 0, 100) == bytes(100)
        assert sum(path.stat().st_size for path in (tmp_path / "cache").glob("*.block")) <= 1000
    assert [cache.holds(number) for number in (0, 19, 29)] == [False, False, True]

    # a process that dies while it reads a block: what it has begun is no block, and the next one is not kept waiting
    def die() -> bytes:
        (tmp_path / "cache/40.draft").write_bytes(b"half")
        os._exit(1)

    child = os.fork()
    if not child:
        cache.fill(40, 100, die)
    os.waitpid(child, 0)
    assert not cache.holds(40)
    cache.fill(40, 100, lambda: b"y" * 100)
    assert cache.read(40, 0, 100) == b"y" * 100


@pytest.mark.long
def test_a_missing_shard_is_named_and_has_its_budget(in_process: S3Server, tmp_path: Path) -> None:
    in_process.files().rm_file(f"{BUCKET}/set/003.tar")
    words = ["strategy=single", "loop.steps=20", "loader.workers=0"]
    with pytest.raises(BadData, match=r"s3://bucket/set/003.tar is missing; data.on_bad=skip"):
        here(*at(tmp_path / "strict", URL, *words))
    with pytest.raises(BadData, match=r"003.tar is missing"):
        here(*at(tmp_path / "budget", URL, *words, "data.on_bad=skip", "data.bad_budget=0.05"))
    assert here(*at(tmp_path / "lenient", URL, *words, "data.on_bad=skip", "data.bad_budget=0.2")) == 0


@pytest.mark.long
def test_what_is_no_set_of_shards_is_refused(tmp_path: Path) -> None:
    (tmp_path / "set").mkdir()
    with pytest.raises(Refusal, match=r"has no index of its shards .*: python scripts/index_shards.py"):
        here(*at(tmp_path, tmp_path / "set"))
    assert "expected files ending in .tar or .parquet" in index(str(tmp_path / "set"), code=2)


@pytest.mark.slow
@pytest.mark.long
def test_ranks_come_and_go_and_the_curve_is_that_of_one_process(server: S3Server, tmp_path: Path) -> None:
    def start(root: str, *words: str) -> Command:
        return Command(single(*at(tmp_path / root, URL, "loop.epochs=12", *words)), tmp_path, server.environment)

    whole = start("whole", "strategy=single").end()
    assert whole.code == 0, whole.screen
    # stopped twice, in the middle of an epoch, and gone on from with other ranks and another strategy
    for words, step in ((("processes=2", "strategy=ddp"), 20), (("processes=3", "strategy=fsdp"), 60)):
        command = start("parts", *words)
        command.wait_for_step(tmp_path / "parts/run", step)
        os.kill(command.pid, signal.SIGTERM)
        ended = command.end()
        assert ended.code == 75, ended.screen
    last = start("parts", "strategy=single").end()
    assert last.code == 0, last.screen
    parts, undisturbed = tmp_path / "parts/run", tmp_path / "whole/run"
    assert curve(parts, "sample_digest") == curve(undisturbed, "sample_digest")
    assert curve(parts) == pytest.approx(curve(undisturbed), abs=1e-10)
    assert lines(parts, "eval")[-1]["accuracy"] == lines(undisturbed, "eval")[-1]["accuracy"]


@pytest.mark.long
def test_an_index_has_the_block_of_each_sample(folder: Path) -> None:
    from recipes.shards.index import read_index, read_summary

    place, summary = read_summary(str(folder), [f"{folder}/shards_index"])
    whole: Any = read_index(place, summary, folder.parent / "cache")
    assert len(block_of_samples(whole)) == SHARDS * PER_SHARD
    assert summary["num_classes"] == CLASSES
