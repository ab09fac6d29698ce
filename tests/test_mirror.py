"""checkpoint.mirror: checkpoints are copied to a URL while a run trains, and a start on an empty folder takes them."""

from __future__ import annotations

import json
import os
import re
import shutil
import signal
from collections.abc import Iterator
from pathlib import Path

import pytest
from torch import nn

from recipes.vision.classification import Classification
from tests.run import SMALL, Finished, lines, run, start
from tests.s3_server import BUCKET, S3Server, s3_server
from trainer.records.checkpoint.copies import name_below

WORDS = [*SMALL, "strategy=single", "loop.epochs=4", "run.name=mine", "trust=[tests]"]
WORDS += ["task._target_=tests.test_mirror.Losing"]
STEPS = [11, 22, 33, 44]  # the ends of the epochs, where a run saves
service = pytest.mark.service


class Losing(Classification):
    """The run's machine goes after the step that a file names."""

    def after_step(self, network: nn.Module, step: int) -> None:
        if Path("last").exists() and step == int(Path("last").read_text()):
            Path("last").unlink()
            raise ConnectionError("the machine is gone")


@pytest.fixture
def server() -> Iterator[S3Server]:
    pytest.importorskip("s3fs")
    pytest.importorskip("moto")
    with s3_server() as server:
        yield server


def at(root: Path, *words: str, url: str = f"s3://{BUCKET}/runs") -> list[str]:
    return [*WORDS, f"run.root={root}", f"checkpoint.mirror={url}", *words]


def here(server: S3Server, root: Path, *words: str, code: int = 0) -> Finished:
    return run([*at(root), *words], place=root.parent, environment=server.environment, code=code)


def copies(server: S3Server) -> list[int]:
    """The steps of the whole copies."""
    keys = [key for key in server.list_keys() if key.startswith("runs/mine/") and key.endswith("/manifest.json")]
    return [int(key.split("/")[2].removeprefix("step-")) for key in keys]


def damage(server: S3Server, step: int) -> None:
    """Change a bit of a copy's tensors."""
    files = server.files()
    (tensors,) = [path for path in files.ls(f"{BUCKET}/runs/mine/step-{step:08d}", detail=False) if "-00001-of" in path]
    content = bytearray(files.cat_file(tensors))
    content[-1] ^= 1
    files.pipe_file(tensors, bytes(content))


def test_a_folder_elsewhere_has_the_same_checkpoints_and_an_empty_one_goes_on_from_them(tmp_path: Path) -> None:
    url, words = f"file://{tmp_path}/mirror", ["checkpoint.keep=1", "checkpoint.best=-loss"]
    first = run([*at(tmp_path / "whole", *words, url=url), "run.name=whole", "log=[console]"], place=tmp_path)
    kept = sorted(path.name for path in (first.folder / "checkpoints").iterdir())
    # what is kept there is what is kept here, to the bit
    assert sorted(path.name for path in (tmp_path / "mirror/whole").iterdir()) == kept
    for name in kept:
        for path in (first.folder / "checkpoints" / name).iterdir():
            assert (tmp_path / "mirror/whole" / name / path.name).read_bytes() == path.read_bytes()
    assert f"mirrored    {url}/whole" in first.out
    # a machine is lost; on another one the run goes on, and learns what it would have learned
    (tmp_path / "last").write_text("23")
    run(at(tmp_path / "first", *words, url=url), place=tmp_path, code=1)
    second = run(at(tmp_path / "second", *words, url=url), place=tmp_path)
    assert f"restored    step 22 from {url}/mine" in second.out
    assert [line["loss_hex"] for line in second.lines("train")] == first.curve("loss_hex")[22:]
    # a new run of an old name would take them away
    refused = run(at(tmp_path / "third", "run.resume=fresh", url=url), place=tmp_path, code=2)
    assert re.search(rf"an earlier run has copies in {url}/mine \(step-000000", refused.out)
    assert not (tmp_path / "third/mine").exists()


@pytest.mark.parametrize(
    ("url", "message"),
    [
        ("s4://bucket/runs", r"s4:// is unknown; s3://, gs://, az:// or file:///folder"),
        ("gs://bucket/runs", r"needs the package gcsfs: pip install gcsfs"),
    ],
)
def test_a_url_that_nothing_can_write_to_is_refused(tmp_path: Path, url: str, message: str) -> None:
    assert re.search(message, run(at(tmp_path, url=url), place=tmp_path, code=2).out)


@service
@pytest.mark.long
def test_a_lost_machine_costs_what_came_after_the_last_copy_that_is_whole(server: S3Server, tmp_path: Path) -> None:
    whole = here(server, tmp_path / "whole", "run.name=whole").curve()
    (tmp_path / "last").write_text("41")
    here(server, tmp_path / "first", code=1)
    assert copies(server) == [11, 22, 33]
    second = here(server, tmp_path / "second")
    assert [line["loss"] for line in second.lines("train")] == whole[33:]
    assert copies(server) == STEPS[-3:]
    server.files().rm_file(f"{BUCKET}/runs/mine/step-00000044/manifest.json")  # as where a copy was interrupted
    damage(server, 33)
    assert here(server, tmp_path / "third").lines("train")[0]["step"] == 23
    assert copies(server) == STEPS[-3:]  # what was half copied is whole again


@service
@pytest.mark.long
@pytest.mark.parametrize("kind", ["503", "cut", "lost"])
def test_what_goes_wrong_on_the_way_is_tried_again(server: S3Server, tmp_path: Path, kind: str) -> None:
    server.plant(kind, times=3)
    here(server, tmp_path / "here")
    assert copies(server) == STEPS[-3:]
    shutil.rmtree(tmp_path / "here")
    server.plant(kind, "GET", times=2)
    assert (here(server, tmp_path / "here").folder / "checkpoints/step-00000044/manifest.json").is_file()


@service
@pytest.mark.long
def test_a_bucket_that_cannot_be_read_is_named(server: S3Server, tmp_path: Path) -> None:
    server.plant("403", "GET", times=1000)  # a start that has no checkpoint of its own must know whether there is one
    refused = here(server, tmp_path / "elsewhere", code=2)
    assert re.search(r"s3://bucket/runs/mine cannot be read: .*\n?.*checkpoint.mirror=null", refused.out)


@service
@pytest.mark.long
def test_a_process_that_is_killed_in_the_middle_of_a_copy_leaves_nothing_that_looks_whole(
    server: S3Server, tmp_path: Path
) -> None:
    server.plant("hold", part="step-00000022/shard")  # of those that are missing, the newest is copied first
    real = {"place": tmp_path, "environment": server.environment}
    command = start([*at(tmp_path / "first"), "device=cpu", "log=[]"], **real)  # type: ignore[arg-type]
    assert server.held.wait(120)
    os.kill(command.pid, signal.SIGKILL)
    command.end()
    server.released.set()
    whole = copies(server)
    assert 22 not in whole
    second = here(server, tmp_path / "second", "checkpoint.keep=4")
    restored = [f"restored    step {step} from s3://bucket/runs/mine" for step in whole[-1:]]  # none may be whole yet
    assert all(line in second.out for line in restored)
    # half a copy is left nowhere: it was made again, or where the run went on from a later one it is gone
    assert {int(key.split("/")[2].removeprefix("step-")) for key in server.list_keys()} == {*copies(server)}
    assert copies(server)[-1] == 44
    manifest = json.loads((second.folder / "checkpoints/step-00000044/manifest.json").read_text())
    assert (manifest["step"], lines(second.folder)[-1]["step"]) == (44, 44)


def test_the_runs_of_two_sweeps_have_places_of_their_own(tmp_path: Path) -> None:
    assert name_below(tmp_path / "runs/first/seed=1", tmp_path / "runs") == "first/seed=1"
    assert name_below(tmp_path / "elsewhere/mine", tmp_path / "runs") == "mine"
