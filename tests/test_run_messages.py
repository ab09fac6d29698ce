"""The table at the end of a run says what it reached and where the time went, in plain words."""

from __future__ import annotations

import json
import os
import re
import signal
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from tests.commands import SMALL, lines
from tests.inside import here
from trainer.jobs.goodput_report import list_starts, read_costs
from trainer.jobs.run_messages import summary_notes, throughput_lines, time_lines
from trainer.launch import run_status as status_module
from trainer.launch.run_status import StatusWriter
from trainer.loop.trainer import Trainer
from trainer.messages import Refusal
from trainer.strategies.step_timing import PHASES, STEP_PHASES, NoStallClock, StepTimer

WORDS = (*SMALL, "schedule=constant", "loop.global_batch=120", "loop.eval_every=4", "loop.steps=12", "log=[console]")


def table(screen: str) -> dict[str, list[str]]:
    """Its rows: the cells behind each label."""
    (text,) = re.findall(r"^metrics  .*?^throughput.*?\n", screen, re.MULTILINE | re.DOTALL)
    assert max(map(len, text.splitlines())) <= 80
    rows = (re.split(r"  +", line.strip()) for line in text.splitlines())
    return {label: cells for label, *cells in rows}


@pytest.fixture
def both(tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> tuple[str, str]:
    """What a run says that is stopped in its seventh step, and what it says when it has gone on to its end."""
    step = Trainer.train_step

    def stopped(trainer: Trainer, batches: Any) -> None:
        if trainer.progress.step == 6:
            os.kill(os.getpid(), signal.SIGTERM)
        step(trainer, batches)

    monkeypatch.setattr(Trainer, "train_step", stopped)
    assert here(*WORDS, f"run.dir={tmp_path}") == 75
    first = capsys.readouterr().out
    assert here(*WORDS, f"run.dir={tmp_path}") == 0
    return first, capsys.readouterr().out


def test_a_run_ends_with_its_figures_and_its_time(tmp_path: Path, both: tuple[str, str]) -> None:
    first, second = map(table, both)
    evaluations = {line["step"]: line for line in lines(tmp_path, "eval")}
    best = max(evaluations.values(), key=lambda line: line["accuracy"])
    assert (first["after step"], first["accuracy"][0]) == (["4", "4"], f"{100 * evaluations[4]['accuracy']:.1f} %")
    assert second["after step"] == ["12", str(best["step"])]
    assert second["loss"] == [f"{evaluations[12]['loss']:.4f}", f"{best['loss']:.4f}"]
    assert second["training loss"] == [f"{lines(tmp_path, 'train')[-1]['loss_mean']:.4f}"]
    # each start has its own time, and says what it does not cover
    for rows, steps in ((first, "1-7"), (second, "8-12")):
        assert rows[f"time, steps {steps}"] == ["time", "share", "per step"]
        shares = [int(rows[label][1].removesuffix(" %")) for label in ("start", *PHASES) if label in rows]
        assert 95 <= sum(shares) <= 104  # each is rounded, and what is next to nothing is left out
        assert rows["total"][1] == "100 %"
        # how much of each there is, nobody knows; those of every step also say how long one takes
        assert all(len(rows[label]) == 2 + (label in STEP_PHASES) for label in ("start", *PHASES) if label in rows)
    earlier = "note        the table is of this start only; earlier starts did the first 7 steps"
    assert [earlier in screen for screen in both] == [False, True]
    # what is to be done next stays last
    assert both[1].index("\nthroughput  ") < both[1].index("\nbest  ") < both[1].index("\nnext  ")


def test_times_are_what_the_clock_said() -> None:
    watch = StepTimer(NoStallClock())
    assert time_lines(watch, 5.0, 0, 0) == [
        "time                           time      share   per step",
        "  start                       5.0 s      100 %",
        "  total                       5.0 s      100 %",
    ]
    watch.steps = 101
    watch.elapsed |= {"data": 2.0, "forward and backward": 30.0, "optimizer": 4.0, "log": 0.1, "evaluation": 4.9}
    assert time_lines(watch, 200.0, 200, 301) == [
        "time, steps 201-301            time      share   per step",
        "  start                        2:39       80 %",
        "  data                        2.0 s        1 %      20 ms",
        "  forward and backward       30.0 s       15 %     300 ms",
        "  optimizer                   4.0 s        2 %      40 ms",
        "  evaluation                  4.9 s        2 %",
        "  total                        3:20      100 %",
    ]
    assert throughput_lines(watch, 200.0, 64) == ["throughput  177 samples/s in the steps, 32 overall"]


def test_what_a_restart_costs_is_counted_in_steps_and_seconds(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    now = 1000.0
    monkeypatch.setattr(status_module, "time", SimpleNamespace(time=lambda: now, monotonic=lambda: now))
    # killed after 10 steps of a second each, the last checkpoint is that of step 6
    first = StatusWriter(tmp_path, 0, 1, "single", age=3.0)
    now = 1012.5
    first.write("failed", 10, "killed", {"forward and backward": 8.0, "evaluation": 2.0, "save": 1.5})
    now = 1016.0
    second = StatusWriter(tmp_path, 6, 1, "single", age=2.0)
    now = 1024.5
    second.write("completed", 12, None, {"forward and backward": 6.0, "evaluation": 0.5, "save": 0.5})
    assert here("job=report", f"run.dir={tmp_path}") == 0
    said = json.loads((tmp_path / "report" / "report.json").read_text())
    assert (said["goodput"], said["steps_executed"], said["steps_repeated"], said["restarts"]) == (0.75, 16, 4, 1)
    assert (said["seconds"], said["lost"]) == (27.5, {"start": 7.5, "down": 1.5, "repeated": 4.0, "save": 2.0})
    assert (said["goodput_seconds"], said["kept"]) == (round(12.5 / 27.5, 4), 6.0)
    rows = [(one["attempt"], one["resume_step"], one["after"], one["because"]) for one in said["starts"]]
    assert rows == [(1, 0, None, None), (2, 6, "failed", "killed")]
    assert [(one["start"], one["down"], one["repeated"]) for one in said["starts"]] == [
        (4.0, 0.0, 0.0),
        (3.5, 1.5, 4.0),
    ]
    screen = capsys.readouterr().out
    assert "\ngoodput     75.0 % of the steps, 45.5 % of 27.5 s\n" in screen
    assert "\nlost        saves 2.0 s, starting 7.5 s, down 1.5 s, repeating 4 steps 4.0 s\n" in screen
    assert "\nrestarts    1 of 2 starts; checkpoints kept 6.0 s\n" in screen
    assert re.search(r"^2 .* 6 +1\.5 s +3\.5 s +4\.0 s  failed: killed$", screen, re.MULTILINE)
    assert summary_notes(6, ahead=True) == [
        "note        the table is of this start only; earlier starts did the first 6 steps",
        "note        the time is the host's, which runs ahead of the GPU; profile=true shows both",
    ]


def test_a_stop_that_was_asked_for_costs_nothing(tmp_path: Path) -> None:
    StatusWriter(tmp_path, 0, 1, "single").write("preempted", 10, "SIGTERM", {"data": 10.0})
    (tmp_path / "starts.jsonl").write_text("half a li")  # which somebody or a full disk has spoilt
    StatusWriter(tmp_path, 10, 1, "single")
    said = read_costs(tmp_path)
    assert said is not None
    assert (said["restarts"], said["steps_repeated"], said["kept"], said["lost"]["down"]) == (0, 0, 0.0, 0.0)
    assert [(one["attempt"], one["after"]) for one in list_starts(tmp_path)] == [(2, "preempted")]  # the line behind it


@pytest.mark.parametrize(
    ("words", "why"),
    [
        ((), "reads the files of a run: add run.dir=FOLDER"),
        (("run.dir=nowhere",), "nowhere holds no status.json that can be read"),
        (("-m", "run.dir=nowhere", "seed=0,1"), "leave out -m"),
    ],
)
def test_a_report_is_of_a_run_that_is_there(words: tuple[str, ...], why: str) -> None:
    with pytest.raises(Refusal, match=why):
        here("job=report", *words)
