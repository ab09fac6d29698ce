"""`python -m trainer` as a user types it: mistakes, precisions, slices, and the life of a run folder."""

from __future__ import annotations

import json
import os
import re
import shlex
import shutil
import signal
import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from tests.commands import (
    ROOT,
    SMALL,
    Command,
    Ended,
    curve,
    far,
    files_below,
    finish,
    lines,
    single,
    status,
)
from tests.inside import product
from tests.quick import quickly
from trainer.launch.rendezvous import Launch

pytestmark = pytest.mark.slow

WORDS = (*SMALL, "device=cpu", "schedule=constant", "optimizer=sgd", "loop.global_batch=120")


@pytest.fixture(scope="module")
def place(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("cli")


def named(name: str, *others: str, steps: int = 12) -> list[str]:
    return single(*WORDS, f"run.name={name}", f"loop.steps={steps}", *others)


# ------------------------------------------------------------------------------------------------------------ mistakes

MISTAKES = [  # words, what the one message contains
    ("optimizer.lrr=1", "optimizer.lrr", "optimizer.lr"),
    ("model=resnet51", "model=resnet51", "resnet50"),
    ("hydra.run.dirr=x", "hydra.run.dirr", "hydra.run.dir"),
    ("loop.steps=abc", "loop.steps", "abc"),
    ("loop.global_batch=-4", "loop.global_batch", "-4"),
    ("precision=fp17", "precision", "fp16"),
    ("run.stop_after=soon", "run.stop_after", "soon"),
    ("loop.micro_batches=2 loop.micro_batch=4", "loop.micro_batch", "not both"),
    ("task._target_=os.system", "os.system", "may not be called"),
    ("run.name=../../x", "run.name", "run.dir"),
    ("run.dir=/proc/nowhere/x", "/proc/nowhere/x", "run.dir"),
    ("run.resume=/nowhere", "/nowhere", "does not exist"),
    ("run.resume=~nobody-here/x", "~nobody-here/x", "this machine knows no home folder ~nobody-here"),
    ("loop.micro_batches=7", "128 / 1 data rank / 7", "nearest"),
    ("data=synthetic_images data.size=0", "empty", "0 samples"),
    ("data=synthetic_images data.size=10", "10 samples", "128"),
    ("data.file=/nowhere/digits.csv.gz", "/nowhere/digits.csv.gz", ""),
    ("model=torchvision model.name=resnet81", "resnet81", "resnet18"),
    ("model=vit_tiny model.width=190", "width 190", "192"),
    ("optimizer.lr=-1", "optimizer", "-1"),
    ("strategy=ddp_tp strategy.tensor=3", "3", "tensor"),
    ("device=cuda", "no GPU", "device=cpu"),
    ("profile=true loop.steps=5", "steps 10 to 12", "profile=[2,4]"),
    ("~model +model._target_=torch.nn.LazyLinear +model.out_features=10", "weight has no size", "give its layer"),
]


QUICK = [0, 3, 8, 10, 13, 15, 18, 20, 21, 22, 23]  # where in a start it is noticed


@pytest.mark.parametrize(("words", "wrong", "remedy"), quickly(MISTAKES, *(MISTAKES[number] for number in QUICK)))
def test_a_mistake_costs_one_message_and_leaves_nothing(tmp_path, words, wrong, remedy):
    if words == "device=cuda" and torch.cuda.is_available():
        pytest.skip("this machine has a GPU")
    ended = Command(single(*words.split()), tmp_path).end()
    assert (ended.code, ended.left) == (2, []), ended.screen
    assert wrong in ended.screen
    assert remedy in ended.screen
    assert "Traceback" not in ended.screen
    assert len(ended.screen.splitlines()) <= 6, ended.screen
    assert files_below(tmp_path) == set()


# --------------------------------------------------------------------------------------------------------- whole runs

UNSEEN = ("data=synthetic_images", "data.size=250", "data.evaluation_size=0", "data.image_size=8")
RUNS: dict[str, list[str]] = {
    "plain": [],
    "again": ["loop.deterministic=true", "log=[]"],
    "two": ["loop.micro_batches=2", "log=console"],
    "four": ["loop.micro_batch=30"],
    "dp": ["strategy=dp"],
    "fp64": ["precision=fp64"],
    "fp64-sliced": ["precision=fp64", "loop.micro_batches=4"],
    "bf16": ["precision=bf16"],
    "fp16": ["precision=fp16", "loop.max_norm=1000"],
    "unseen": [*UNSEEN, "loop.steps=3"],
    "nan": ["optimizer.lr=1e30", "loop.save_every=1"],
    "secret": ["data.file=${oc.env:WHERE}", "loop.steps=2"],
    "unwatched": ["log=console"],
}
INSIDE = ("four", "fp64", "fp64-sliced", "bf16", "fp16")
COMPILER = shutil.which("g++") or shutil.which("c++")


@pytest.fixture(scope="module")
def ran(place: Path) -> dict[str, tuple[Path, Ended]]:
    """Folder and end of each of these runs; two at a time, or in this process where nobody asks for its end."""
    shutil.copy(ROOT / "recipes" / "vision" / "digits.csv.gz", place / "tok123.csv.gz")
    for name in INSIDE:
        assert product(Launch(), place, [*WORDS, f"run.name={name}", "loop.steps=12", *RUNS[name]]) == 0

    def run(name: str) -> tuple[Path, Ended]:
        command = named(name, *RUNS[name])
        if name == "unwatched":
            command = ["bash", "-o", "pipefail", "-c", f"{shlex.join(command)} | head -n 1"]
        ended = Command(command, place, {"WHERE": str(place / "tok123.csv.gz")}).end()
        assert ended.left == []
        assert ended.code == (1 if name == "nan" else 0), ended.screen
        return place / "runs" / name, ended

    others = [name for name in RUNS if name not in INSIDE]
    with ThreadPoolExecutor(2) as pool:
        return dict(zip(others, pool.map(run, others), strict=True))


def test_slices_precisions_and_another_time_give_one_curve(place, ran):
    runs = place / "runs"
    plain = runs / "plain"
    for name in ("again", "two", "four", "dp", "fp64", "fp64-sliced", "bf16", "fp16"):
        folder = runs / name
        assert curve(folder, "sample_digest") == curve(plain, "sample_digest")
        resolved = name.split("-")[0] if name.startswith(("fp", "bf")) else "fp32"
        assert json.loads((folder / "environment.json").read_text())["precision"] == resolved
    assert curve(runs / "again", "loss_hex") == curve(plain, "loss_hex")
    for name in ("two", "four", "dp", "fp64"):
        assert far(curve(runs / name), curve(plain)) < 1e-5
    for key in ("loss", "grad_norm"):
        assert far(curve(runs / "fp64", key), curve(runs / "fp64-sliced", key)) < 1e-10
    for name in ("bf16", "fp16"):
        assert 0 < far(curve(runs / name), curve(plain)) < 0.05


def test_logs_are_chosen(ran):
    (plain, _), (silent, nothing), (spoken, words) = ran["plain"], ran["again"], ran["two"]
    assert nothing.screen == ""
    assert not (silent / "tensorboard").exists()
    assert not (spoken / "tensorboard").exists()
    assert "completed" in words.screen
    assert (plain / "tensorboard").is_dir()


def test_data_parallelism_without_gpus_says_so_in_one_line_and_trains(ran):
    folder, ended = ran["dp"]
    assert sum("dp" in line and "GPU" in line for line in ended.screen.splitlines()) == 1, ended.screen
    assert (status(folder)["state"], status(folder)["strategy"]) == ("completed", "dp")


def test_an_empty_evaluation_set_is_no_evaluation(ran):
    folder, ended = ran["unseen"]
    assert "evaluation  none" in ended.screen
    assert lines(folder, "eval") == []
    assert status(folder)["state"] == "completed"


def test_a_loss_that_is_no_number_ends_the_run_and_is_never_saved(ran):
    folder, ended = ran["nan"]
    assert "Traceback" not in ended.screen
    assert re.search(r"^step \d+: the loss is (nan|inf)", ended.screen, re.M), ended.screen
    assert status(folder)["state"] == "failed"
    files = list((folder / "checkpoints").rglob("*.safetensors"))
    assert files
    for file in files:
        assert all(tensor.isfinite().all() for tensor in load_file(file).values()), file


def test_a_secret_stays_where_it_was(ran):
    folder, _ = ran["secret"]
    assert "${oc.env:WHERE}" in (folder / "config.yaml").read_text()
    assert [path for path in folder.rglob("*") if path.is_file() and b"tok123" in path.read_bytes()] == []


def test_a_run_outlives_whoever_watches_it(ran):
    folder, ended = ran["unwatched"]
    assert len(ended.screen.splitlines()) == 1
    assert curve(folder, "loss_hex") == curve(ran["plain"][0], "loss_hex")


@pytest.mark.skipif(not COMPILER, reason="torch.compile needs a C++ compiler, and there is no g++ here")
@pytest.mark.long
@pytest.mark.parametrize("mode", ["default", "step"])
def test_a_compiled_network_learns_the_same(mode, place, ran):
    screen = finish(
        named("compiled", f"compile.mode={mode}", "loop.eval_every=null", "run.resume=fresh", steps=3), place
    )
    assert "compile: 1 graph," in screen
    folder = place / "runs" / "compiled"
    assert far(curve(folder), curve(ran["plain"][0])[:3]) < 1e-5
    (step,) = (folder / "checkpoints").iterdir()
    assert b"_orig_mod" not in b"".join(file.read_bytes() for file in step.iterdir())


# ------------------------------------------------------------------------------------------------- a folder's own life


def test_the_life_of_a_run_folder(place):
    folder = place / "runs" / "life"
    finish(named("life"), place)
    before = files_below(folder), (folder / "metrics.jsonl").read_bytes()

    screen = finish(named("life"), place)  # nothing left to do
    assert len(screen.splitlines()) == 1
    assert "complete" in screen
    assert "loop.steps" in screen
    assert (files_below(folder), (folder / "metrics.jsonl").read_bytes()) == before

    screen = finish(named("life", "optimizer.lr=0.2", steps=14), place, code=2)  # another learning
    assert screen.count("optimizer.lr: 0.05 → 0.2") == 1
    assert "run.accept_changes=true" in screen
    assert (files_below(folder), (folder / "metrics.jsonl").read_bytes()) == before

    damaged = next((folder / "checkpoints" / "step-00000012").glob("*.safetensors"))
    damaged.write_bytes(damaged.read_bytes()[:-1] + b"?")
    screen = finish(named("life", "loop.micro_batches=2", "loop.eval_every=null", steps=14), place)  # free to change
    assert "loop.micro_batches: 1 → 2" in screen
    assert screen.count(damaged.name) == 1  # passed over, and why
    assert (status(folder)["resume_step"], status(folder)["attempt"]) == (11, 2)
    assert len(curve(folder)) == 14

    screen = finish(named("life", "optimizer.lr=0.2", "run.accept_changes=true", steps=16), place)
    assert "optimizer.lr: 0.05 → 0.2" in screen
    assert [line["lr"] for line in lines(folder, "train")][13:] == [0.05, 0.2, 0.2]
    assert {path.name for path in folder.glob("config.*yaml")} == {"config.yaml", "config.1.yaml", "config.2.yaml"}

    finish(named("branch", f"run.resume={folder}", "optimizer.lr=0.2", steps=17), place)  # another run starts from it
    assert status(place / "runs" / "branch")["resume_step"] == 16
    assert [line["step"] for line in lines(place / "runs" / "branch", "train")] == [17]

    finish(named("life", "run.resume=fresh", steps=2), place)
    assert len(curve(folder)) == 2
    assert status(folder)["attempt"] == 1
    assert len(curve(place / "runs" / "life.1")) == 16


@pytest.mark.long
def test_a_longer_horizon_is_another_learning_where_the_schedule_depends_on_it(place):
    words = ("schedule=cosine", "schedule.warmup=1")  # behind the warm-up rates depend on the length
    finish(named("horizon", *words, steps=3), place)
    screen = finish(named("horizon", *words, steps=5), place, code=2)
    assert "horizon" in screen
    finish(named("horizon", *words, "run.accept_changes=true", steps=5), place)
    assert len(curve(place / "runs" / "horizon")) == 5


def test_a_run_stops_when_it_was_told_to_and_the_printed_command_goes_on(place):
    folder = place / "runs" / "brief"
    screen = finish(named("brief", "run.stop_after=1", "loop.log_every=1", steps=10**6), place, code=75)
    first = status(folder)
    assert first["state"] == "preempted"
    assert "stop_after" in first["reason"]
    advice = screen.rstrip().splitlines()[-1].split()
    assert advice[:3] == ["python", "-m", "trainer"]
    finish([sys.executable, *advice[1:]], place, code=75)
    assert status(folder)["resume_step"] == first["step"]
    assert len(curve(folder)) == status(folder)["step"] > first["step"]


@pytest.mark.long
def test_one_run_a_folder_and_a_signal_that_ends_it(place):
    folder = place / "runs" / "busy"
    command = Command(named("busy", steps=10**6), place)
    command.wait_for_step(folder, 1)
    screen = finish(named("busy", steps=10**6), place, code=2)
    assert len(screen.splitlines()) == 1
    assert f"pid {command.pid}" in screen
    assert os.uname().nodename in screen
    os.kill(command.pid, signal.SIGINT)
    ended = command.end()
    assert (ended.code, ended.left) == (75, []), ended.screen
    assert (status(folder)["state"], status(folder)["reason"]) == ("preempted", "SIGINT")
    # what was killed lets go of its folder too
    command = Command(named("busy", steps=10**6), place)
    command.wait_for_step(folder, status(folder)["step"] + 1)
    command.kill()
    assert command.end().code == -signal.SIGKILL
    finish(named("busy", steps=1), place)
