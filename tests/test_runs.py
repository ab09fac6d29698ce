"""Runs of several processes as torchrun starts them: one curve, and what happens to it when something happens."""

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

import pytest
import yaml

from tests.commands import SPLIT, Command, curve, far, files_below, finish, lines, single, status, torchrun
from tests.inside import product

pytestmark = pytest.mark.slow

STEPS = 44  # of 11 an epoch: long enough that a signal sent at step 14 arrives before the end
WORDS = (*SPLIT, "device=cpu", "schedule=constant", "optimizer=sgd", "optimizer.lr=0.1", "loop.save_every=[4,1ep]")


def words(folder: Path, *others: str, steps: int = STEPS) -> list[str]:
    return [*WORDS, f"loop.steps={steps}", f"run.dir='{folder}'", *others]  # quoted for Hydra: it may hold spaces


def same_run(folder: Path, other: Path) -> None:
    """The two runs cannot be told apart by what they learned."""
    assert curve(folder, "loss_hex") == curve(other, "loss_hex")
    assert curve(folder, "sample_digest") == curve(other, "sample_digest")
    assert lines(folder, "eval") == lines(other, "eval")


@pytest.fixture(scope="module")
def place(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("runs")


@pytest.fixture(scope="module")
def alone(place: Path) -> Path:
    """A run of one process that nothing happened to."""
    finish(single(*words(place / "alone")), place)
    return place / "alone"


@pytest.fixture(scope="module")
def two(place: Path) -> tuple[Path, str]:
    """The same on two, with traces of two steps, and what it said."""
    return place / "two", finish(torchrun(2, *words(place / "two", "strategy=ddp", "profile=[3,4]")), place)


# ----------------------------------------------------------------------------------------------------------- one curve


def test_one_learning_curve_under_every_strategy(place, alone, two, processes):
    four = [*words(place / "four", "strategy=ddp_tp", "loop.micro_batches=2", steps=16)]
    assert processes.run(4, product, place, four) == [0] * 4
    for folder in (two[0], place / "four"):
        assert far(curve(alone)[:8], curve(folder)[:8]) < 1e-5
        assert far(curve(alone)[:16], curve(folder)[:16]) < 1e-3
        assert far(curve(alone, "grad_norm")[:8], curve(folder, "grad_norm")[:8]) < 1e-4
        assert curve(alone, "sample_digest")[:16] == curve(folder, "sample_digest")[:16]
    assert status(place / "four")["strategy"] == "ddp_tp"
    assert curve(alone)[-1] < 0.8 * curve(alone)[0]  # and something is learned


# -------------------------------------------------------------------------------------------------- what a run leaves


def test_the_lines_of_metrics_have_the_keys_that_scripts_rely_on(two):
    folder, _ = two
    train, evaluations = lines(folder, "train"), lines(folder, "eval")
    wanted = "kind step epoch loss loss_mean loss_hex lr grad_norm samples samples_per_s step_s time sample_digest"
    assert all(sorted(line) == sorted(wanted.split()) for line in train)
    assert [line["step"] for line in train] == list(range(1, STEPS + 1))
    assert [line["epoch"] for line in train] == [step // 11 for step in range(STEPS)]
    assert [line["samples"] for line in train] == [120 * step for step in range(1, STEPS + 1)]
    assert all(re.fullmatch("[0-9a-f]{8}", line["loss_hex"]) for line in train)
    assert all(line["loss"] == line["loss_mean"] for line in train)
    assert [line["step"] for line in evaluations] == list(range(11, STEPS + 1, 11))
    assert {line["samples"] for line in evaluations} == {360}
    assert {"kind", "step", "epoch", "samples", "loss", "accuracy"} <= set(evaluations[0])
    assert 0.2 < evaluations[-1]["accuracy"] <= 1


def test_every_rank_has_a_log_file_and_the_main_one_the_console(two):
    folder, screen = two
    assert {path.name for path in (folder / "logs").iterdir()} == {"rank-0.log", "rank-1.log"}
    for start in ("run folder ", "strategy  ", "precision ", "batch  ", "completed ", f"epoch 1/4  step  1/{STEPS} "):
        wanted = 2 if start == "run folder " else 1  # at the start and at the end
        assert sum(line.startswith(start) for line in screen.splitlines()) == wanted, screen
    (spent,) = re.findall(rf"^time, steps 1-{STEPS} .*?^  total .*?$", screen, re.MULTILINE | re.DOTALL)
    shares = [int(share) for share in re.findall(r" (\d+) %", spent)]
    assert shares[-1] == 100
    assert 95 <= sum(shares[:-1]) <= 104  # each is rounded, and what is next to nothing is left out
    assert "60 samples × 1 micro-batch × 2 data ranks = global batch 120" in screen
    assert "global batch 120" in (folder / "logs" / "rank-0.log").read_text()
    assert "Traceback" not in screen
    assert "Warning" not in screen


def test_a_profile_has_a_trace_of_each_rank_with_the_steps_that_were_asked_for(two):
    folder, _ = two
    assert {path.name for path in (folder / "profile").iterdir()} == {"rank-0.json", "rank-1.json"}
    for path in (folder / "profile").iterdir():
        names = [event["name"] for event in json.loads(path.read_text())["traceEvents"] if "name" in event]
        assert len([name for name in names if name.startswith("ProfilerStep")]) == 2
        assert any(name.startswith("gloo:") for name in names)  # what travelled


def test_a_run_says_what_it_was(two):
    folder, _ = two
    said = json.loads((folder / "environment.json").read_text())
    assert (said["world_size"], said["strategy"], said["precision"]) == (2, "ddp", "fp32")
    assert said["hosts"] == [os.uname().nodename]
    assert said["packages"]["torch"]
    assert yaml.safe_load((folder / "overrides.yaml").read_text()) == words(folder, "strategy=ddp", "profile=[3,4]")
    config = yaml.safe_load((folder / "config.yaml").read_text())
    assert (config["model"]["width"], config["loop"]["global_batch"], config["seed"]) == (24, 120, 0)
    wanted = {"state": "completed", "reason": None, "root_rank": None, "step": STEPS, "resume_step": 0}
    wanted |= {"world_size": 2, "strategy": "ddp", "attempt": 1, "goodput": 1.0}
    assert status(folder).items() >= wanted.items()
    kept = {path.name for path in (folder / "checkpoints").iterdir()}
    assert {f"step-{step:08d}" for step in (36, 40, 44)} <= kept
    assert len(kept) <= 4  # three recent ones and the best


@pytest.mark.filterwarnings("ignore::DeprecationWarning")
def test_tensorboard_shows_the_same_figures(two):
    folder, _ = two
    train, evaluations = events(folder / "tensorboard"), events(folder / "tensorboard" / "eval")
    wanted = {"loss/loss", "optimizer/lr", "optimizer/grad_norm", "speed/samples_per_s"}
    assert wanted <= set(train.Tags()["scalars"])
    assert {"loss/loss", "accuracy/accuracy"} <= set(evaluations.Tags()["scalars"])
    assert "loss/loss" in set(train.Tags()["scalars"]) & set(evaluations.Tags()["scalars"])  # on one chart
    assert scalars(train, "loss/loss") == pytest.approx(dict(enumerate(curve(folder), 1)), rel=1e-6)
    accuracy = {line["step"]: line["accuracy"] for line in lines(folder, "eval")}
    assert scalars(evaluations, "accuracy/accuracy") == pytest.approx(accuracy, rel=1e-6)
    (image,) = train.Images("pictures/inputs")
    assert image.encoded_image_string.startswith(b"\x89PNG")
    assert (image.width, image.height) > (8, 8)  # a grid
    assert b"global_batch: 120" in train.Tensors("configuration/text_summary")[0].tensor_proto.string_val[0]


def test_a_checkpoint_fits_the_plain_network(two):
    from safetensors.torch import load_file

    from recipes.vision.vit import VisionTransformer

    folder, _ = two
    step = folder / "checkpoints" / f"step-{STEPS:08d}"
    tensors = {name: tensor for file in step.glob("*.safetensors") for name, tensor in load_file(file).items()}
    network = VisionTransformer(num_classes=10, channels=1, image_size=8, width=24, heads=4, depth=2)
    network.load_state_dict({name: value for name, value in tensors.items() if "/" not in name})
    assert not any(name.startswith(("module.", "_orig_mod.")) for name in tensors)
    manifest = json.loads((step / "manifest.json").read_text())
    assert (manifest["step"], manifest["world_size"], manifest["strategy"]) == (STEPS, 2, "ddp")
    assert set(manifest["files"]) == {path.name for path in step.iterdir()} - {"manifest.json"}
    assert json.loads((step / "state.json").read_text())["progress"]["step"] == STEPS


def events(folder: Path):
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    return EventAccumulator(str(folder), size_guidance={"scalars": 0, "images": 0, "tensors": 0}).Reload()


def scalars(accumulator, tag: str) -> dict[int, float]:
    """Step to value; no step twice."""
    points = accumulator.Scalars(tag)
    assert len({point.step for point in points}) == len(points)
    return {point.step: point.value for point in points}


# --------------------------------------------------------------------------------------------------- stopped as asked


@pytest.fixture(scope="module")
def stopped(place: Path) -> tuple[Path, str]:
    """A run whose launcher was sent SIGTERM in the middle of the second epoch, and what it said."""
    folder = place / "r e ü 目录"
    command = Command(torchrun(2, *words(folder, "strategy=ddp")), place, {"LC_ALL": "C"})
    command.wait_for_step(folder, 14)
    os.kill(command.pid, signal.SIGTERM)
    ended = command.end()
    assert ended.code != 0
    assert ended.left == []
    return folder, ended.screen


def test_sigterm_saves_and_the_same_command_goes_on_as_if_nothing_had_been(place, two, stopped, processes):
    folder, screen = stopped
    said = status(folder)
    at = said["step"]
    assert (said["state"], said["reason"], said["resume_step"]) == ("preempted", "SIGTERM", 0)
    assert 14 <= at < STEPS, "the run was over before the signal came"
    assert (folder / "checkpoints" / f"step-{at:08d}" / "manifest.json").is_file()
    assert len(curve(folder)) == at
    assert "to go on:" in screen
    assert screen.count("Traceback") == 1  # torchrun's own
    again = place / "again"
    shutil.copytree(folder, again)
    advice = screen[screen.index("to go on:") :].splitlines()[1]
    launcher, *others = shlex.split(advice)  # what was printed works as it stands
    assert launcher == "torchrun"
    again_it_is = [sys.executable, "-m", "torch.distributed.run", *others]
    screen = finish(again_it_is, place)
    assert f"step {at} of " in screen
    same_run(folder, two[0])
    said = status(folder)
    assert (said["state"], said["resume_step"], said["attempt"], said["goodput"]) == ("completed", at, 2, 1.0)
    assert (folder / "config.1.yaml").is_file()
    assert scalars(events(folder / "tensorboard"), "loss/loss").keys() == set(range(1, STEPS + 1))
    # another strategy and another number of processes take up the same checkpoint
    others = [*words(again, "strategy=ddp_tp", "loop.micro_batches=3", steps=at + 9)]
    assert processes.run(4, product, place, others) == [0] * 4
    assert far(curve(again)[at:][:8], curve(two[0])[at:][:8]) < 1e-5
    assert curve(again, "sample_digest") == curve(two[0], "sample_digest")[: at + 9]
    assert status(again)["resume_step"] == at


@pytest.mark.long
def test_a_signal_to_one_rank_stops_all_of_them_at_one_step(place, two):
    folder = place / "one-rank"
    command = Command(torchrun(2, *words(folder, "strategy=ddp")), place)
    command.wait_for_step(folder, 14)
    os.kill(command.rank(1), signal.SIGTERM)
    ended = command.end()
    assert (ended.code, ended.left) == (0, []), ended.screen  # anything else and torchrun would restart it
    said = status(folder)
    assert said["state"] == "preempted"
    assert len(curve(folder)) == said["step"] < STEPS
    assert curve(folder, "loss_hex") == curve(two[0], "loss_hex")[: said["step"]]


# ------------------------------------------------------------------------------------------------------------- killed


@pytest.mark.long  # beside the main rank, which torchrun restarts
def test_a_killed_rank_ends_the_job_and_the_same_command_heals_it(place, two, processes):
    folder = place / "killed"
    command = Command(torchrun(2, *words(folder, "strategy=ddp")), place)
    command.wait_for_step(folder, 14)
    os.kill(command.rank(1), signal.SIGKILL)
    ended = command.end()
    assert (ended.code, ended.left) == (1, [])
    assert status(folder)["state"] == "failed"
    assert processes.run(2, product, place, words(folder, "strategy=ddp")) == [0, 0]
    same_run(folder, two[0])
    said = status(folder)
    assert said["state"] == "completed"
    assert said["resume_step"] >= 8  # a step may be logged before its checkpoint is whole


@pytest.mark.long
def test_torchrun_heals_a_killed_main_rank_by_itself_in_one_folder(place, two):
    root = place / "healing"
    named = [word for word in words(place, "strategy=ddp", f"run.root={root}") if not word.startswith("run.dir")]
    command = Command(torchrun(2, *named, flags=("--max-restarts=2",)), place)
    folder = root / "not yet"
    while not folder.is_dir():
        assert command.process.poll() is None, command.screen
        time.sleep(0.05)
        folder = next(iter(root.glob("*")), folder)
    command.wait_for_step(folder, 14)
    os.kill(command.rank(0), signal.SIGKILL)
    ended = command.end()
    assert (ended.code, ended.left) == (0, []), ended.screen
    assert list(root.iterdir()) == [folder]
    same_run(folder, two[0])
    assert (status(folder)["state"], status(folder)["attempt"]) == ("completed", 2)


@pytest.mark.long
def test_without_their_launcher_the_ranks_end_too_and_one_process_can_go_on(place, alone):
    folder = place / "orphans"
    command = Command(torchrun(2, *words(folder, "strategy=ddp")), place)
    command.wait_for_step(folder, 14)
    os.kill(command.pid, signal.SIGKILL)
    ended = command.end()
    assert ended.code == -signal.SIGKILL
    assert ended.left == []
    said = status(folder)
    assert (said["state"], said["reason"]) == ("preempted", "the launcher is gone")
    assert len(curve(folder)) == said["step"] < STEPS
    finish(single(*words(folder, "strategy=single")), place)
    assert far(curve(folder)[:24], curve(alone)[:24]) < 1e-3
    assert curve(folder, "sample_digest") == curve(alone, "sample_digest")
    assert status(folder)["resume_step"] == said["step"]


# ------------------------------------------------------------------------------------------------------------ refused


@pytest.mark.parametrize(
    ("restarts", "wrong", "sentence"),
    [
        (1, "optimizer.lrr=1", "optimizer.lrr: there is no such key"),
        pytest.param(0, "loop.global_batch=101", "global_batch 101 / 2", marks=pytest.mark.long),
    ],
)
def test_a_mistake_is_said_once_and_again_in_the_launchers_last_block(tmp_path, restarts, wrong, sentence):
    before = files_below(tmp_path)
    command = torchrun(2, wrong, "strategy=ddp", "device=cpu", flags=(f"--max-restarts={restarts}",))
    screen = finish(command, tmp_path, code=1)
    own, block = screen.split("Traceback")  # torchrun's own, the only one
    assert own.count(sentence) == 1, screen
    assert screen.startswith(wrong.split("=")[0]), screen
    cause = block.split("Root Cause")[1]
    assert cause.count(sentence) == 1, screen
    assert "exitcode  : 2" in cause
    assert files_below(tmp_path) == before
