"""Runs of several processes as torchrun starts them: what they leave, and what happens when something happens."""

from __future__ import annotations

import json
import os
import re
import shlex
import shutil
import signal
import sys
import time
from pathlib import Path
from typing import Any

import pytest
import yaml
from safetensors.torch import load_file

from recipes.vision.vit import VisionTransformer
from tests.ranks import Processes
from tests.run import SPLIT, Command, Finished, curve, far, files_below, lines, run, start, status

STEPS = 44  # of 11 an epoch: long enough that a signal sent at step 14 arrives before the end
WORDS = (
    *(*SPLIT, "schedule=constant", "optimizer=sgd", "optimizer.lr=0.1", "loop.save_every=[4,1ep]"),
    *(f"loop.steps={STEPS}", "log=[console,tensorboard]"),
)
REAL = (*WORDS, "device=cpu", "strategy=ddp")


@pytest.fixture(scope="module")
def place(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("runs")


@pytest.fixture(scope="module")
def alone(place: Path) -> Path:
    """A run of one process that nothing happened to."""
    return run([*WORDS, "run.dir=alone"], place=place).folder


@pytest.fixture(scope="module")
def two(place: Path, processes: Processes) -> Finished:
    """The same on two, with traces of two steps."""
    return run([*WORDS, "strategy=ddp", "profile=[3,4]", "run.dir=two"], 2, "group", place=place)


# -------------------------------------------------------------------------------------------------- what a run leaves


def test_one_learning_curve_whose_lines_have_the_keys_that_scripts_rely_on(alone: Path, two: Finished) -> None:
    assert far(curve(alone)[:8], two.curve()[:8]) < 1e-5
    assert far(curve(alone), two.curve()) < 1e-2
    assert far(curve(alone, "grad_norm")[:8], two.curve("grad_norm")[:8]) < 1e-4
    assert curve(alone, "sample_digest") == two.curve("sample_digest")
    assert curve(alone)[-1] < 0.8 * curve(alone)[0]  # and something is learned
    train, evaluations = two.lines("train"), two.lines("eval")
    wanted = "kind step epoch loss loss_mean loss_hex lr grad_norm samples samples_per_s step_s time sample_digest"
    assert all(sorted(line) == sorted(wanted.split()) for line in train)
    assert [(line["step"], line["epoch"], line["samples"]) for line in train] == [
        (step, (step - 1) // 11, 120 * step) for step in range(1, STEPS + 1)
    ]
    assert all(re.fullmatch("[0-9a-f]{8}", line["loss_hex"]) for line in train)
    assert [(line["step"], line["samples"]) for line in evaluations] == [(step, 360) for step in (11, 22, 33, 44)]
    assert {"kind", "step", "epoch", "samples", "loss", "accuracy"} <= set(evaluations[0])
    assert 0.2 < evaluations[-1]["accuracy"] <= 1


def test_a_run_says_what_it_was_where_the_time_went_and_what_is_next(two: Finished) -> None:
    assert {path.name for path in (two.folder / "logs").iterdir()} == {"rank-0.log", "rank-1.log"}
    for begin in ("run folder ", "strategy  ", "precision ", "batch  ", "completed ", f"epoch 1/4  step  1/{STEPS} "):
        times = 2 if begin == "run folder " else 1  # at the start and at the end
        assert sum(line.startswith(begin) for line in two.out.splitlines()) == times, two.out
    assert "60 samples × 1 micro-batch × 2 data ranks = global batch 120" in two.out
    last, best = two.lines("eval")[-1], max(two.lines("eval"), key=lambda line: line["accuracy"])
    table = dict(re.findall(r"^  (\S[a-z_ ]*?)  +(.*?) *$", two.out, re.MULTILINE))
    assert table["after step"].split() == [str(last["step"]), str(best["step"])]
    assert table["loss"].split() == [f"{last['loss']:.4f}", f"{best['loss']:.4f}"]
    (spent,) = re.findall(rf"^time, steps 1-{STEPS} .*?^  total .*?$", two.out, re.MULTILINE | re.DOTALL)
    *shares, total = [int(share) for share in re.findall(r" (\d+) %", spent)]
    assert total == 100
    assert 95 <= sum(shares) <= 104  # each is rounded, and what is next to nothing is left out
    assert two.out.index("\nthroughput  ") < two.out.index("\nbest  ") < two.out.index("\nnext  ")
    said = json.loads((two.folder / "environment.json").read_text())
    assert (said["world_size"], said["strategy"], said["precision"]) == (2, "ddp", "fp32")
    assert (said["hosts"], bool(said["packages"]["torch"])) == ([os.uname().nodename], True)
    assert {*WORDS, "strategy=ddp"} <= {*yaml.safe_load((two.folder / "overrides.yaml").read_text())}
    config = yaml.safe_load((two.folder / "config.yaml").read_text())
    assert (config["model"]["width"], config["loop"]["global_batch"], config["seed"]) == (24, 120, 0)
    ended: dict[str, Any] = {"state": "completed", "reason": None, "root_rank": None, "step": STEPS, "resume_step": 0}
    ended |= {"world_size": 2, "strategy": "ddp", "attempt": 1, "goodput": 1.0}
    assert two.status.items() >= ended.items()
    for path in sorted((two.folder / "profile").iterdir(), key=str):  # a trace of each rank
        names = [event["name"] for event in json.loads(path.read_text())["traceEvents"] if "name" in event]
        assert len([name for name in names if name.startswith("ProfilerStep")]) == 2
        assert any(name.startswith("gloo:") for name in names)  # what travelled
    assert len([*(two.folder / "profile").iterdir()]) == 2


def test_a_checkpoint_fits_the_plain_network(two: Finished) -> None:
    step = two.folder / "checkpoints" / f"step-{STEPS:08d}"
    assert {f"step-{number:08d}" for number in (36, 40, 44)} <= {path.name for path in step.parent.iterdir()}
    assert len([*step.parent.iterdir()]) <= 4  # three recent ones and the best
    tensors = {name: tensor for file in step.glob("*.safetensors") for name, tensor in load_file(file).items()}
    network = VisionTransformer(num_classes=10, channels=1, image_size=8, width=24, heads=4, depth=2)
    network.load_state_dict({name: value for name, value in tensors.items() if "/" not in name})
    manifest = json.loads((step / "manifest.json").read_text())
    assert (manifest["step"], manifest["world_size"], manifest["strategy"]) == (STEPS, 2, "ddp")
    assert set(manifest["files"]) == {path.name for path in step.iterdir()} - {"manifest.json"}
    assert json.loads((step / "state.json").read_text())["progress"]["step"] == STEPS


# ---------------------------------------------------------------------------------------------- what happens to them


def same_run(folder: Path, two: Finished) -> None:
    """The two runs cannot be told apart by what they learned."""
    assert curve(folder, "loss_hex") == two.curve("loss_hex")
    assert curve(folder, "sample_digest") == two.curve("sample_digest")
    assert lines(folder, "eval") == two.lines("eval")
    assert status(folder)["state"] == "completed"


@pytest.mark.long
def test_sigterm_saves_and_what_is_printed_goes_on_as_if_nothing_had_been(
    place: Path, two: Finished, processes: Processes
) -> None:
    folder = place / "r e ü 目录"
    words = [*REAL, f"run.dir='{folder}'"]  # quoted for Hydra
    command = start(words, 2, "torchrun", place=place, environment={"LC_ALL": "C"})
    command.wait_for_step(folder, 14)
    os.kill(command.pid, signal.SIGTERM)
    ended, said = command.end(), status(folder)
    at = said["step"]
    assert (ended.code != 0, ended.left) == (True, [])
    assert (said["state"], said["reason"], said["resume_step"]) == ("preempted", "SIGTERM", 0)
    assert 14 <= at < STEPS, "the run was over before the signal came"
    assert (folder / "checkpoints" / f"step-{at:08d}" / "manifest.json").is_file()
    assert len(curve(folder)) == at
    assert ended.out.count("Traceback") == 1  # torchrun's own
    shutil.copytree(folder, place / "again")
    launcher, *others = shlex.split(ended.out[ended.out.index("to go on:") :].splitlines()[1])
    assert launcher == "torchrun"  # what was printed works as it stands
    again = Command([sys.executable, "-m", "torch.distributed.run", *others], place).end()
    assert (again.code, again.left, again.litter) == (0, [], []), again.out
    assert f"step {at} of " in again.out
    same_run(folder, two)
    assert (status(folder)["resume_step"], status(folder)["attempt"], status(folder)["goodput"]) == (at, 2, 1.0)
    assert (folder / "config.1.yaml").is_file()
    # another strategy and another number of processes take up the same checkpoint
    words = [*WORDS, "strategy=ddp_tp", "loop.micro_batches=3", f"loop.steps={at + 9}", "run.dir=again"]
    other = run(words, 4, "group", place=place)
    assert far(other.curve()[at:][:8], two.curve()[at:][:8]) < 1e-5
    assert (other.curve("sample_digest"), other.status["resume_step"]) == (two.curve("sample_digest")[: at + 9], at)


@pytest.mark.long
def test_what_happens_to_the_launcher_stops_all_ranks_at_one_step(
    place: Path, two: Finished, processes: Processes
) -> None:
    folder = place / "orphans"
    command = start([*REAL, f"run.dir={folder}"], 2, "torchrun", place=place)
    command.wait_for_step(folder, 14)
    os.kill(command.pid, signal.SIGKILL)
    ended, said = command.end(), status(folder)
    assert (ended.code, ended.left) == (-signal.SIGKILL, []), ended.out
    assert (said["state"], said["reason"], len(curve(folder))) == ("preempted", "the launcher is gone", said["step"])
    assert 14 <= said["step"] < STEPS
    run([*WORDS, "strategy=ddp", f"run.dir={folder}"], 2, "group", place=place)
    same_run(folder, two)


@pytest.mark.long
def test_torchrun_heals_a_killed_main_rank_by_itself_in_one_folder(place: Path, two: Finished) -> None:
    root = place / "healing"
    command = start([*REAL, f"run.root={root}"], 2, "torchrun", place=place, flags=("--max-restarts=2",))
    folder = root / "not yet"
    while not folder.is_dir():
        assert command.process.poll() is None, command.screen
        time.sleep(0.05)
        folder = next(iter(root.glob("*")), folder)
    command.wait_for_step(folder, 14)
    os.kill(command.rank(0), signal.SIGKILL)
    ended = command.end()
    assert (ended.code, ended.left) == (0, []), ended.out
    assert list(root.iterdir()) == [folder]
    same_run(folder, two)
    assert status(folder)["attempt"] == 2


@pytest.mark.long
def test_a_mistake_is_said_once_and_again_in_the_launchers_last_block(tmp_path: Path) -> None:
    wrong, sentence = "optimizer.lrr=1", "optimizer.lrr: there is no such key"
    words = [wrong, "strategy=ddp", "device=cpu"]
    ended = start(words, 2, "torchrun", place=tmp_path, flags=("--max-restarts=1",)).end()
    own, block = ended.out.split("Traceback")  # torchrun's own, the only one
    assert own.count(sentence) == 1, ended.out
    assert ended.out.startswith(wrong.split("=")[0]), ended.out
    cause = block.split("Root Cause")[1]
    assert cause.count(sentence) == 1, ended.out
    assert "exitcode  : 2" in cause
    assert (ended.code, ended.left, files_below(tmp_path)) == (1, [], set())
