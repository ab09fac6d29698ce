"""metrics.jsonl is never torn and never says a step twice; people and TensorBoard see the same figures."""

import contextlib
import json
import math
import os
import pty
import re
import resource
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

from trainer.messages import format_duration, format_number
from trainer.records.console import Console, LogFile, format_evaluation_line, format_training_line
from trainer.records.metrics_files import MetricsFile
from trainer.records.sinks import Log, WriteDeferred
from trainer.records.tensorboard import TensorBoard

ROOT = Path(__file__).parents[1]
TRAIN = {"loss": 0.21344, "loss_mean": 0.3, "loss_hex": "3e5a8f0c", "lr": 0.1, "samples_per_s": 12345.6, "step_s": 0.01}


def train_line(step, **others):
    return {"step": step, "epoch": 0, **TRAIN, "samples": step * 128, "time": 1e9 + step, **others}


def eval_line(step, **others):
    return {"step": step, "epoch": 0, "samples": 360, "loss": 0.125, "accuracy": 0.978, **others}


def lines(folder):
    return [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]


def steps(folder, kind="train"):
    return [line["step"] for line in lines(folder) if line["kind"] == kind]


class Kept:
    """A sink that remembers its calls."""

    def __init__(self):
        self.calls = []

    def __getattr__(self, verb):
        return lambda *values: self.calls.append((verb, *values))


# ------------------------------------------------------------------------------------------------------- metrics.jsonl


def test_lines_go_to_the_file_and_to_every_sink(tmp_path):
    (tmp_path / "logs").mkdir()  # as the run folder has it
    sinks: list[Any] = [Kept(), Kept()]
    log = Log([MetricsFile(), LogFile(), *sinks])
    log.open(tmp_path, 0, 100, 3)
    log.say("a fact")
    log.train(train_line(10, bad=math.nan))
    log.eval(eval_line(10))
    log.images("inputs", torch.zeros(2, 1, 4, 4), 0)
    log.text("config", "a: 1")
    log.flush()
    log.end("completed")
    log.close()
    log.close()
    assert [call[0] for call in sinks[0].calls] == [
        "open",
        "say",
        "train",
        "eval",
        "images",
        "text",
        "flush",
        "end",
        "close",
    ]
    assert sinks[1].calls[0] == ("open", tmp_path, 0, 100, 3)
    train, evaluation = lines(tmp_path)
    assert list(train)[:3] == ["kind", "step", "epoch"]
    assert (train["kind"], evaluation["kind"], train["loss_hex"]) == ("train", "eval", "3e5a8f0c")
    assert math.isnan(train["bad"])
    words = (tmp_path / "logs" / "rank-0.log").read_text().splitlines()
    assert re.fullmatch(r"\d{4}-\d\d-\d\d \d\d:\d\d:\d\d a fact", words[0])
    assert "loss 0.2134" in words[1]
    assert "eval  step 10" in words[2]


def begun(folder, step=0):
    """metrics.jsonl, from this step on."""
    figures = MetricsFile()
    figures.open(folder, step, None, None)
    return figures


def test_a_start_drops_later_steps_and_a_torn_line(tmp_path):
    log = begun(tmp_path)
    for step in (10, 20, 30):
        log.train(train_line(step))
        log.eval(eval_line(step))
    with (tmp_path / "metrics.jsonl").open("a") as file:
        file.write('{"kind": "train", "step": 1')
    log = begun(tmp_path, 20)
    log.train(train_line(21))
    assert steps(tmp_path) == [10, 20, 21]
    assert steps(tmp_path, "eval") == [10, 20]
    begun(tmp_path)
    assert lines(tmp_path) == []


def test_an_evaluation_that_is_made_up_for_stands_there_once(tmp_path):
    begun(tmp_path).train(train_line(10))
    for accuracy in (0.5, 0.6):  # the first attempt to make up for it was killed before its checkpoint was saved
        begun(tmp_path, 10).eval(eval_line(10, accuracy=accuracy))
    assert [(line["kind"], line.get("accuracy")) for line in lines(tmp_path)] == [("train", None), ("eval", 0.6)]


def test_lines_that_do_not_fit_on_the_disk_wait_and_leave_no_half(tmp_path):
    log = begun(tmp_path)
    log.train(train_line(1))
    size = (tmp_path / "metrics.jsonl").stat().st_size
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    handler = signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
    resource.setrlimit(resource.RLIMIT_FSIZE, (size + 20, before[1]))
    try:
        for step in (2, 3):
            with pytest.raises(WriteDeferred, match=rf"metrics\.jsonl: .*; waiting for room: {step - 1} line"):
                log.train(train_line(step))
        assert steps(tmp_path) == [1]
        with pytest.raises(OSError, match=r"metrics\.jsonl: 2 lines found no room on the disk"):
            log.close()
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)
        signal.signal(signal.SIGXFSZ, handler)
    with (tmp_path / "metrics.jsonl").open("a") as file:
        file.write('{"kind": "tr')  # half a line that could not be cut off at once
    log.train(train_line(4))
    assert steps(tmp_path) == [1, 2, 3, 4]
    log.close()


WRITING = """
import sys
from pathlib import Path
from trainer.records.metrics_files import MetricsFile
log, step = MetricsFile(), 0
log.open(Path(sys.argv[1]), 0, None, None)
while True:
    step += 1
    log.train({"step": step, "loss": 0.5, "loss_mean": 0.5, "padding": "x" * 2000})
    if step == 100:
        print("going", flush=True)
"""


def test_a_kill_tears_the_last_line_at_most_and_the_next_attempt_drops_it(tmp_path):
    environment = {**os.environ, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"}
    process = subprocess.Popen([sys.executable, "-c", WRITING, str(tmp_path)], env=environment, stdout=subprocess.PIPE)
    assert process.stdout.readline()
    process.kill()  # perhaps between two pages that the kernel copies for one write
    process.communicate()
    whole = [line for line in (tmp_path / "metrics.jsonl").read_text().splitlines(True) if line.endswith("\n")]
    assert [json.loads(line)["step"] for line in whole] == list(range(1, len(whole) + 1))
    begun(tmp_path, len(whole)).train(train_line(len(whole) + 1))
    assert steps(tmp_path) == list(range(1, len(whole) + 2))


# ------------------------------------------------------------------------------------------------------- the console


def test_plain_lines_have_no_colour_codes(tmp_path, capsys, monkeypatch):
    monkeypatch.setenv("TERM", "xterm-256color")
    console = Console()
    console.say("[bold]a fact[/bold] as it is")
    console.open(tmp_path, 0, 4200, 30)
    console.train(train_line(360, epoch=2))
    console.eval(eval_line(360))
    console.train(train_line(370, epoch=2, step_s=1.0))
    console.close()
    out = capsys.readouterr().out.splitlines()
    assert out[0] == "[bold]a fact[/bold] as it is"
    assert out[1] == "epoch  3/30  step  360/4200  loss 0.2134     12,346 samples/s  0:38 left"
    assert out[2] == "eval  step 360  loss 0.1250  accuracy  97.8 %"
    # an evaluation's figures stay in its own line
    assert re.fullmatch(r"epoch  3/30  step  370/4200  loss 0.2134     12,346 samples/s  \S+ left", out[3])
    assert len(out) == 4


def test_words_say_what_is_known_and_no_more():
    assert format_training_line(train_line(5, loss=math.nan)) == "epoch 1  step 5  loss nan     12,346 samples/s"
    assert format_evaluation_line({"step": 5, "loss": 1e-7, "perplexity": 12345.678, "ema_accuracy": 1.0}) == (
        "eval  step 5  loss 1e-07  perplexity 1.235e+04  ema_accuracy 100.0 %"
    )
    assert [format_number(value) for value in (0.0, 1.0, math.inf, -0.5, 9999.0)] == [
        "0.0000",
        "1.0000",
        "inf",
        "-0.5000",
        "9999.0000",
    ]
    assert [format_duration(value) for value in (0.4, 41, 61, 600, 3723, 90000)] == [
        "0:00",
        "0:41",
        "1:01",
        "10:00",
        "1:02:03",
        "1 day, 1:00:00",
    ]


ON_SCREEN = """
from pathlib import Path
from trainer.records.console import Console
console = Console()
console.say("a fact")
console.open(Path("."), 0, 100, 1)
console.train({"step": 10, "epoch": 0, "loss": 0.5, "samples_per_s": 100.0, "step_s": 0.1})
console.eval({"step": 10, "loss": 0.25, "accuracy": 0.5})
console.train({"step": 20, "epoch": 0, "loss": 0.4, "samples_per_s": 100.0, "step_s": 0.1})
breakpoint()
console.close()
"""


def on_terminal(code, answers, **environment):
    """Run code on a pseudo terminal; all that it showed there."""
    master, slave = pty.openpty()
    surroundings = {**os.environ, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1", "COLUMNS": "120", **environment}
    process = subprocess.Popen([sys.executable, "-c", code], env=surroundings, stdin=slave, stdout=slave, stderr=slave)
    os.close(slave)
    os.write(master, answers)
    shown = b""
    while True:
        part = b""
        with contextlib.suppress(OSError):  # EIO: the other end is closed
            part = os.read(master, 65536)
        if not part:
            break
        shown += part
    os.close(master)
    assert process.wait(timeout=30) == 0, shown
    return shown.decode()


@pytest.mark.long
def test_a_terminal_shows_one_line_that_is_redrawn_and_a_debugger_works(tmp_path):
    shown = on_terminal(ON_SCREEN, b"p 6 * 7\nc\n", TERM="xterm-256color")
    assert "\r\x1b[2K" in shown
    assert "━" in shown  # the bar
    assert "step  10/100  loss 0.5000" in shown
    assert "eval  step 10  loss 0.2500  accuracy  50.0 %\r\n" in shown
    assert "(Pdb) " in shown
    assert "42" in shown
    assert "\x1b[?25l" not in shown  # the cursor was never hidden
    assert shown.endswith("\r\x1b[2K")  # nothing of the progress line stays
    assert re.search(r"\x1b\[3\dm|\x1b\[38", shown)
    plain = on_terminal(ON_SCREEN, b"c\n", TERM="xterm-256color", NO_COLOR="1")
    assert not re.search(r"\x1b\[[0-9;]*3[0-9;]*m", plain)


# ------------------------------------------------------------------------------------------------------- TensorBoard


def scalars(folder):
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    events = EventAccumulator(str(folder), size_guidance={"scalars": 0, "images": 0, "tensors": 0})
    events.Reload()
    return events, {
        tag: [(event.step, event.value) for event in events.Scalars(tag)] for tag in events.Tags()["scalars"]
    }


def test_tensorboard_has_the_same_figures_and_a_resumed_run_is_one_curve(tmp_path):
    for first in (0, 20):  # the second attempt starts from step 20
        log = Log([TensorBoard()])
        log.open(tmp_path, first, 40, 1)
        log.text("config", "a: 1\nb: 2")
        log.images("inputs", torch.randn(40, 3, 8, 8), first)
        for step in (first + 10, first + 20):
            log.train(train_line(step, loss=float(step + first)))
            log.eval(eval_line(step))
        if first == 0:
            log.train(train_line(30, loss=math.nan))  # lost with the first attempt
        log.close()
    events, curves = scalars(tmp_path / "tensorboard")
    assert curves["loss/loss"] == [(10, 10.0), (20, 20.0), (30, 50.0), (40, 60.0)]
    assert {"optimizer/lr", "speed/samples_per_s", "loss/loss_mean"} <= curves.keys()
    assert not {"samples", "time", "loss_hex", "epoch"} & {tag.split("/")[-1] for tag in curves}
    assert events.Tags()["images"] == ["pictures/inputs"]
    assert "config/text_summary" in events.Tags()["tensors"]
    assert scalars(tmp_path / "tensorboard" / "eval")[1]["loss/loss"] == [(step, 0.125) for step in (10, 20, 30, 40)]


def test_nan_is_drawn_as_nan_and_odd_channels_are_shown(tmp_path):
    sink = TensorBoard()
    sink.close()  # never opened
    sink.open(tmp_path, 0, None, None)
    sink.train(train_line(1, loss=math.nan))
    for channels in (1, 2, 3, 5):
        sink.images(f"of{channels}", torch.full((2, channels, 4, 4), 0.5, dtype=torch.bfloat16), 0)
    events, curves = scalars(tmp_path / "tensorboard")  # flushed: it is there before the file is closed
    assert math.isnan(curves["loss/loss"][0][1])
    assert len(events.Tags()["images"]) == 4
    sink.close()
