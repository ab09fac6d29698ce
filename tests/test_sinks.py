"""Sinks beside the console and TensorBoard: metrics.jsonl, and services that may be slow or gone."""

from __future__ import annotations

import json
import logging
import os
import re
import shutil
import signal
import sqlite3
from importlib import import_module
from itertools import islice
from pathlib import Path
from threading import Event
from typing import Any

import pytest

from tests.commands import SMALL, finish, lines, single, status
from tests.inside import here
from trainer.loop.trainer import Trainer
from trainer.messages import Refusal
from trainer.records import experiment_trackers
from trainer.records.experiment_trackers import ServiceSink, require_package
from trainer.records.metrics_reader import read_lines_backwards
from trainer.records.sinks import Sink

WORDS = (*SMALL, "schedule=constant", "loop.global_batch=120", "loop.eval_every=2", "loop.save_every=2")
SECRET = "+data.vocab_size=${oc.env:TRAINER_TEST_SECRET}"


def lose_a_save(folder: Path, step: int) -> None:
    """As a crash before this save would have left it: the steps since the one before run again."""
    shutil.rmtree(folder / "checkpoints" / f"step-{step:08d}")


# --------------------------------------------------------------------------------------------------- metrics.jsonl


def grow(path: Path) -> None:
    """As if there were a terabyte of lines behind the second one: nothing could read it whole."""
    first, second, rest = path.read_bytes().split(b"\n", 2)
    with path.open("wb") as file:
        file.write(first + b"\n" + second + b"\n")
        file.seek(2**40)
        file.write(b"\n" + rest)


def test_a_start_reads_the_end_of_its_metrics_alone(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    words = (*WORDS, f"run.dir={tmp_path}", "log=[console]")
    assert here(*words, "loop.steps=6") == 0
    lose_a_save(tmp_path, 6)
    grow(tmp_path / "metrics.jsonl")
    capsys.readouterr()
    assert here(*words, "loop.steps=8") == 0
    assert re.search(r"after step +8", capsys.readouterr().out)  # the table at the end has its figures from there, too
    lined = [json.loads(line) for _, line in islice(read_lines_backwards(tmp_path / "metrics.jsonl"), 10)]
    wanted = [each for step in (8, 6, 4) for each in (("eval", step), ("train", step), ("train", step - 1))]
    assert [(line["kind"], line["step"]) for line in lined] == [*wanted, ("eval", 2)]


# ---------------------------------------------------------------------------------------------------- how it ended


class Ending(Sink):
    """Keeps how the run ended."""

    def open(self, folder: Path, step: int, steps: int | None, epochs: int | None) -> None:
        self._path = folder / "ended"

    def end(self, state: str) -> None:
        with self._path.open("a") as file:
            file.write(f"{state}\n")


def test_a_sink_hears_how_the_run_ended(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    words = (
        *WORDS,
        "loop.eval_every=null",
        f"run.dir={tmp_path}",
        "trust=[tests]",
        "+log.ending._target_=tests.test_sinks.Ending",
    )
    begin = Trainer.begin

    def stopped(trainer: Trainer, start: Any) -> None:
        begin(trainer, start)
        os.kill(os.getpid(), signal.SIGTERM)

    with monkeypatch.context() as patched:
        patched.setattr(Trainer, "begin", stopped)
        assert here(*words, "loop.steps=3") == 75
    with pytest.raises(FloatingPointError):
        here(*words, "loop.steps=4", "optimizer.lr=1e30", "run.accept_changes=true", "loop.save_every=null")
    assert here(*words, "loop.steps=4", "run.accept_changes=true") == 0
    assert (tmp_path / "ended").read_text().split() == ["preempted", "failed", "completed"]


# -------------------------------------------------------------------------------------------- services, in general


def test_a_service_that_fails_is_told_once_and_one_that_hangs_is_left(
    caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(experiment_trackers, "_PATIENCE", 0.05)
    done, hanging = [], Event()

    def fails() -> None:
        raise ConnectionError("no route to it\nand more")

    with caplog.at_level(logging.WARNING):
        one = ServiceSink("json")
        for call in (lambda: done.append(1), fails, lambda: done.append(2), fails, lambda: done.append(3)):
            one.enqueue(call)
        one.close()
        other = ServiceSink("json")
        other.enqueue(lambda: hanging.wait(60))
        other.close()
    hanging.set()
    ServiceSink("json").close()  # one that was never opened
    assert done == [1, 2, 3]
    told = [record.getMessage() for record in caplog.records]
    assert told[0] == "note        json: no route to it; the run continues, and its metrics are in metrics.jsonl"
    assert ["no answer for 0.05 s" in text for text in told] == [False, True]


@pytest.mark.parametrize("name", ["wandb", "mlflow"])
def test_a_package_that_is_missing_is_refused_with_what_to_type(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    found = experiment_trackers.find_spec
    monkeypatch.setattr(experiment_trackers, "find_spec", lambda asked: None if asked == name else found(asked))
    with pytest.raises(Refusal, match=rf"log=\[{name}\] needs the package {name}: pip install -e '.\[{name}\]'"):
        here(f"run.dir={tmp_path}/run", f"log=[console,{name}]")
    assert not (tmp_path / "run").exists()


def test_a_folder_of_that_name_is_no_package(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "nowhere_installed").mkdir()
    monkeypatch.syspath_prepend(tmp_path)
    with pytest.raises(Refusal, match="needs the package nowhere_installed"):
        require_package("nowhere_installed")


# ------------------------------------------------------------------------------------------------ Weights & Biases


def sent(start: Path) -> dict[str, list[Any]]:
    """What one start has told wandb, as it lies in its file: LevelDB's log format, with a header of 7 bytes."""
    messages: Any = import_module("wandb.proto.wandb_internal_pb2")
    (path,) = start.glob("*.wandb")
    data, at, whole = path.read_bytes(), 7, b""
    told: dict[str, list[Any]] = {}
    while at + 7 <= len(data):
        if 32768 - at % 32768 < 7:  # the rest of a block, too short for a header
            at += 32768 - at % 32768
        size, kind = int.from_bytes(data[at + 4 : at + 6], "little"), data[at + 6]
        whole, at = whole + data[at + 7 : at + 7 + size], at + 7 + size
        if kind in (1, 4):  # a whole record, or the last piece of one
            record, whole = messages.Record.FromString(whole), b""
            name = str(record.WhichOneof("record_type"))
            told.setdefault(name, []).append(getattr(record, name))
    return told


def rows(told: dict[str, list[Any]]) -> dict[int, dict[str, Any]]:
    """What wandb knows of each step."""
    read = [
        {".".join([*item.nested_key] or [item.key]): json.loads(item.value_json) for item in row.item}
        for row in told["history"]
    ]
    return {row["_step"]: row for row in read}


def history(told: dict[str, list[Any]]) -> dict[int, dict[str, float]]:
    """The metrics of each step."""
    metrics = {
        step: {name: value for name, value in row.items() if name.startswith(("train/", "eval/"))}
        for step, row in rows(told).items()
    }
    return {step: row for step, row in metrics.items() if row}


def state(told: dict[str, list[Any]]) -> Any:
    """How the run ended."""
    updates = [item for summary in told["summary"] for item in summary.update]
    (last,) = [json.loads(item.value_json) for item in updates if "state" in (item.key, *item.nested_key)]
    return last


def wanted(folder: Path, first: int, last: int) -> dict[int, dict[str, float]]:
    """The metrics of these steps, by metrics.jsonl."""
    metrics: dict[int, dict[str, float]] = {step: {} for step in range(first, last + 1)}
    for line in lines(folder):
        numbers = {name: value for name, value in line.items() if isinstance(value, float) and name != "time"}
        metrics.get(line["step"], {}).update({f"{line['kind']}/{name}": value for name, value in numbers.items()})
    return metrics


@pytest.mark.long
@pytest.mark.slow
def test_wandb_gets_the_run_and_goes_on_with_it(tmp_path: Path) -> None:
    pytest.importorskip("wandb")
    surroundings = {"WANDB_MODE": "offline", "TRAINER_TEST_SECRET": "hunter2"}
    folder = tmp_path / "first"
    words = (
        *WORDS,
        SECRET,
        f"run.dir={folder}",
        "log=[console,wandb]",
        "log.wandb.project=digits",
        "device=cpu",
        "loop.histograms_every=2",
    )
    finish(single(*words, "loop.steps=4"), tmp_path, environment=surroundings)
    id = (folder / "wandb.id").read_text().strip()
    finish(single(*words, "loop.steps=6"), tmp_path, environment=surroundings)
    assert (folder / "wandb.id").read_text().strip() == id
    starts = sorted((folder / "wandb").glob(f"offline-run-*-{id}"))
    one, other = map(sent, starts)
    for told, first, last in ((one, 1, 4), (other, 5, 6)):
        run = told["run"][0]
        assert (run.run_id, run.display_name, run.project) == (id, "first", "digits")
        assert history(told) == wanted(folder, first, last)
        assert (state(told), told["exit"][0].exit_code) == ("completed", 0)
    pictures = {path.name.split("_")[0] for path in starts[0].glob("files/media/images/pictures/*.png")}
    assert pictures == {"inputs", "confusion"}
    assert [step for step, row in rows(one).items() if any(name.startswith("weights/") for name in row)] == [2, 4]
    kept = b"".join(path.read_bytes() for path in (folder / "wandb").rglob("*") if path.is_file())
    assert b"oc.env:TRAINER_TEST_SECRET" in kept
    assert b"hunter2" not in kept


@pytest.mark.long
@pytest.mark.slow
def test_a_wandb_that_cannot_be_reached_is_kept_for_later(tmp_path: Path) -> None:
    pytest.importorskip("wandb")
    nowhere = {"WANDB_BASE_URL": "http://127.0.0.1:9", "WANDB_API_KEY": "0" * 40, "WANDB_INIT_TIMEOUT": "3"}
    folder = tmp_path / "gone"
    words = (*WORDS, f"run.dir={folder}", "log=[console,wandb]", "loop.steps=2", "device=cpu")
    screen = finish(single(*words), tmp_path, environment=nowhere)
    assert status(folder)["state"] == "completed"
    assert screen.count("the run continues, and its metrics are in metrics.jsonl") == 1
    assert "to send it later: wandb sync" in screen
    (start,) = (folder / "wandb").glob("offline-run-*")
    assert history(sent(start)) == wanted(folder, 1, 2)


# ---------------------------------------------------------------------------------------------------------- MLflow


def asked(database: Path, query: str) -> list[tuple[Any, ...]]:
    with sqlite3.connect(database) as connection:
        return connection.execute(query).fetchall()


@pytest.mark.slow
@pytest.mark.long
def test_mlflow_gets_the_run_and_goes_on_with_it(tmp_path: Path) -> None:
    pytest.importorskip("mlflow")
    store = tmp_path / "mlflow.db"
    surroundings = {"MLFLOW_TRACKING_URI": f"sqlite:///{store}", "TRAINER_TEST_SECRET": "hunter2"}
    folder = tmp_path / "first"
    words = (*WORDS, SECRET, f"run.dir={folder}", "log=[console,mlflow]", "log.mlflow.experiment=digits", "device=cpu")
    # the second start has steps to run again that are there already
    finish(single(*words, "loop.steps=4"), tmp_path, environment=surroundings)
    lose_a_save(folder, 4)
    finish(single(*words, "loop.steps=6", "run.accept_changes=true"), tmp_path, environment=surroundings)
    id = (folder / "mlflow.id").read_text().strip()
    assert asked(store, "select run_uuid, name, status from runs") == [(id, "first", "FINISHED")]
    for kind, name, wanted in (("train", "loss", range(1, 7)), ("eval", "accuracy", (2, 4, 6))):
        points = asked(store, f"select step, value from metrics where key = '{kind}/{name}' order by step")
        assert points == [(line["step"], pytest.approx(line[name])) for line in lines(folder, kind)]
        assert [step for step, _ in points] == list(wanted)
    parameters = dict(asked(store, "select key, value from params"))
    assert (parameters["model.width"], parameters["data.vocab_size"]) == ("32", "${oc.env:TRAINER_TEST_SECRET}")
    assert ("state", "completed") in asked(store, "select key, value from tags")
    assert asked(store, "select name from experiments where name = 'digits'")
    assert b"hunter2" not in store.read_bytes()


@pytest.mark.long
@pytest.mark.slow
def test_an_mlflow_that_cannot_be_reached_is_told_once(tmp_path: Path) -> None:
    pytest.importorskip("mlflow")
    nowhere = {"MLFLOW_TRACKING_URI": "http://127.0.0.1:9", "MLFLOW_HTTP_REQUEST_MAX_RETRIES": "0"}
    folder = tmp_path / "gone"
    words = (*WORDS, f"run.dir={folder}", "log=[console,mlflow]", "loop.steps=2", "device=cpu")
    screen = finish(single(*words), tmp_path, environment=nowhere)
    assert status(folder)["state"] == "completed"
    assert screen.count("the run continues, and its metrics are in metrics.jsonl") == 1
