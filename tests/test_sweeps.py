"""Several runs in one command: which ones, what is left of them, stopping and going on; the page's search.

The command of a sweep is the product's own; what it starts is a program of a few lines that leaves what a run leaves.
What a sweep refuses stands in test_compose.py.
"""

from __future__ import annotations

import json
import os
import re
import shlex
import signal
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest

from tests.run import ROOT, SMALL, Finished, lines, run, start, status, type_words
from trainer.launch.launcher_environment import read_launch
from trainer.sweeps.results import Outcome, format_best, format_table

# Found as `trainer` by what is started here: best at lr=0.01, and whatever else its words ask of it.
RUN = """
import json, math, os, signal, sys, time
from pathlib import Path

words = dict(word.split("=", 1) for word in sys.argv[1:] if "=" in word)
folder = Path(words["run.dir"].strip("'"))
seed, lr = int(words.get("seed", 0)), float(words.get("optimizer.lr", 0.1))
print("a run speaks", flush=True)
if seed == 7:  # refused
    said = {"message": "cannot work\\nat all", "extraInfo": {"timestamp": "1"}}
    Path(os.environ["TORCHELASTIC_ERROR_FILE"]).write_text(json.dumps({"message": said}))
    sys.exit(2)
folder.mkdir(exist_ok=True)
signal.signal(signal.SIGINT, lambda *_: sys.exit(75))
with (folder / "starts").open("a") as file:
    file.write(os.environ.get("CUDA_VISIBLE_DEVICES", "all") + "\\n")
first = (folder / "starts").read_text().count("\\n") == 1
while seed == 8 and first and not list(folder.parent.glob("*seed=10/starts")):
    time.sleep(0.01)
if seed == 8 and first:  # somebody presses Ctrl-C
    os.kill(os.getppid(), signal.SIGINT)
if seed in (8, 10) and first:
    time.sleep(60)
if seed == 9 and first:  # for want of memory
    os.kill(os.getpid(), signal.SIGKILL)
if seed >= 20:  # until all four are there
    until = time.monotonic() + 60
    while len(list(folder.parent.glob("*/starts"))) < 4 and time.monotonic() < until:
        time.sleep(0.01)
    sys.exit(len(list(folder.parent.glob("*/starts"))) != 4)
accuracy = 1 - abs(math.log10(lr) + 2) / 10
(folder / "environment.json").write_text(json.dumps({"best": "accuracy"}))
lines = [{"kind": "eval", "step": 5, "accuracy": accuracy, "loss": 1.0}, {"kind": "eval", "step": 9, "accuracy": 0.5}]
(folder / "metrics.jsonl").write_text("".join(json.dumps(line) + "\\n" for line in lines))
"""


@pytest.fixture
def place(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    (tmp_path / "trainer").mkdir()
    (tmp_path / "trainer" / "__init__.py").touch()
    (tmp_path / "trainer" / "__main__.py").write_text(RUN)
    monkeypatch.setattr("trainer.sweeps.sweep.refuse_namesake", lambda: None)  # this one stands for the product
    monkeypatch.chdir(tmp_path)
    return tmp_path


def sweep(*words: str, code: int = 0) -> Finished:
    return run(["-m", "run.name=all", *words], code=code)


def written(place: Path) -> list[dict[str, Any]]:
    """The lines of sweep.jsonl."""
    return [json.loads(line) for line in (place / "runs" / "all" / "sweep.jsonl").read_text().splitlines()]


def starts(place: Path) -> list[int]:
    """How often each run was started, in the order of their numbers."""
    files = sorted(place.glob("runs/all/*/starts"), key=lambda path: int(path.parent.name.split("_")[0]))
    return [file.read_text().count("\n") for file in files]


# --------------------------------------------------------------------------------------------------- what is asked for


@pytest.mark.parametrize(
    ("words", "found"),
    [
        # every combination, and the last word changes fastest
        (
            "optimizer.lr=0.1,1 loop.steps=3 seed=range(2)",
            [f"{n}_optimizer.lr={lr},seed={s}" for n, (lr, s) in enumerate((a, b) for a in ("0.1", "1") for b in "01")],
        ),
        ("seed=3 seed=1,2", ["0_seed=1", "1_seed=2"]),  # the last word for a key holds
        ("+optimizer.amsgrad=true,false", ["0_+optimizer.amsgrad=True", "1_+optimizer.amsgrad=False"]),
        ("model=glob(*,exclude=[a*,r*,t*,v*,g*,l*,h*,d*,mi*,mo*])", ["0_model=cnn", "1_model=mlp"]),
        ("data.file=/a,/b", ["0_data.file=_a", "1_data.file=_b"]),  # names are those of folders
        ("hydra.mode=MULTIRUN hydra/launcher=basic seed=1,2", ["0_seed=1", "1_seed=2"]),
        ("--config-dir=conf model=unet experiment=grid seed=5", ["0_model.width=4", "1_model.width=8"]),
    ],
)
def test_folders_are_named_by_what_differs(place: Path, words: str, found: list[str]) -> None:
    for name, text in {
        "model/unet": "_target_: lab.net.Net\nwidth: 8\n",
        "experiment/grid": "# @package _global_\nhydra: {sweeper: {params: {model.width: '4,8', seed: 'range(2)'}}}\n",
    }.items():
        (place / "conf" / name).parent.mkdir(parents=True, exist_ok=True)
        (place / "conf" / f"{name}.yaml").write_text(text)
    sweep(*words.split())
    assert sorted(path.parent.name for path in place.glob("runs/all/*/starts")) == found


# ---------------------------------------------------------------------------------------------------------- one by one


def test_each_run_leaves_a_line_and_the_table_shows_the_best_first(
    place: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    words = ["optimizer.lr=0.1,0.01", "loop.steps=3"]
    screen = sweep(*words).out
    first, second = written(place)
    assert [first["folder"], second["folder"]] == ["0_optimizer.lr=0.1", "1_optimizer.lr=0.01"]
    wanted = {"state": "completed", "exit_code": 0, "figure": "accuracy", "best": 1.0, "best_step": 5, "reason": None}
    assert second.items() >= (wanted | {"last": {"accuracy": 0.5}, "values": {"optimizer.lr": "0.01"}}).items()
    assert second["words"] == ["device=cpu", "log=[]", "run.name=all", "optimizer.lr=0.01", "loop.steps=3"]
    assert capfd.readouterr().out.count("a run speaks") == 2
    rows = screen[screen.index("\nlr ") + 1 :].splitlines()
    assert rows[0].split() == ["lr", "accuracy", "time", "folder"]
    assert re.fullmatch(r"0\.01 +1\.0000 +0:\d\d  1_\* +best", rows[1])
    assert re.fullmatch(r"0\.1 +0\.9000 +0:\d\d  0_\*", rows[2])
    assert rows[4] == f"best        accuracy 1.0000 at step 5: {place}/runs/all/1_optimizer.lr=0.01"

    # the same again runs none; one with other words runs again, in its old folder, and so does what is to begin anew
    again = sweep(*words).out
    assert starts(place) == [1, 1]
    assert "0 runs below" in again
    assert "2 completed before" in again
    assert "1.0000" in again
    sweep(*words, "run.resume=fresh")
    assert starts(place) == [2, 2]
    assert len(written(place)) == 2


def test_what_fails_says_why_and_is_tried_again(place: Path) -> None:
    ended = sweep("seed=7,9,1", code=2)  # the first failing run's
    first, second, third = written(place)
    assert (first["state"], first["exit_code"], first["reason"], first["best"]) == ("failed", 2, "cannot work", None)
    assert (second["exit_code"], second["reason"]) == (1, "killed by SIGKILL")
    assert third["state"] == "completed"
    assert ended.out.splitlines()[-3:] == [
        f"multirun    1 completed, 2 failed, below {place}/runs/all",
        "  0_seed=7   exit code 2: cannot work",
        "  1_seed=9   exit code 1: killed by SIGKILL",
    ]
    sweep("seed=7,9,1", code=2)
    assert [line["state"] for line in written(place)] == ["completed", "failed", "completed"]
    assert starts(place) == [2, 1]  # the second one, the third


def test_ctrl_c_stops_all_and_the_same_command_goes_on(place: Path) -> None:
    words = ["seed=8,10,1", "hydra.launcher.n_jobs=2"]
    ended = sweep(*words, code=75)
    assert {line["folder"]: line["state"] for line in written(place)} == {
        "0_seed=8": "preempted",
        "1_seed=10": "preempted",
    }
    assert f"to go on: the same command with run.dir={place}/runs/all" in ended.out
    sweep(*words)
    assert [line["state"] for line in written(place)] == ["completed"] * 3
    assert starts(place) == [2, 2, 1]


# ------------------------------------------------------------------------------------------------------ several at once


@pytest.mark.parametrize(
    ("words", "gpus", "seen"),
    [
        ("hydra.launcher.n_jobs=auto", "4567", ["4", "5", "6", "7"]),
        ("hydra.launcher.n_jobs=4 processes=2", "01234567", ["0,1", "2,3", "4,5", "6,7"]),
        ("hydra.launcher.n_jobs=4", "", ["all"] * 4),
    ],
)
def test_several_at_once_speak_into_files_and_have_their_own_gpus(
    place: Path,
    words: str,
    gpus: str,
    seen: list[str],
    capfd: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("trainer.sweeps.sweep.visible_gpus", lambda device: list(gpus))
    screen = sweep("seed=20,21,22,23", *words.split()).out  # each waits until all four are there
    folder = place / "runs" / "all"
    assert [(folder / f"{at}_seed=2{at}" / "starts").read_text().strip() for at in range(4)] == seen
    assert (folder / "output" / "0_seed=20.log").read_text() == "a run speaks\n"
    assert "a run speaks" not in capfd.readouterr().out
    assert f"4 at the same time; their output is in {folder}/output" in screen
    assert "completed   2_seed=22" in screen
    assert not gpus or re.search(rf"started     2_seed=22   on GPUs? {seen[2]}", screen), screen


@pytest.mark.parametrize(
    ("rank", "words", "way"),
    [
        ((0, 1, 0, 1), "seed=1,2", ""),  # of torchrun, one process
        ((9, 16, 1, 8), "'run.root=a b' seed=1,2", "processes=8 "),
    ],
)
def test_what_a_launcher_has_started_is_refused_with_the_command_that_works(
    place: Path, rank: tuple[int, ...], words: str, way: str
) -> None:
    names = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE")
    launcher = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "1"} | dict(zip(names, map(str, rank), strict=True))
    code, said = type_words(read_launch(launcher), place, ["-m", *shlex.split(words)], {})
    assert code == 2
    command = f"python -m trainer -m {way}device=cpu 'log=[]' {words}"
    assert said.rstrip().endswith(f"Start it once, without the launcher: {command}")
    assert not (place / "runs").exists()


# ----------------------------------------------------------------------------------------------------------- the screen


def outcome(
    number: int, best: float | None, figure: str | None = "accuracy", loss: float = 0, **values: Any
) -> Outcome:
    state = "failed" if best is None else "completed"
    named = ",".join(f"{key}={value}" for key, value in values.items())
    return Outcome(f"{number}_{named}", [], values, state, 0, figure, best, 3, {}, 61.0, None, best_loss=loss)


def test_the_best_is_by_its_figure_then_by_the_loss_and_no_figure_is_compared_with_another(tmp_path: Path) -> None:
    ran = [outcome(at, 1.0, loss=loss, seed=str(at)) for at, loss in enumerate([0.3, 0.1, 0.2])]
    assert [row.split()[0] for row in format_table(ran).splitlines()] == ["seed", "1", "2", "0"]
    assert "1_seed=1" in format_best(ran, tmp_path)[0]
    rows = format_table([outcome(0, 0.5, "-loss", seed="0"), outcome(1, 0.2, "-loss", seed="1")]).splitlines()
    assert [row.split()[:2] for row in rows] == [["seed", "loss"], ["1", "0.2000"], ["0", "0.5000"]]
    mixed = format_table([outcome(0, 0.5, "-loss", task="a"), outcome(1, 0.2, "accuracy", task="b")])
    assert "best metric" in mixed
    assert not mixed.endswith("best")


# ------------------------------------------------------------------------------------------------------------ real runs

WORDS = (*SMALL, "device=cpu", "schedule=constant", "optimizer=sgd", "loop.global_batch=120", "log=[]")


@pytest.mark.long
@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGTERM])
def test_runs_stop_with_their_sweep_and_the_same_words_go_on(tmp_path: Path, number: int) -> None:
    words = ["-m", *WORDS, "loop.save_every=null", "loop.eval_every=null", "run.name=all", "seed=0,1"]
    words += ["hydra.launcher.n_jobs=2"] if number == signal.SIGKILL else []
    command = start([*words, "loop.steps=1000000"], place=tmp_path)
    first, second = (tmp_path / "runs" / "all" / name for name in ("0_seed=0", "1_seed=1"))
    for folder in (first, second) if number == signal.SIGKILL else (first,):
        command.wait_for_step(folder, 1)
    os.kill(command.pid, number)
    ended = command.end()
    assert ended.left == []  # of themselves
    assert status(first)["state"] == "preempted"
    if number == signal.SIGTERM:
        assert (ended.code, second.exists()) == (75, False)
        assert "1 stopped, 1 not started" in ended.out
    steps = status(first)["step"] + 1000  # more than the other one has
    screen = run([*words, f"loop.steps={steps}"], how="process", place=tmp_path).out
    assert status(first)["resume_step"] > 0
    tried = written(tmp_path)
    assert [(line["state"], line["best_step"]) for line in tried] == [("completed", steps)] * 2
    best = max(tried, key=lambda line: line["best"])
    assert f"best        accuracy {best['best']:.4f} at step {steps}: {first.parent / best['folder']}" in screen


# --------------------------------------------------------------------------------------------------------------- Optuna


@pytest.mark.skipif(find_spec("optuna") is None, reason="needs the optuna extra")
def test_the_search_of_the_page_goes_on_where_it_stopped(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    import optuna
    from optuna.storages import JournalStorage
    from optuna.storages.journal import JournalFileBackend

    monkeypatch.chdir(tmp_path)
    page = (ROOT / "docs" / "sweeps.md").read_text()
    (program,) = re.findall(r"```python\n(import optuna.+?)```", page, re.DOTALL)
    program = program.replace("n_trials=14", "n_trials=2").replace('"loop.epochs=1"', '"loop.steps=2", "device=cpu"')
    assert program.count("loop.steps=2") == program.count("n_trials=2") == 1
    for _ in range(2):
        exec(program, {})
    storage = JournalStorage(JournalFileBackend("search.journal"))
    trials = optuna.load_study(study_name="search", storage=storage).trials
    assert [trial.state.name for trial in trials] == ["COMPLETE"] * 4
    rates = {trial.params["lr"] for trial in trials}
    assert len(rates) == 4
    for trial in trials:
        folder = tmp_path / "runs" / "search" / str(trial.number)
        assert trial.value == lines(folder, "eval")[-1]["accuracy"]
        assert f"lr: {trial.params['lr']}" in (folder / "config.yaml").read_text()
