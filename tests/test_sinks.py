"""Sinks beside the console and TensorBoard: how a run ended, and services that may be slow or gone."""

from __future__ import annotations

import json
import logging
import shutil
import sqlite3
from collections.abc import Callable
from importlib import import_module
from pathlib import Path
from threading import Event
from typing import Any

import pytest

from tests.run import SMALL, lines, run
from trainer import Refusal, Sink
from trainer.records.experiment_trackers import ServiceSink, require_package

WORDS = (
    *SMALL,
    "schedule=constant",
    "loop.global_batch=120",
    "loop.eval_every=2",
    "loop.save_every=2",
    "run.dir=first",
)
SECRET = "+data.vocab_size=${oc.env:TRAINER_TEST_SECRET}"
CONTINUES = "the run continues, and its metrics are in metrics.jsonl"


def lose_a_save(folder: Path, step: int) -> None:
    """As a crash before this save would have left it: the steps since the one before run again."""
    shutil.rmtree(folder / "checkpoints" / f"step-{step:08d}")


class Ending(Sink):
    """Keeps how the run ended."""

    def open(self, folder: Path, step: int, steps: int | None, epochs: int | None) -> None:
        self._path = folder / "ended"

    def end(self, state: str) -> None:
        with self._path.open("a") as file:
            file.write(f"{state}\n")


def test_a_sink_of_ones_own_hears_how_the_run_ended(tmp_path: Path) -> None:
    words = [*WORDS, "loop.eval_every=null", "trust=[tests]", "+log.ending._target_=tests.test_sinks.Ending"]
    words += ["run.accept_changes=true"]
    run([*words, "loop.steps=3", "run.stop_after=0.001"], place=tmp_path, code=75)
    run([*words, "loop.steps=4", "optimizer.lr=1e30", "loop.save_every=null"], place=tmp_path, code=1)
    folder = run([*words, "loop.steps=4"], place=tmp_path).folder
    assert (folder / "ended").read_text().split() == ["preempted", "failed", "completed"]


# -------------------------------------------------------------------------------------------- services, in general


def test_a_service_that_fails_is_told_once_and_one_that_hangs_is_left(caplog: pytest.LogCaptureFixture) -> None:
    done, hanging = [], Event()

    def fails() -> None:
        raise ConnectionError("no route to it\nand more")

    def noted(number: int) -> Callable[[], None]:
        return lambda: done.append(number)

    with caplog.at_level(logging.WARNING):
        one = ServiceSink("json")
        for call in (noted(1), fails, noted(2), fails, noted(3)):
            one.enqueue(call)
        one.close()
        other = ServiceSink("json", patience=0.05)
        other.enqueue(lambda: hanging.wait(60))
        other.close()
    hanging.set()
    ServiceSink("json").close()  # one that was never opened
    assert done == [1, 2, 3]
    told = [record.getMessage() for record in caplog.records]
    assert told[0] == f"note        json: no route to it; {CONTINUES}"
    assert ["no answer for 0.05 s" in text for text in told] == [False, True]


def test_a_package_that_is_missing_is_refused_with_what_to_type(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "nowhere_installed").mkdir()  # a folder of that name is no package
    monkeypatch.syspath_prepend(tmp_path)
    said = r"log=\[nowhere_installed\] needs the package nowhere_installed: pip install -e '.\[nowhere_installed\]'"
    with pytest.raises(Refusal, match=said):
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


def history(told: dict[str, list[Any]]) -> dict[int, dict[str, float]]:
    """The metrics of each step."""
    read = [
        {".".join([*item.nested_key] or [item.key]): json.loads(item.value_json) for item in row.item}
        for row in told["history"]
    ]
    metrics = {row["_step"]: {name: row[name] for name in row if name.startswith(("train/", "eval/"))} for row in read}
    return {step: row for step, row in metrics.items() if row}


def wanted(folder: Path, first: int, last: int) -> dict[int, dict[str, float]]:
    """The metrics of these steps, by metrics.jsonl."""
    metrics: dict[int, dict[str, float]] = {step: {} for step in range(first, last + 1)}
    for line in lines(folder):
        numbers = {name: value for name, value in line.items() if isinstance(value, float) and name != "time"}
        metrics.get(line["step"], {}).update({f"{line['kind']}/{name}": value for name, value in numbers.items()})
    return metrics


@pytest.mark.long
def test_wandb_gets_the_run_and_goes_on_with_it(tmp_path: Path) -> None:
    pytest.importorskip("wandb")
    words = [*WORDS, SECRET, "device=cpu", "log=[console,wandb]", "log.wandb.project=digits", "loop.histograms_every=2"]
    environment, folder, ids = {"WANDB_MODE": "offline", "TRAINER_TEST_SECRET": "hunter2"}, tmp_path / "first", []
    for steps in (4, 6):
        run([*words, f"loop.steps={steps}"], how="process", place=tmp_path, environment=environment)
        ids.append((folder / "wandb.id").read_text().strip())
    assert ids[0] == ids[1]
    starts = sorted((folder / "wandb").glob(f"offline-run-*-{ids[0]}"))
    for told, first, last in zip(map(sent, starts), (1, 5), (4, 6), strict=True):
        (asked,) = told["run"]
        assert (asked.run_id, asked.display_name, asked.project) == (ids[0], "first", "digits")
        assert history(told) == wanted(folder, first, last)
        ended = [item for summary in told["summary"] for item in summary.update]
        states = [json.loads(item.value_json) for item in ended if "state" in (item.key, *item.nested_key)]
        assert (states, told["exit"][0].exit_code) == (["completed"], 0)
    pictures = {path.name.split("_")[0] for path in starts[0].glob("files/media/images/pictures/*.png")}
    assert pictures == {"inputs", "confusion"}
    kept = b"".join(path.read_bytes() for path in (folder / "wandb").rglob("*") if path.is_file())
    assert (b"oc.env:TRAINER_TEST_SECRET" in kept, b"hunter2" in kept) == (True, False)


GONE = {
    "wandb": {"WANDB_BASE_URL": "http://127.0.0.1:9", "WANDB_API_KEY": "0" * 40, "WANDB_INIT_TIMEOUT": "3"},
    "mlflow": {"MLFLOW_TRACKING_URI": "http://127.0.0.1:9", "MLFLOW_HTTP_REQUEST_MAX_RETRIES": "0"},
}


@pytest.mark.long
@pytest.mark.parametrize("service", GONE)
def test_a_service_that_cannot_be_reached_is_told_once_and_kept_for_later(tmp_path: Path, service: str) -> None:
    pytest.importorskip(service)
    words = [*WORDS, f"log=[console,{service}]", "loop.steps=2", "device=cpu"]
    ended = run(words, how="process", place=tmp_path, environment=GONE[service])
    assert ended.status["state"] == "completed"
    assert ended.out.count(CONTINUES) == 1
    if service == "wandb":
        assert "to send it later: wandb sync" in ended.out
        (start,) = (ended.folder / "wandb").glob("offline-run-*")
        assert history(sent(start)) == wanted(ended.folder, 1, 2)


@pytest.mark.long
def test_mlflow_gets_the_run_and_goes_on_with_it(tmp_path: Path) -> None:
    pytest.importorskip("mlflow")
    store, folder = tmp_path / "mlflow.db", tmp_path / "first"
    words = [*WORDS, SECRET, "log=[console,mlflow]", "log.mlflow.experiment=digits", "device=cpu"]
    environment = {"MLFLOW_TRACKING_URI": f"sqlite:///{store}", "TRAINER_TEST_SECRET": "hunter2"}
    # the second start has steps to run again that are there already
    run([*words, "loop.steps=4"], how="process", place=tmp_path, environment=environment)
    lose_a_save(folder, 4)
    again = [*words, "loop.steps=6", "run.accept_changes=true"]
    run(again, how="process", place=tmp_path, environment=environment)

    def asked(query: str) -> list[tuple[Any, ...]]:
        with sqlite3.connect(store) as connection:
            return connection.execute(query).fetchall()

    id = (folder / "mlflow.id").read_text().strip()
    assert asked("select run_uuid, name, status from runs") == [(id, "first", "FINISHED")]
    for kind, name in (("train", "loss"), ("eval", "accuracy")):
        points = asked(f"select step, value from metrics where key = '{kind}/{name}' order by step")
        assert points == [(line["step"], pytest.approx(line[name])) for line in lines(folder, kind)]
    parameters = dict(asked("select key, value from params"))
    assert (parameters["model.width"], parameters["data.vocab_size"]) == ("32", "${oc.env:TRAINER_TEST_SECRET}")
    assert ("state", "completed") in asked("select key, value from tags")
    assert asked("select name from experiments where name = 'digits'")
    assert b"hunter2" not in store.read_bytes()
