"""The folder of a run that a stranger made: no file in it is a link to another, its names are harmless."""

from __future__ import annotations

import json
import os
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest

from tests.commands import Command, single
from tests.inside import here
from tests.quick import quickly
from tests.recipes.test_folder import CLASSES, SHORT, WORDS, write
from trainer.messages import Refusal

RUN = ("model=mlp", "model.width=8", "loop.global_batch=64", "loop.epochs=null", "loop.eval_every=null")
EVERYTHING = (*RUN, "loop.steps=8", "loop.save_every=2", "log=[console,tensorboard]", "profile=[2,3]")
BAIT = "# the user's own\n"


@pytest.fixture(scope="module")
def given(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run of four steps, as somebody hands it on."""
    folder = tmp_path_factory.mktemp("given") / "run"
    words = [word for word in EVERYTHING if not word.startswith("profile")]
    assert here(*words, "loop.steps=4", f"run.dir={folder}") == 0
    return folder


@pytest.fixture
def run(given: Path, tmp_path: Path) -> Path:
    return Path(shutil.copytree(given, tmp_path / "run"))


def bait(place: Path) -> Path:
    """A file and a folder of the user's, with a file in it."""
    (place / "home" / "inner").mkdir(parents=True)
    for name in ("bashrc", "inner/bashrc"):
        (place / "home" / name).write_text(BAIT)
    return place / "home"


def untouched(home: Path) -> bool:
    files = {str(path.relative_to(home)): path.read_text() for path in home.rglob("*") if path.is_file()}
    return files == {"bashrc": BAIT, "inner/bashrc": BAIT}


def outcome(*words: str) -> str:
    """The exit code, or the refusal."""
    try:
        return str(here(*words))
    except Refusal as refusal:
        return str(refusal)


def link(path: Path, goal: Path) -> None:
    """A link in the place of whatever is there."""
    path.parent.mkdir(parents=True, exist_ok=True)
    if path.is_dir():
        shutil.rmtree(path)
    path.unlink(missing_ok=True)
    path.symlink_to(goal)


@pytest.mark.parametrize(
    "name",
    [
        *(
            "logs/rank-0.log",
            "metrics.jsonl",
            "status.json",
            "config.yaml",
            "config.1.yaml",
        ),
        *("environment.json", "overrides.yaml", ".lock", "wandb.id"),
        "profile/rank-0.json",
    ],
)
def test_a_run_writes_through_no_link(run: Path, tmp_path: Path, name: str) -> None:
    home = bait(tmp_path)
    link(run / name, home / "bashrc")
    said = outcome(*EVERYTHING, f"run.dir={run}", "run.accept_changes=true")
    # what stands in the place of the link is a file of the run
    assert "is a link to" in said or (said, (run / name).is_symlink(), name) == ("0", False, "profile/rank-0.json")
    assert untouched(home)


def test_a_link_to_no_file_makes_none(run: Path, tmp_path: Path) -> None:
    for name in ("logs/rank-0.log", "config.1.yaml", f".status.json.{os.getpid()}"):
        link(run / name, tmp_path / "made")
    with pytest.raises(Refusal, match="is a link to"):
        here(*EVERYTHING, f"run.dir={run}", "run.accept_changes=true")
    assert not os.path.lexists(tmp_path / "made")


@pytest.mark.long
@pytest.mark.parametrize(
    ("name", "words"),
    [
        ("evaluate/metrics.jsonl", "job=evaluate"),
        ("evaluate/logs/rank-0.log", "job=evaluate"),
        ("predict/predictions.safetensors", "job=predict"),
        ("export/.model.safetensors", "job=export"),
        ("export/model.pt2", "job=export job.format=pt2"),
        ("verify/reference.safetensors", "job=verify job.steps=1"),
        ("verify/verify.json", "job=verify job.steps=1"),
    ],
)
def test_no_job_writes_through_a_link(run: Path, tmp_path: Path, name: str, words: str) -> None:
    home = bait(tmp_path)
    link(run / name, home / "bashrc")
    base = RUN if "verify" in words else ()
    said = outcome(*base, f"run.dir={run}", *words.split())
    assert said in "01" or "is a link to" in said
    assert untouched(home)
    assert not (tmp_path / "home" / "logs").exists()


def test_the_user_s_own_links_lead_to_the_run_s_folder(run: Path, tmp_path: Path) -> None:
    (tmp_path / "short").symlink_to(run)
    (tmp_path / "root").symlink_to(tmp_path)
    (tmp_path / "elsewhere").mkdir()
    (tmp_path / "out").symlink_to("elsewhere")
    words = [word for word in EVERYTHING if not word.startswith("profile")]
    assert here(*words, "run.accept_changes=true", f"run.dir={tmp_path / 'short'}") == 0
    assert json.loads((run / "status.json").read_text())["step"] == 8
    assert here(f"run.root={tmp_path / 'root'}", "run.name=short", "job=evaluate") == 0
    assert (run / "evaluate" / "metrics.jsonl").is_file()
    out = tmp_path / "out" / "model.safetensors"
    assert here(f"run.dir={tmp_path / 'short'}", "job=export", f"job.out={out}") == 0
    assert out.is_file()
    assert here(*RUN, "loop.steps=1", f"init_from={tmp_path / 'short'}", f"run.dir={tmp_path / 'next'}") == 0


def test_folders_of_a_run_may_be_links_to_others(run: Path, tmp_path: Path) -> None:
    (tmp_path / "scratch").mkdir()
    for name in ("checkpoints", "logs", "tensorboard", "profile"):
        link(run / name, tmp_path / "scratch")
    (tmp_path / "scratch" / "latest").symlink_to("step-00000004")
    assert here(*EVERYTHING, "run.resume=fresh", f"run.dir={run}") == 0
    link(run / "checkpoints", tmp_path / "nowhere")
    assert "checkpoints is a link to" in outcome(*EVERYTHING, f"run.dir={run}", "run.accept_changes=true")


def fifo(path: Path) -> None:
    path.unlink(missing_ok=True)
    os.mkfifo(path)


def zero(path: Path) -> None:
    link(path, Path("/dev/zero"))


NAMES = ("state.json", "manifest.json", "tensors", "more.safetensors")


@pytest.mark.slow
@pytest.mark.parametrize(
    ("name", "make"),
    quickly(
        [
            (name, make)
            for name in ("state.json", "manifest.json", "tensors", "more.safetensors")
            for make in (fifo, zero)
        ],
        ("manifest.json", fifo),
        ("more.safetensors", zero),
    ),
)
def test_a_checkpoint_with_a_special_file_is_skipped(run: Path, name: str, make: Callable[[Path], None]) -> None:
    newest = max((run / "checkpoints").iterdir())
    make(min(newest.glob("*.safetensors")) if name == "tensors" else newest / name)
    ended = Command(single(*EVERYTHING, f"run.dir={run}", "run.accept_changes=true"), run.parent).end()
    assert ended.code == 0, ended.screen
    assert f"checkpoint {newest.name} is skipped" in ended.screen
    assert json.loads((run / "status.json").read_text())["resume_step"] == 2


@pytest.mark.slow
def test_a_pipe_in_the_place_of_a_file_is_refused(run: Path) -> None:
    fifo(run / "metrics.jsonl")
    ended = Command(single(*EVERYTHING, f"run.dir={run}", "run.accept_changes=true"), run.parent).end()
    assert (ended.code, "metrics.jsonl is no regular file" in ended.screen) == (2, True), ended.screen


def test_names_of_strangers_stand_in_one_line_and_move_no_cursor(run: Path, capfd: pytest.CaptureFixture[str]) -> None:
    evil = "step-9\ntouch x #\x1b[2Jgone\u202e"
    (run / "checkpoints" / evil).mkdir()
    (run / "checkpoints" / evil / "manifest.json").write_text('{"for\\nmat": "\\u001b[2J"}')
    (run / "checkpoints" / "step-00000007").mkdir()
    shutil.copy(run / "checkpoints" / "step-00000004" / "manifest.json", run / "checkpoints" / "step-00000007")
    assert here(*RUN, "loop.steps=5", "log=[console]", f"run.dir={run}", "run.accept_changes=true") == 0
    screen = capfd.readouterr()
    for text in (screen.out, screen.err, (run / "logs" / "rank-0.log").read_text()):
        assert not {"\x1b", "\u202e"} & set(text)
        assert not any(line.startswith("touch x") for line in text.splitlines())
    assert "step-9\\ntouch x #\\x1b[2Jgone\\u202e" in (run / "logs" / "rank-0.log").read_text()


def test_names_of_pictures_and_classes_stand_in_one_line(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    root = write(tmp_path / "pictures", {"": 8})
    (root / CLASSES[0] / "a\nb\x1b[2J.jpg").write_bytes(b"no picture")
    (root / CLASSES[1]).rename(root / "bee\nb\x1b[2J")
    words = (*WORDS, *SHORT, f"data.root={root}", "data.on_bad=skip", "loader.workers=0", "log=[console]")
    assert here(*words, "data.held_out=0", f"run.dir={tmp_path / 'run'}") == 0
    text = capfd.readouterr().out
    assert "\x1b" not in text
    assert ("bee\\nb\\x1b[2J" in text, "a\\nb\\x1b[2J.jpg" in text) == (True, True), text
