"""Several runs in one command: which runs the words ask for, that one fails alone, stopping, resuming."""

from __future__ import annotations

import json
import os
import signal
from pathlib import Path

import pytest

from tests.commands import SMALL, Command, files_below, finish, single, status, torchrun
from trainer.configuration.multirun import Multirun, parse_multirun, run_arguments
from trainer.launch.failure import STOPPED
from trainer.launch.local_launcher import combine_exit_codes
from trainer.messages import Refusal

# --------------------------------------------------------------------------------------------------- what is asked for


def names(*words: str) -> list[str]:
    return [trial.name for trial in parse_multirun(["-m", *words]).trials]


def refusal(*words: str) -> str:
    with pytest.raises(Refusal) as caught:
        parse_multirun(["-m", *words])
    return str(caught.value)


def test_every_combination_is_a_run_and_the_last_word_changes_fastest() -> None:
    asked = parse_multirun(["-m", "model=mlp,cnn", "loop.steps=3", "seed=range(2)"])
    assert [trial.words for trial in asked.trials] == [
        ("model=mlp", "loop.steps=3", "seed=0"),
        ("model=mlp", "loop.steps=3", "seed=1"),
        ("model=cnn", "loop.steps=3", "seed=0"),
        ("model=cnn", "loop.steps=3", "seed=1"),
    ]
    assert [trial.name for trial in asked.trials][::3] == ["0_model=mlp,seed=0", "3_model=cnn,seed=1"]


@pytest.mark.parametrize(
    ("words", "found"),
    [
        (["seed=3", "seed=1,2"], ["0_seed=1", "1_seed=2"]),  # the last word for a key holds
        (["seed=1,2", "seed=3"], ["0_seed=3"]),
        (["+optimizer.amsgrad=true,false"], ["0_+optimizer.amsgrad=True", "1_+optimizer.amsgrad=False"]),
        (["model=glob(*,exclude=[a*,r*,t*,v*,g*,l*,h*,d*,mi*,mo*,cnn])"], ["0_model=mlp"]),
        (["log=[console],[]", "run.name=x"], ["0_log=_console", "1_log="]),
        (["run.name=x"], ["0"]),
        (["hydra.mode=MULTIRUN", "hydra/launcher=basic", "seed=1,2"], ["0_seed=1", "1_seed=2"]),
    ],
    ids=str,
)
def test_folders_are_named_by_what_differs(words: list[str], found: list[str]) -> None:
    assert names(*words) == found


@pytest.mark.long
def test_names_are_those_of_folders() -> None:
    (name,) = names("data.file='/a b/c'")
    assert name == "0_data.file=_a_b_c"
    assert len(names("run.name=x", "optimizer.lr=0.1", "data.file=" + "x" * 500)[0]) <= 200


@pytest.mark.long
def test_where_they_go(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)

    def asked(*words: str) -> Multirun:
        return parse_multirun(["-m", "seed=1,2", *words])

    assert (asked().root, asked().name, asked().dir) == ("runs", None, None)
    assert (asked("run.name=x", "run.root=r").root, asked("run.name=x").name, asked("run.dir=d").dir) == ("r", "x", "d")
    assert run_arguments(asked("run.name=x").trials[1], Path("/a b")) == ["seed=2", "run.dir='/a b/1_seed=2'"]
    assert "run.dir" in refusal("run.dir=a,b")


@pytest.mark.long
def test_a_lab_and_an_experiment_that_lists_values(tmp_path: Path) -> None:
    for name, text in {
        "model/unet": "_target_: lab.net.Net\nwidth: 8\n",
        "experiment/grid": "# @package _global_\nhydra: {sweeper: {params: {model.width: '4,8', seed: 'range(2)'}}}\n",
    }.items():
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / f"{name}.yaml").write_text(text)
    lab = ["--config-dir", str(tmp_path), "model=unet"]
    assert parse_multirun(["-m", *lab, "model.width=4,8"]).trials[1].words == (*lab, "model.width=8")
    assert len(parse_multirun(["-m", *lab, "experiment=grid"]).trials) == 4
    assert names(*lab, "experiment=grid", "seed=7")[1] == "1_model.width=8"
    assert names(*lab[:2], "model=glob(u*)") == ["0_model=unet"]


@pytest.mark.long
@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["optimzer.lr=1,2"], "optimizer.lr"),
        (["seed=1,2", "lr=3"], "optimizer.lr"),
        (["seed=x,y"], "seed=y"),
        (["seed=1,2", "loop.steps=["], "cannot be read"),
        (["optimizer.lr=interval(0,1)"], "these values cannot be listed; write a,b,c or range(1,4)"),
        (["hydra.launcher.n_jobs=0", "seed=1,2"], "hydra.launcher.n_jobs=0: expected"),
        (["model=glob(nothing*)"], "no option of model"),
        (["seed=1,2", "hydra.sweep.dir=x"], "run.dir"),
        (["seed=1,2", "hydra/launcher=nothing"], "hydra/launcher/nothing"),
        (["hydra/launcher=basic,basic"], "one launcher"),
        (["hydra/launcher=submitit_local"], "hydra/launcher"),
        (["--cfg", "job", "seed=1,2"], "leave out -m"),
    ],
    ids=str,
)
def test_what_no_run_could_work_with_is_refused_at_once(words: list[str], said: str) -> None:
    message = refusal(*words)
    assert said in message
    assert len(message.splitlines()) <= 2


def test_a_word_of_a_yaml_that_cannot_be_read_is_named(tmp_path: Path) -> None:
    (tmp_path / "experiment").mkdir()
    (tmp_path / "experiment" / "bad.yaml").write_text("# @package _global_\nhydra: {sweeper: {params: {seed: '(1'}}}\n")
    assert "seed=(1" in refusal("--config-dir", str(tmp_path), "experiment=bad", "seed=1,2")


def test_a_yaml_cannot_say_what_is_trusted(tmp_path: Path) -> None:
    (tmp_path / "experiment").mkdir()
    keys = "hydra: {sweeper: {params: {trust: '[os]'}}}"
    (tmp_path / "experiment" / "bad.yaml").write_text(f"# @package _global_\n{keys}\n")
    message = refusal("--config-dir", str(tmp_path), "experiment=bad", "seed=1,2")
    assert "only the command line can set trust" in message


def test_what_some_could_not_work_with_is_refused_before_the_first_starts() -> None:
    message = refusal("strategy=single,nope", "seed=1,x,3,y", "optimizer.lr=1")
    assert [line.split(":")[0] for line in message.splitlines()] == ["strategy=nope", "seed=x", "seed=y"]


@pytest.mark.parametrize(
    ("codes", "stop", "code"),
    [
        ([0], False, 0),
        ([STOPPED, 0], False, STOPPED),
        ([0, 0], True, 0),
        ([-signal.SIGTERM, 0], True, STOPPED),
        ([-signal.SIGTERM, 1], True, 1),
        ([-signal.SIGKILL, 1], False, 1),
        ([2, -signal.SIGTERM], False, 2),
    ],
)
def test_one_code_from_those_of_all_ranks(codes: list[int], stop: bool, code: int) -> None:
    assert combine_exit_codes(codes, stop) == code


# ----------------------------------------------------------------------------------------------------------- real runs

WORDS = (*SMALL, "device=cpu", "schedule=constant", "optimizer=sgd", "loop.global_batch=120", "log=[]")


@pytest.mark.slow
@pytest.mark.long
def test_a_failing_run_fails_alone(tmp_path: Path) -> None:
    words = ["-m", *WORDS, "loop.steps=2", "loop.save_every=1", "optimizer.lr=1e30,-1,0.1", "run.name=all"]
    screen = finish(single(*words), tmp_path, code=1)
    folder = tmp_path / "runs" / "all"
    runs = {path.name for path in folder.iterdir() if path.is_dir()}
    assert runs == {"0_optimizer.lr=1e+30", "2_optimizer.lr=0.1"}
    assert status(folder / "0_optimizer.lr=1e+30")["state"] == "failed"
    assert status(folder / "2_optimizer.lr=0.1")["state"] == "completed"
    assert screen.count("Invalid learning rate: -1") == 2  # where it happens, and at the end
    end = screen.rstrip().splitlines()[-3:]
    assert "1 completed, 2 failed" in end[0]
    assert "exit code 1: step 2: the loss is" in end[1]
    assert "1_optimizer.lr=-1   exit code 2" in end[2]


@pytest.mark.slow
def test_a_mistake_that_all_share_costs_one_message_and_leaves_nothing(tmp_path: Path) -> None:
    screen = finish(single("-m", "optimizer.lrr=1", "seed=1,2"), tmp_path, code=2)
    assert len(screen.splitlines()) == 1
    assert files_below(tmp_path) == set()


@pytest.mark.slow
@pytest.mark.long
def test_runs_stop_when_their_sweep_is_killed_and_the_same_words_go_on(tmp_path: Path) -> None:
    words = ["-m", *WORDS, "loop.save_every=null", "run.name=kill", "seed=0,1", "hydra.launcher.n_jobs=2"]
    command = Command(single(*words, "loop.steps=1000000", "loop.eval_every=null"), tmp_path)
    both = [tmp_path / "runs" / "kill" / name for name in ("0_seed=0", "1_seed=1")]
    for folder in both:
        command.wait_for_step(folder, 1)
    os.kill(command.pid, signal.SIGKILL)
    assert command.end().left == []  # of themselves
    assert [status(folder)["state"] for folder in both] == ["preempted", "preempted"]

    steps = max(status(folder)["step"] for folder in both) + 2
    screen = finish(single(*words, f"loop.steps={steps}", "loop.eval_every=null"), tmp_path)
    assert all(status(folder)["resume_step"] > 0 for folder in both)
    tried = [json.loads(line) for line in (both[0].parent / "sweep.jsonl").read_text().splitlines()]
    assert {line["folder"]: (line["state"], line["best_step"]) for line in tried} == dict.fromkeys(
        [folder.name for folder in both], ("completed", steps)
    )
    best = max(tried, key=lambda line: line["best"])
    assert f"best        accuracy {best['best']:.4f} at step {steps}: {both[0].parent / best['folder']}" in screen


@pytest.mark.slow
@pytest.mark.long
def test_a_signal_stops_all_and_the_same_words_go_on(tmp_path: Path) -> None:
    words = ["-m", *WORDS, "loop.save_every=null", "run.name=stop", "seed=0,1"]
    command = Command(single(*words, "loop.steps=1000000", "loop.eval_every=null"), tmp_path)
    first, second = (tmp_path / "runs" / "stop" / name for name in ("0_seed=0", "1_seed=1"))
    command.wait_for_step(first, 1)
    os.kill(command.pid, signal.SIGTERM)
    ended = command.end()
    assert (ended.code, ended.left) == (STOPPED, []), ended.screen
    assert "1 stopped, 1 not started" in ended.screen
    assert status(first)["state"] == "preempted"
    assert not second.exists()

    steps = status(first)["step"] + 2
    finish(single(*words, f"loop.steps={steps}", "loop.eval_every=null"), tmp_path)
    assert (status(first)["resume_step"], status(first)["step"]) == (steps - 2, steps)
    assert status(second)["state"] == "completed"


@pytest.mark.slow
def test_under_torchrun_they_are_refused_once_with_the_command_that_works(tmp_path: Path) -> None:
    screen = finish(torchrun(2, "-m", "seed=1,2", "strategy=ddp", "run.root=runs"), tmp_path, code=1)
    way = "Start it once, without the launcher: python -m trainer -m processes=2 seed=1,2 strategy=ddp run.root=runs"
    (said,) = (line for line in screen.splitlines() if line.startswith("-m: "))  # torchrun's block begins otherwise
    assert said.endswith(way)
    assert "exitcode  : 2" in screen
    assert not (tmp_path / "runs").exists()
