"""The table at the end of a run says what it reached and where the time went, in plain words."""

from __future__ import annotations

import os
import re
import signal
from pathlib import Path
from typing import Any

import pytest

from tests.commands import SMALL, lines
from tests.inside import here
from trainer.jobs.run_messages import goodput_lines, summary_notes, throughput_lines, time_lines
from trainer.launch.run_status import StatusWriter, read_status
from trainer.loop.trainer import Trainer
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


def test_steps_that_were_done_again_are_told_at_the_end(tmp_path: Path) -> None:
    StatusWriter(tmp_path, 0, 1, "single").write("failed", 10, "killed")  # its last checkpoint is that of step 6
    StatusWriter(tmp_path, 6, 1, "single").write("completed", 12, None)
    assert goodput_lines(read_status(tmp_path) or {}) == ["goodput     75.0 %: 4 of 16 steps were done again"]
    assert summary_notes(6, ahead=True) == [
        "note        the table is of this start only; earlier starts did the first 6 steps",
        "note        the time is the host's, which runs ahead of the GPU; profile=true shows both",
    ]


def test_a_stop_that_was_asked_for_costs_nothing(tmp_path: Path) -> None:
    StatusWriter(tmp_path, 0, 1, "single").write("preempted", 10, "SIGTERM")
    StatusWriter(tmp_path, 10, 1, "single").write("completed", 12, None)
    assert goodput_lines(read_status(tmp_path) or {}) == []
