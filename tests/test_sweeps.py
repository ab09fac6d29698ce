"""What is left of a sweep and of what was tried: sweep.jsonl, the table, several runs at once; the page's search.

The command of a sweep is the product's own; what it starts is a program of a few lines that leaves what a run leaves.
"""

from __future__ import annotations

import json
import re
import shlex
from dataclasses import replace
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest

from tests.commands import files_below, lines
from tests.inside import here
from tests.warm import ROOT
from trainer.configuration.multirun import Trial, parse_multirun, shorten_floats
from trainer.launch.rendezvous import Launch
from trainer.messages import Refusal
from trainer.sweeps import sweep
from trainer.sweeps.local_runner import divide_machine
from trainer.sweeps.results import Outcome, SweepResults, format_best, format_table, short_headings, shorten
from trainer.sweeps.sweep import run_sweep

# Found as `trainer` by what is started here: best at lr=0.01, and whatever else its words ask of it.
RUN = """
import json, math, os, signal, sys, time
from pathlib import Path

words = dict(word.split("=", 1) for word in sys.argv[1:])
folder = Path(words["run.dir"].strip("'"))
seed, lr = int(words.get("seed", 0)), float(words.get("optimizer.lr", 0.1))
print("a run speaks", flush=True)
if seed == 7:  # refused
    said = {"message": "cannot work\\nat all", "extraInfo": {"timestamp": "1"}}
    Path(os.environ["TORCHELASTIC_ERROR_FILE"]).write_text(json.dumps({"message": said}))
    sys.exit(2)
folder.mkdir(exist_ok=True)
with (folder / "starts").open("a") as file:
    file.write(os.environ.get("CUDA_VISIBLE_DEVICES", "all") + "\\n")
first = (folder / "starts").read_text().count("\\n") == 1
signal.signal(signal.SIGINT, lambda *_: sys.exit(75))
if seed == 8 and first:  # somebody presses Ctrl-C
    os.kill(os.getppid(), signal.SIGINT)
    time.sleep(60)
if seed == 6:  # once is not enough
    heard = []
    signal.signal(signal.SIGINT, lambda *_: heard.append(time.monotonic()))
    for times in (1, 2):
        os.kill(os.getppid(), signal.SIGINT)
        while len(heard) < times:
            time.sleep(0.01)
    sys.exit(1)
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


def written(folder: Path) -> list[dict[str, Any]]:
    """The lines of sweep.jsonl."""
    return [json.loads(line) for line in (folder / "sweep.jsonl").read_text().splitlines()]


def starts(folder: Path) -> list[int]:
    """How often each run was started, in the order of their numbers."""
    files = sorted(folder.glob("*/starts"), key=lambda path: int(path.parent.name.split("_")[0]))
    return [file.read_text().count("\n") for file in files]


# ---------------------------------------------------------------------------------------------------------- one by one


def test_each_run_leaves_a_line_and_the_table_shows_the_best_first(
    place: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    words = ["-m", "optimizer.lr=0.1,0.01", "run.name=grid", "loop.steps=3"]
    assert here(*words) == 0
    lines = written(place / "runs" / "grid")
    assert [line["folder"] for line in lines] == ["0_optimizer.lr=0.1", "1_optimizer.lr=0.01"]
    wanted = {"state": "completed", "exit_code": 0, "figure": "accuracy", "best": 1.0, "best_step": 5, "reason": None}
    assert lines[1].items() >= (wanted | {"last": {"accuracy": 0.5}, "values": {"optimizer.lr": "0.01"}}).items()
    assert lines[1]["words"] == ["device=cpu", "log=[]", "optimizer.lr=0.01", "run.name=grid", "loop.steps=3"]
    screen = capfd.readouterr().out
    assert screen.count("a run speaks") == 2
    rows = screen[screen.index("\nlr ") + 1 :].splitlines()
    assert rows[0].split() == ["lr", "accuracy", "time", "folder"]
    assert re.fullmatch(r"0\.01 +1\.0000 +0:\d\d  1_\* +best", rows[1])
    assert re.fullmatch(r"0\.1 +0\.9000 +0:\d\d  0_\*", rows[2])
    assert rows[4] == f"best        accuracy 1.0000 at step 5: {place}/runs/grid/1_optimizer.lr=0.01"

    # the same again runs none; one with other words runs again, in its old folder, and so does what is to begin anew
    assert here(*words) == 0
    assert starts(place / "runs" / "grid") == [1, 1]
    again = capfd.readouterr().out
    assert "0 runs below" in again
    assert "2 completed before" in again
    assert "1.0000" in again
    words += ["run.resume=fresh"]
    assert here(*words) == 0
    assert here(*words) == 0
    assert starts(place / "runs" / "grid") == [3, 3]
    assert len(written(place / "runs" / "grid")) == 2


def test_what_fails_says_why_and_is_tried_again(place: Path, capfd: pytest.CaptureFixture[str]) -> None:
    words = ["-m", "seed=7,9,1", "run.name=all"]
    assert here(*words) == 2  # the first failing run's
    first, second, third = written(place / "runs" / "all")
    assert (first["state"], first["exit_code"], first["reason"], first["best"]) == ("failed", 2, "cannot work", None)
    assert (second["exit_code"], second["reason"]) == (1, "killed by SIGKILL")
    assert third["state"] == "completed"
    assert capfd.readouterr().out.splitlines()[-3:] == [
        f"multirun    1 completed, 2 failed, below {place}/runs/all",
        "  0_seed=7   exit code 2: cannot work",
        "  1_seed=9   exit code 1: killed by SIGKILL",
    ]
    assert here(*words) == 2
    assert [line["state"] for line in written(place / "runs" / "all")] == ["completed", "failed", "completed"]
    assert starts(place / "runs" / "all") == [2, 1]  # the second one, the third


def test_ctrl_c_stops_all_and_the_same_command_goes_on(place: Path, capfd: pytest.CaptureFixture[str]) -> None:
    words = ["-m", "seed=0,8,1,2", "run.name=stop", "hydra.launcher.n_jobs=2"]
    assert here(*words) == 75
    done = {line["folder"]: line["state"] for line in written(place / "runs" / "stop")}
    assert done["1_seed=8"] == "preempted"
    assert "3_seed=2" not in done
    assert f"to go on: the same command with run.dir={place}/runs/stop" in capfd.readouterr().out
    assert here(*words) == 0
    assert [line["state"] for line in written(place / "runs" / "stop")] == ["completed"] * 4
    assert starts(place / "runs" / "stop")[1::2] == [2, 1]


@pytest.mark.long
def test_ctrl_c_twice_ends_all_at_once(place: Path, capfd: pytest.CaptureFixture[str]) -> None:
    assert here("-m", "seed=6,1", "run.name=twice") == 1
    assert "1 not started, 1 failed" in capfd.readouterr().out


def test_two_sweeps_in_one_folder_are_refused(place: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("trainer.records.folder_lock.WAIT_SECONDS", 0.0)
    sweep.lock_folder(place / "runs" / "mine")
    with pytest.raises(Refusal, match="in use by another run"):
        here("-m", "seed=1,2", "run.name=mine")


# ------------------------------------------------------------------------------------------------------ several at once


def test_several_at_once_speak_into_files_and_have_their_own_gpus(
    place: Path, capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sweep, "visible_gpus", lambda device: ["4", "5", "6", "7"])
    words = ["-m", "seed=20,21,22,23", "run.name=four"]
    assert here(*words, "hydra.launcher.n_jobs=auto") == 0  # each waits until all four are there
    folder = place / "runs" / "four"
    seen = [(folder / f"{at}_seed=2{at}" / "starts").read_text() for at in range(4)]
    assert seen == ["4\n", "5\n", "6\n", "7\n"]
    assert (folder / "output" / "0_seed=20.log").read_text() == "a run speaks\n"
    screen = capfd.readouterr().out
    assert "a run speaks" not in screen
    assert f"4 at the same time; their output is in {folder}/output" in screen
    assert "started     2_seed=22   on GPU 6" in screen
    assert "completed   2_seed=22" in screen


@pytest.mark.parametrize(
    ("at_once", "processes", "gpus", "seen"),
    [
        (1, None, "01", [None]),
        ("auto", None, "", [None]),
        ("auto", None, "01", ["0", "1"]),
        ("auto", 2, "01234", ["0,1", "2,3"]),
        ("auto", "auto", "0123", [None]),
        ("auto", 8, "0123", [None]),
        (2, None, "01234", ["0,1", "2,3"]),  # one run of dp may use both
        (3, None, "01", ["0", "1", "0"]),
        (2, None, "", [None, None]),
    ],
)
def test_every_run_has_an_equal_part(at_once: Any, processes: Any, gpus: str, seen: list[str | None]) -> None:
    parts = divide_machine(at_once, processes, list(gpus))
    assert [part.environment.get("CUDA_VISIBLE_DEVICES") for part in parts] == seen


TWO = Launch(0, 2, 0, 2, from_launcher=True)  # as mpirun says it, without an address


@pytest.mark.parametrize(
    ("launch", "words", "way"),
    [
        (Launch(1, 2, 1, 2, address="127.0.0.1:1", from_launcher=True), "seed=1,2", "processes=2 seed=1,2"),
        (TWO, "seed=1,2", "processes=2 seed=1,2"),
        (Launch(address="127.0.0.1:1", from_launcher=True), "seed=1,2", "seed=1,2"),  # of torchrun, one process
        (TWO, "seed=1,2 processes=4", "seed=1,2 processes=4"),
        (TWO, "run.root='a b' seed=1,2", "processes=2 'run.root=a b' seed=1,2"),
        (TWO, "seed=1,2 hydra.launcher.n_jobs=2", "processes=2 seed=1,2 hydra.launcher.n_jobs=2"),
        (TWO, "seed=1,2 distributed.init_method=tcp://a:1", "processes=2 seed=1,2"),
        (
            Launch(9, 16, 1, 8, from_launcher=True),
            "seed=1,2",
            "processes=8 seed=1,2",
        ),
    ],
)
def test_what_a_launcher_has_started_is_refused_with_the_command_that_works(
    place: Path, launch: Launch, words: str, way: str
) -> None:
    with pytest.raises(Refusal) as refused:
        run_sweep(["-m", *shlex.split(words)], launch)
    assert str(refused.value).endswith(f"Start it once, without the launcher: python -m trainer -m {way}")
    assert files_below(place) == {Path("trainer"), Path("trainer/__init__.py"), Path("trainer/__main__.py")}


def test_processes_that_are_to_meet_at_a_place_of_their_own_are_refused_too(place: Path) -> None:
    with pytest.raises(Refusal, match="each of the 2 processes would begin the same runs"):
        here("-m", "seed=1,2", "distributed.init_method='tcp://127.0.0.1:1?rank=0&world_size=2'")
    assert not (place / "runs").exists()


# ------------------------------------------------------------------------------------------------- files and the screen


def outcome(number: int, best: float | None, figure: str | None = "accuracy", **values: str) -> Outcome:
    state = "failed" if best is None else "completed"
    named = ",".join(f"{key}={value}" for key, value in values.items())
    return Outcome(f"{number}_{named}", [], values, state, 0, figure, best, 3, {}, 61.0, None)


def test_a_file_that_was_damaged_costs_its_line_only(tmp_path: Path) -> None:
    trials = [Trial(at, f"{at}_seed={at}", (f"seed={at}",), {"seed": str(at)}) for at in range(3)]
    for trial in trials:
        SweepResults(tmp_path).add(trial, 0, 1.0, None)
    whole = (tmp_path / "sweep.jsonl").read_text().splitlines(keepends=True)
    (tmp_path / "sweep.jsonl").write_text("".join([whole[0], whole[1][:30] + "\n", '{"other": 1}\n', whole[2]]))
    assert SweepResults(tmp_path).left(trials) == [trials[1]]
    assert SweepResults(tmp_path).left([other := replace(trials[0], words=("seed=5",))]) == [
        other
    ]  # in the same folder
    # a second start counts on from the first
    assert SweepResults(tmp_path).add(trials[2], 0, 2.0, None).seconds == 3.0
    assert [path.name for path in tmp_path.iterdir()] == ["sweep.jsonl"]


def test_a_table_fits_the_terminal_and_cuts_no_figure(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COLUMNS", "70")
    long = "/data/pictures/of/many/flowers/and/trees"
    ran = [outcome(at, at / 10, **{"optimizer.lr": "0.0012345678901", "data.root": f"{long}/{at}"}) for at in range(40)]
    lines = format_table([*ran, outcome(40, None, None, **{"optimizer.lr": "3"})]).splitlines()
    assert len(lines) == 1 + 30 + 1
    assert max(map(len, lines)) <= 70
    assert lines[0].split() == ["lr", "root", "accuracy", "time", "folder"]
    assert lines[1].split() == ["0.001235", "/data/p…ers/and/trees/39", "3.9000", "1:01", "39_*", "best"]
    assert lines[-1] == "  … and 11 runs more, in sweep.jsonl"
    monkeypatch.setenv("COLUMNS", "40")
    assert "3.9000  1:01  39_*    best" in format_table(ran)


def test_of_equal_figures_the_loss_decides_in_a_run_and_between_runs(tmp_path: Path) -> None:
    ran = [replace(outcome(at, 1.0, seed=str(at)), best_loss=loss) for at, loss in enumerate([0.3, 0.1, 0.2])]
    assert [row.split()[0] for row in format_table(ran).splitlines()] == ["seed", "1", "2", "0"]
    assert "1_seed=1" in format_best(ran, tmp_path)[0]
    (folder := tmp_path / "0_seed=0").mkdir()
    (folder / "environment.json").write_text(json.dumps({"best": "accuracy"}))
    said = [{"kind": "eval", "step": at, "loss": loss, "accuracy": 1.0} for at, loss in enumerate([0.3, 0.1, 0.1, 0.2])]
    (folder / "metrics.jsonl").write_text("".join(json.dumps(line) + "\n" for line in said))
    written = SweepResults(tmp_path).add(Trial(0, folder.name, ("seed=0",), {"seed": "0"}), 0, 1.0, None)
    assert (written.best, written.best_step, written.best_loss) == (1.0, 2, 0.1)


def test_a_table_of_losses_of_several_figures_and_of_nothing() -> None:
    rows = format_table([outcome(0, 0.5, "-loss", seed="0"), outcome(1, 0.2, "-loss", seed="1")]).splitlines()
    assert [row.split() for row in rows] == [
        ["seed", "loss", "time", "folder"],
        ["1", "0.2000", "1:01", "1_*", "best"],
        ["0", "0.5000", "1:01", "0_*"],
    ]
    mixed = format_table([outcome(0, 0.5, "-loss", task="a"), outcome(1, 0.2, "accuracy", task="b")])
    assert "best metric" in mixed
    assert "loss 0.5000" in mixed
    assert not mixed.endswith("best")
    assert format_table([outcome(0, None, None, seed="0")]).splitlines()[1].split() == [
        "0",
        "–",
        "1:01",
        "0_*",
        "failed",
    ]


def test_what_is_long_is_short() -> None:
    assert short_headings(["optimizer.lr", "model.width", "data.width"]) == ["lr", "model.width", "data.width"]
    assert len(shorten("x" * 100)) == 24
    assert shorten_floats("optimizer.lr=0.00123456789,seed=1") == "optimizer.lr=0.001235,seed=1"
    assert shorten_floats("a=0.0001,lr=1.23456789e-05,data.file=a.b") == "a=0.0001,lr=1.235e-05,data.file=a.b"


@pytest.mark.long
def test_the_words_of_the_page_are_taken() -> None:
    page = (ROOT / "docs" / "sweeps.md").read_text()
    page = re.sub(r"\\\n +", "", page)
    commands = re.findall(r"^python -m trainer (-m .*?)(?:  .*)?$", page, re.MULTILINE)
    assert len(commands) == 4
    for command in commands:
        assert len(parse_multirun(shlex.split(command)).trials) > 1, command


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
