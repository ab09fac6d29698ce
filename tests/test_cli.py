"""`python -m trainer` as a user types it: precisions, slices, what a run says, and the life of a run folder."""

from __future__ import annotations

import json
import os
import re
import shlex
import shutil
import signal
import sys
from pathlib import Path

import pytest
from safetensors.torch import load_file

from tests.run import ROOT, SMALL, Command, Finished, far, files_below, lines, run, start, status

WORDS = (*SMALL, "schedule=constant", "optimizer=sgd", "loop.global_batch=120", "strategy=single")
COMPILER = shutil.which("g++") or shutil.which("c++")


def named(place: Path, name: str, *words: str, code: int = 0) -> Finished:
    return run([*WORDS, "loop.steps=12", f"run.name={name}", *words], place=place, code=code)


@pytest.fixture(scope="module")
def place(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("cli")


@pytest.fixture(scope="module")
def plain(place: Path) -> Finished:
    return named(place, "plain", "log=[console,tensorboard]")


# --------------------------------------------------------------------------------------------------------- whole runs


@pytest.mark.long
def test_slices_precisions_and_another_time_give_one_curve(place: Path, plain: Finished) -> None:
    ways = {
        "again": ["loop.deterministic=true"],
        "two": ["loop.micro_batches=2"],
        "four": ["loop.micro_batch=30"],
        "dp": ["strategy=dp", "log=console"],
        "fp64": ["precision=fp64"],
        "fp64-sliced": ["precision=fp64", "loop.micro_batches=4"],
        "bf16": ["precision=bf16"],
        "fp16": ["precision=fp16", "loop.max_norm=1000"],
    }
    ran = {name: named(place, name, *words) for name, words in ways.items()}
    for name, one in ran.items():
        assert one.curve("sample_digest") == plain.curve("sample_digest")
        resolved = name.split("-")[0] if name.startswith(("fp", "bf")) else "fp32"
        assert json.loads((one.folder / "environment.json").read_text())["precision"] == resolved
    assert ran["again"].curve("loss_hex") == plain.curve("loss_hex")
    for name in ("two", "four", "dp", "fp64"):
        assert far(ran[name].curve(), plain.curve()) < 1e-5
    for key in ("loss", "grad_norm"):
        assert far(ran["fp64"].curve(key), ran["fp64-sliced"].curve(key)) < 1e-10
    for name in ("bf16", "fp16"):
        assert 0 < far(ran[name].curve(), plain.curve()) < 0.05
    # data parallelism without GPUs says so in one line and trains
    assert sum("dp" in line and "GPU" in line for line in ran["dp"].out.splitlines()) == 1, ran["dp"].out
    assert ran["dp"].status["strategy"] == "dp"


def test_a_run_says_what_it_found_into_the_logs_that_were_chosen(place: Path, plain: Finished) -> None:
    assert (plain.folder / "tensorboard").is_dir()
    for said in (
        r"^data        1,437 samples in 10 classes\nevaluation  360 samples; the best has the largest accuracy\n",
        r"^completed   step 12",
    ):
        assert re.search(said, plain.out, re.M), plain.out
    (found,) = re.findall(r"^best        accuracy 0\.\d{4} at step \d+: (.+)$", plain.out, re.M)
    assert (Path(found) / "manifest.json").is_file()
    words = ["schedule=cosine", "loop.steps=2", "strategy=ddp", "log=[console]"]  # 2 of 20 steps
    spoken = named(place, "spoken", *words)
    assert "note        the run ends before schedule.warmup: no step" in spoken.out
    assert "note        ddp has only one process; to use two: processes=2" in spoken.out
    assert not (spoken.folder / "tensorboard").exists()
    assert named(place, "silent", "loop.steps=1").out == ""


def test_an_empty_evaluation_set_is_no_evaluation(place: Path) -> None:
    unseen = ("data=synthetic_images", "data.size=250", "data.evaluation_size=0", "data.image_size=8")
    ended = named(place, "unseen", *unseen, "loop.steps=3", "log=console")
    assert "evaluation  none" in ended.out
    assert (ended.lines("eval"), ended.status["state"]) == ([], "completed")


def test_a_loss_that_is_no_number_ends_the_run_and_is_never_saved(place: Path) -> None:
    ended = named(place, "nan", "optimizer.lr=1e30", "loop.save_every=1", code=1)
    assert "Traceback" not in ended.out
    assert re.search(r"^step \d+: the loss is (nan|inf)", ended.out, re.M), ended.out
    assert ended.status["state"] == "failed"
    files = list((ended.folder / "checkpoints").rglob("*.safetensors"))
    assert files
    for file in files:
        assert all(tensor.isfinite().all() for tensor in load_file(file).values()), file


def test_a_secret_stays_where_it_was(place: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    shutil.copy(ROOT / "recipes" / "vision" / "digits.csv.gz", place / "tok123.csv.gz")
    monkeypatch.setenv("WHERE", str(place / "tok123.csv.gz"))
    words = ["data.file=${oc.env:WHERE}", "loop.steps=2", "log=[console,tensorboard]"]
    folder = named(place, "secret", *words).folder
    assert "${oc.env:WHERE}" in (folder / "config.yaml").read_text()
    assert [path for path in folder.rglob("*") if path.is_file() and b"tok123" in path.read_bytes()] == []


def test_a_run_outlives_whoever_watches_it(place: Path, plain: Finished) -> None:
    words = [
        sys.executable,
        "-m",
        "trainer",
        *WORDS,
        "device=cpu",
        "loop.steps=12",
        "run.name=unwatched",
        "log=console",
    ]
    command = Command(["bash", "-o", "pipefail", "-c", f"{shlex.join(words)} | head -n 1"], place)
    ended = command.end()
    assert (ended.code, ended.left, len(ended.out.splitlines())) == (0, [], 1), ended.out
    assert [line["loss_hex"] for line in lines(place / "runs" / "unwatched", "train")] == plain.curve("loss_hex")


@pytest.mark.skipif(not COMPILER, reason="torch.compile needs a C++ compiler, and there is no g++ here")
@pytest.mark.long
def test_a_compiled_network_learns_the_same(place: Path, plain: Finished) -> None:
    words = ["compile.mode=default", "loop.eval_every=null", "loop.steps=3", "log=console"]
    ended = named(place, "compiled", *words)
    assert "compile: 1 graph," in ended.out
    assert far(ended.curve(), plain.curve()[:3]) < 1e-5
    (step,) = (ended.folder / "checkpoints").iterdir()
    assert b"_orig_mod" not in b"".join(file.read_bytes() for file in step.iterdir())


# ------------------------------------------------------------------------------------------------- a folder's own life


def test_the_life_of_a_run_folder(place: Path) -> None:
    folder = named(place, "life").folder
    before = files_below(folder), (folder / "metrics.jsonl").read_bytes()

    said = named(place, "life", "log=console").out  # nothing left to do
    assert len(said.splitlines()) == 1
    assert "complete" in said
    assert "loop.steps" in said
    assert (files_below(folder), (folder / "metrics.jsonl").read_bytes()) == before

    said = named(place, "life", "optimizer.lr=0.2", "loop.steps=14", code=2).out  # another learning
    assert said.count("optimizer.lr: 0.05 → 0.2") == 1
    assert "run.accept_changes=true" in said
    assert (files_below(folder), (folder / "metrics.jsonl").read_bytes()) == before

    damaged = next((folder / "checkpoints" / "step-00000012").glob("*.safetensors"))
    damaged.write_bytes(damaged.read_bytes()[:-1] + b"?")
    free = ["loop.micro_batches=2", "loop.eval_every=null", "loop.steps=14", "log=console"]  # free to change
    said = named(place, "life", *free).out
    assert "loop.micro_batches: 1 → 2" in said
    assert said.count(damaged.name) == 1  # passed over, and why
    assert (status(folder)["resume_step"], status(folder)["attempt"]) == (11, 2)
    assert len(lines(folder, "train")) == 14

    words = ["optimizer.lr=0.2", "run.accept_changes=true", "loop.steps=16", "log=console"]
    ended = named(place, "life", *words)
    assert "optimizer.lr: 0.05 → 0.2" in ended.out
    assert ended.curve("lr")[13:] == [0.05, 0.2, 0.2]
    assert {path.name for path in folder.glob("config.*yaml")} == {"config.yaml", "config.1.yaml", "config.2.yaml"}


def test_a_longer_horizon_is_another_learning_where_the_schedule_depends_on_it(place: Path) -> None:
    words = ("schedule=cosine", "schedule.warmup=1")  # behind the warm-up rates depend on the length
    named(place, "horizon", *words, "loop.steps=3")
    assert "horizon" in named(place, "horizon", *words, "loop.steps=5", code=2).out
    assert len(named(place, "horizon", *words, "run.accept_changes=true", "loop.steps=5").curve()) == 5


def test_a_run_stops_when_it_was_told_to_and_the_printed_command_goes_on(place: Path) -> None:
    first = named(place, "brief", "run.stop_after=1", "loop.steps=1000000", "log=console", code=75)
    was = first.status
    assert was["state"] == "preempted"
    assert "stop_after" in was["reason"]
    advice = shlex.split(first.out.rstrip().splitlines()[-1])
    assert advice[:3] == ["python", "-m", "trainer"]
    again = run(advice[3:], place=place, code=75)
    assert again.status["resume_step"] == was["step"]
    assert len(again.curve()) == again.status["step"] > was["step"]


def test_the_last_line_of_a_run_is_a_command_that_evaluates_it(plain: Finished, place: Path) -> None:
    words = plain.out.rstrip().splitlines()[-1].split("python -m trainer ")[1].split("   (or")[0].split()
    assert "accuracy" in run([*words, "log=console"], place=place).out


@pytest.mark.long
def test_one_run_a_folder_and_a_signal_that_ends_it(place: Path) -> None:
    endless = [*WORDS, "device=cpu", "run.name=busy", "loop.steps=1000000"]
    folder = place / "runs" / "busy"
    command = start(endless, place=place)
    command.wait_for_step(folder, 1)
    said = run(endless, place=place, code=2).out
    assert len(said.splitlines()) == 1
    assert f"pid {command.pid}" in said
    assert os.uname().nodename in said
    os.kill(command.pid, signal.SIGINT)
    ended = command.end()
    assert (ended.code, ended.left) == (75, []), ended.out
    assert (status(folder)["state"], status(folder)["reason"]) == ("preempted", "SIGINT")
    # what was killed lets go of its folder too
    command = start(endless, place=place)
    command.wait_for_step(folder, status(folder)["step"] + 1)
    command.kill()
    assert command.end().code == -signal.SIGKILL
    run([*endless, "loop.steps=1"], place=place)


# ------------------------------------------------------------------------------------------------ what a start does


@pytest.mark.long
def test_one_process_does_not_import_the_compiler(tmp_path: Path) -> None:
    own = ["strategy=auto", "optimizer=adamw", "ema.decay=0.9", "loop.max_norm=1", "run.dir=run"]
    words = [*WORDS, *own, "device=cpu", "log=[]", "loop.steps=1"]
    ended = Command([sys.executable, "-X", "importtime", "-m", "trainer", *words], tmp_path).end()
    imported = set(re.findall(r"^import time:.*\| +(\S+)$", ended.out, re.M))
    assert (ended.code, "torch.optim.adamw" in imported) == (0, True), ended.out[-2000:]
    assert not {"torch._dynamo", "torch._inductor"} & imported


def test_a_folder_is_named_by_what_a_strategy_came_to(tmp_path: Path) -> None:
    for strategy, name in (("auto", "single"), ("mesh", "fsdp")):
        ended = run([*SMALL, f"strategy={strategy}", "loop.steps=1", f"run.root={name}"], place=tmp_path)
        assert ended.folder.name.endswith(f"_mlp_{name}")


def test_a_start_that_is_refused_late_leaves_no_folder_and_no_run_that_seems_to_run(tmp_path: Path) -> None:
    wrong, said = [*WORDS, "loop.steps=1", "checkpoint.best=makro"], "checkpoint.best=makro: the task's metrics are"
    assert said in run(wrong, place=tmp_path, code=2).out
    assert [*tmp_path.glob("runs/*")] == []
    ended = run([*wrong, "run.dir=."], place=tmp_path, code=2)
    assert ended.status["state"] == "failed"
    assert ended.status["reason"].startswith("checkpoint.best=makro")
