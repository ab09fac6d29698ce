"""metrics.jsonl is never torn and never says a step twice; what people see on the screen says what is known."""

from __future__ import annotations

import contextlib
import json
import math
import os
import pty
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from torch import nn

from recipes.vision.classification import Classification
from tests.run import ROOT, SMALL, lines, run
from trainer.records.console import Console, format_duration, format_evaluation_line, format_training_line

TRAIN = {"loss": 0.21344, "loss_mean": 0.3, "loss_hex": "3e5a8f0c", "lr": 0.1, "samples_per_s": 12345.6, "step_s": 0.01}


def train_line(step: int, **others: Any) -> dict[str, Any]:
    return {"step": step, "epoch": 0, **TRAIN, "samples": step * 128, "time": 1e9 + step, **others}


WRITING = """
import sys
from pathlib import Path
from trainer.records.metrics_files import MetricsFile
log, step = MetricsFile(), int(sys.argv[2])
log.open(Path(sys.argv[1]), step, None, None)
while True:
    step += 1
    log.train({"step": step, "loss": 0.5, "loss_mean": 0.5, "padding": "x" * 2000})
    if step % 100 == 0:
        print("going", flush=True)
"""


@pytest.mark.long
def test_a_kill_tears_the_last_line_at_most_and_the_next_attempt_drops_it(tmp_path: Path) -> None:
    environment = {**os.environ, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"}
    written = 0
    for start in (0, 50):  # what comes after the step that it goes on from is said again
        words = [sys.executable, "-c", WRITING, str(tmp_path), str(start)]
        process = subprocess.Popen(words, env=environment, stdout=subprocess.PIPE)
        assert process.stdout is not None
        assert process.stdout.readline()
        process.kill()  # perhaps between two pages that the kernel copies for one write
        process.communicate()
        written = len(lines(tmp_path))
        assert [line["step"] for line in lines(tmp_path)] == list(range(1, written + 1))
    assert written >= 100


def test_plain_lines_have_no_colour_codes(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("TERM", "xterm-256color")
    console = Console()
    console.say("[bold]a fact[/bold] as it is")
    console.open(tmp_path, 0, 4200, 30)
    console.train(train_line(360, epoch=2))
    console.eval({"step": 360, "epoch": 0, "samples": 360, "loss": 0.125, "accuracy": 0.978})
    console.train(train_line(370, epoch=2, step_s=1.0))
    console.close()
    out = capsys.readouterr().out.splitlines()
    assert out[:3] == [
        "[bold]a fact[/bold] as it is",
        "epoch  3/30  step  360/4200  loss 0.2134     12,346 samples/s  0:38 left",
        "eval  step 360  loss 0.1250  accuracy  97.8 %",
    ]
    # an evaluation's figures stay in its own line
    assert re.fullmatch(r"epoch  3/30  step  370/4200  loss 0.2134     12,346 samples/s  \S+ left", out[3])
    assert len(out) == 4


def test_words_say_what_is_known_and_no_more() -> None:
    assert format_training_line(train_line(5, loss=math.nan)) == "epoch 1  step 5  loss nan     12,346 samples/s"
    assert format_evaluation_line({"step": 5, "loss": 1e-7, "perplexity": 12345.678, "ema_accuracy": 1.0}) == (
        "eval  step 5  loss 1e-07  perplexity 1.235e+04  ema_accuracy 100.0 %"
    )
    spoken = {0.4: "0:00", 41: "0:41", 61: "1:01", 3723: "1:02:03", 90000: "1 day, 1:00:00"}
    assert {seconds: format_duration(seconds) for seconds in spoken} == spoken


class Pausing(Classification):
    """It stands in a debugger for a while."""

    def after_step(self, network: nn.Module, step: int) -> None:
        if step == 3:
            breakpoint()  # noqa: T100 - the point of a test


def on_terminal(place: Path, answers: bytes, **environment: str) -> str:
    """A run that pauses, on a pseudo terminal; all that it showed there."""
    words = [*SMALL, "trust=[tests]", "task._target_=tests.test_log.Pausing", "loop.log_every=1", "loop.steps=4"]
    words += ["loop.eval_every=2", "device=cpu", "log=[console]"]
    master, slave = pty.openpty()
    its = {**os.environ, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1", "COLUMNS": "120", **environment}
    command = [sys.executable, "-m", "trainer", *words]
    process = subprocess.Popen(command, cwd=place, env=its, stdin=slave, stdout=slave, stderr=slave)
    os.close(slave)
    os.write(master, answers)
    shown = b""
    with contextlib.suppress(OSError):  # EIO: the other end is closed
        while part := os.read(master, 65536):
            shown += part
    os.close(master)
    assert process.wait(timeout=60) == 0, shown
    return shown.decode()


@pytest.mark.long
def test_a_terminal_shows_one_line_that_is_redrawn_and_a_debugger_works(tmp_path: Path) -> None:
    shown = on_terminal(tmp_path, b"p step + 39\nc\n", TERM="xterm-256color")
    for text in ("\r\x1b[2K", "━", "step 1/4  loss ", "\x1b[2Keval  step 2  loss ", "(Pdb) ", "42"):
        assert text in shown
    assert "\x1b[?25l" not in shown  # the cursor was never hidden
    assert re.search(r"\x1b\[3\dm|\x1b\[38", shown)
    plain = on_terminal(tmp_path, b"c\n", TERM="xterm-256color", NO_COLOR="1")
    assert not re.search(r"\x1b\[[0-9;]*3[0-9;]*m", plain)


def test_the_log_file_has_the_lines_of_the_screen_with_their_time(tmp_path: Path) -> None:
    words = [*SMALL, "loop.steps=2", "loop.global_batch=120", "loop.eval_every=2", "log=[console]", "run.dir=run"]
    finished = run(words, place=tmp_path)
    kept = (finished.folder / "logs" / "rank-0.log").read_text()
    for wanted in ("global batch 120", "loss 2\\.\\d+", "eval  step 2  loss "):
        assert re.search(rf"^\d{{4}}-\d\d-\d\d \d\d:\d\d:\d\d .*{wanted}", kept, re.MULTILINE), kept
        assert re.search(wanted, finished.out)
    assert json.loads((finished.folder / "metrics.jsonl").read_text().splitlines()[0])["kind"] == "train"
