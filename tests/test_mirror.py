"""checkpoint.mirror: checkpoints are copied to a URL while a run trains, and a start on an empty folder takes them."""

from __future__ import annotations

import json
import os
import shutil
import signal
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.commands import SMALL, Command, curve, lines, single
from tests.inside import here
from tests.quick import quickly
from tests.s3_server import BUCKET, S3Server, s3_server
from trainer.loop.trainer import Trainer
from trainer.messages import Refusal
from trainer.records.checkpoint import mirror
from trainer.records.checkpoint.copies import name_below

WORDS = [*SMALL, "strategy=single", "device=cpu", "log=[]", "loop.epochs=4", "run.name=mine"]
STEPS = [11, 22, 33, 44]  # the ends of the epochs, where a run saves


class Killed(Exception):
    """Stands for the end of a machine."""


@pytest.fixture
def server() -> Iterator[S3Server]:
    pytest.importorskip("s3fs")
    pytest.importorskip("moto")
    with s3_server() as server:
        yield server


@pytest.fixture
def in_process(server: S3Server, monkeypatch: pytest.MonkeyPatch) -> S3Server:
    """The same for runs in this process, which try again at once."""
    for name, value in server.environment.items():
        monkeypatch.setenv(name, value)
    monkeypatch.setattr(mirror, "FIRST_DELAY", 0.01)
    monkeypatch.setattr(mirror, "LAST_DELAY", 0.01)
    return server


def at(root: Path, *words: str, url: str = f"s3://{BUCKET}/runs") -> list[str]:
    return [*WORDS, f"run.root={root}", f"checkpoint.mirror={url}", *words]


def copies(server: S3Server) -> list[int]:
    """The steps of the whole copies."""
    keys = [key for key in server.list_keys() if key.startswith("runs/mine/") and key.endswith("/manifest.json")]
    return [int(key.split("/")[2].removeprefix("step-")) for key in keys]


def end_after(monkeypatch: pytest.MonkeyPatch, step: int) -> None:
    """The run's machine goes while this step is under way."""
    train = Trainer.train_step

    def trained(trainer: Trainer, batches: Any) -> None:
        if trainer.progress.step == step:
            monkeypatch.setattr(Trainer, "train_step", train)
            raise Killed
        train(trainer, batches)

    monkeypatch.setattr(Trainer, "train_step", trained)


def test_a_folder_elsewhere_has_the_same_checkpoints_and_an_empty_one_goes_on_from_them(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    url = f"file://{tmp_path}/mirror"
    words = ["checkpoint.keep=1", "checkpoint.best=-loss"]
    here(*at(tmp_path / "whole", *words, url=url), "run.name=whole")
    kept = sorted(path.name for path in (tmp_path / "whole/whole/checkpoints").iterdir())
    # what is kept there is what is kept here, to the bit
    assert sorted(path.name for path in (tmp_path / "mirror/whole").iterdir()) == kept
    for name in kept:
        for path in (tmp_path / "whole/whole/checkpoints" / name).iterdir():
            assert (tmp_path / "mirror/whole" / name / path.name).read_bytes() == path.read_bytes()
    assert f"mirrored    {url}/whole" in capsys.readouterr().out
    # a machine is lost; on another one the run goes on, and learns what it would have learned
    here(*at(tmp_path / "first", *words, "loop.steps=22", "run.accept_changes=true", url=url))
    here(*at(tmp_path / "second", *words, "run.accept_changes=true", url=url))
    assert f"restored    step 22 from {url}/mine" in capsys.readouterr().out
    assert lines(tmp_path / "second/mine", "train")[0]["step"] == 23


@pytest.mark.long
def test_a_lost_machine_costs_what_came_after_the_last_copy(
    in_process: S3Server, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    here(*at(tmp_path / "whole", "run.name=whole"))
    end_after(monkeypatch, 40)
    with pytest.raises(Killed):
        here(*at(tmp_path / "first"))
    assert copies(in_process) == [11, 22, 33]
    here(*at(tmp_path / "second"))
    resumed = [line["loss"] for line in lines(tmp_path / "second/mine", "train")]
    assert resumed == curve(tmp_path / "whole/whole")[33:]
    assert copies(in_process) == STEPS[-3:]


@pytest.mark.long
@pytest.mark.parametrize("kind", quickly(["503", "slow", "cut", "lost"], "cut"))
def test_what_goes_wrong_on_the_way_is_tried_again(in_process: S3Server, tmp_path: Path, kind: str) -> None:
    in_process.plant(kind, times=3)
    assert here(*at(tmp_path / "here")) == 0
    assert copies(in_process) == STEPS[-3:]
    shutil.rmtree(tmp_path / "here")
    in_process.plant(kind, "GET", times=2)
    assert here(*at(tmp_path / "here")) == 0
    assert (tmp_path / "here/mine/checkpoints/step-00000044/manifest.json").is_file()


@pytest.mark.long
def test_a_bucket_that_takes_nothing_harms_no_run_and_is_named(
    in_process: S3Server, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(mirror, "PATIENCE", 0.0)
    # the bucket is there when the run begins, and goes
    train = Trainer.train_step

    def trained(trainer: Trainer, batches: Any) -> None:
        if trainer.progress.step == 5:
            in_process.files().rm(BUCKET, recursive=True)
        train(trainer, batches)

    monkeypatch.setattr(Trainer, "train_step", trained)
    assert here(*at(tmp_path / "here")) == 0
    screen = "".join(capsys.readouterr())
    assert screen.count("and it is tried again") == 1
    assert f"the checkpoints are in {tmp_path}/here/mine/checkpoints" in screen
    # a start that has no checkpoint of its own must know whether there is one
    in_process.plant("403", "GET", times=1000)
    with pytest.raises(Refusal, match=r"s3://bucket/runs/mine cannot be read: .*\n.*checkpoint.mirror=null"):
        here(*at(tmp_path / "elsewhere"))


@pytest.mark.long
def test_damaged_copies_are_passed_over_and_half_ones_are_none(in_process: S3Server, tmp_path: Path) -> None:
    here(*at(tmp_path / "first", "loop.epochs=4"))
    in_process.files().rm_file(f"{BUCKET}/runs/mine/step-00000044/manifest.json")  # as where a copy was interrupted
    damage(in_process, 33)
    here(*at(tmp_path / "second"))
    assert lines(tmp_path / "second/mine", "train")[0]["step"] == 23
    # and what was half copied is whole again
    assert copies(in_process) == STEPS[-3:]


def damage(server: S3Server, step: int) -> None:
    """Change a bit of a copy's tensors."""
    files = server.files()
    (tensors,) = [path for path in files.ls(f"{BUCKET}/runs/mine/step-{step:08d}", detail=False) if "-00001-of" in path]
    content = bytearray(files.cat_file(tensors))
    content[-1] ^= 1
    files.pipe_file(tensors, bytes(content))


@pytest.mark.long
def test_a_damaged_copy_takes_no_place_of_a_whole_one(
    in_process: S3Server, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    here(*at(tmp_path / "first", "checkpoint.keep=2"))
    damage(in_process, 44)
    end_after(monkeypatch, 42)
    with pytest.raises(Killed):
        here(*at(tmp_path / "second", "checkpoint.keep=1", "loop.save_every=4", "checkpoint.asynchronous=false"))
    assert lines(tmp_path / "second/mine", "train")[0]["step"] == 34
    # the next machine goes on from the last save
    here(*at(tmp_path / "third", "checkpoint.keep=1"))
    assert lines(tmp_path / "third/mine", "train")[0]["step"] == 41


@pytest.mark.long
def test_a_new_run_of_an_old_name_is_refused(in_process: S3Server, tmp_path: Path) -> None:
    here(*at(tmp_path / "first", "loop.steps=3"))
    with pytest.raises(Refusal, match=r"an earlier run has copies in s3://bucket/runs/mine \(step-00000003\)"):
        here(*at(tmp_path / "second", "run.resume=fresh"))
    assert not (tmp_path / "second/mine").exists()


@pytest.mark.parametrize(
    ("url", "message"),
    [
        ("s4://bucket/runs", r"s4:// is unknown; s3://, gs://, az:// or file:///folder"),
        ("gs://bucket/runs", r"needs the package gcsfs: pip install gcsfs"),
    ],
)
def test_a_url_that_nothing_can_write_to_is_refused(tmp_path: Path, url: str, message: str) -> None:
    with pytest.raises(Refusal, match=message):
        here(*at(tmp_path, url=url))


@pytest.mark.long
@pytest.mark.slow
def test_a_process_that_is_killed_in_the_middle_of_a_copy_leaves_nothing_that_looks_whole(
    server: S3Server, tmp_path: Path
) -> None:
    server.plant("hold", part="step-00000022/shard")  # of those that are missing, the newest is copied first
    command = Command(single(*at(tmp_path / "first")), tmp_path, server.environment)
    assert server.held.wait(120)
    os.kill(command.pid, signal.SIGKILL)
    command.end()
    server.released.set()
    whole = copies(server)
    assert 22 not in whole
    second = Command(single(*at(tmp_path / "second", "checkpoint.keep=4")), tmp_path, server.environment).end()
    assert second.code == 0, second.screen
    restored = [f"restored    step {step} from s3://bucket/runs/mine" for step in whole[-1:]]  # none may be whole yet
    assert all(line in second.screen for line in restored)
    # half a copy is left nowhere: it was made again, or where the run went on from a later one it is gone
    assert {int(key.split("/")[2].removeprefix("step-")) for key in server.list_keys()} == {*copies(server)}
    assert copies(server)[-1] == 44
    manifest = json.loads((tmp_path / "second/mine/checkpoints/step-00000044/manifest.json").read_text())
    assert manifest["step"] == 44


def test_the_runs_of_two_sweeps_have_places_of_their_own(tmp_path: Path) -> None:
    assert name_below(tmp_path / "runs/first/seed=1", tmp_path / "runs") == "first/seed=1"
    assert name_below(tmp_path / "elsewhere/mine", tmp_path / "runs") == "mine"
