"""Files of a run that were tampered with or come from elsewhere: said in words, and passed over."""

from __future__ import annotations

import json
import re
import shutil
import tracemalloc
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from tests.commands import SMALL, curve, finish, single, status
from tests.inside import here
from trainer.jobs.resume_decision import peek_checkpoint
from trainer.launch.run_status import read_status
from trainer.launch.typed_values import refuse_unreadable
from trainer.messages import Refusal
from trainer.parallel.ranks import Ranks
from trainer.records.checkpoint.manifest import RESUME_KEYS, CorruptCheckpoint, encode_manifest, read_manifest
from trainer.records.checkpoint.store import open_newest
from trainer.records.checkpoint.writer import _sync_and_hash

WORDS = (*SMALL, "strategy=single", "schedule=constant", "loop.global_batch=120", "loop.save_every=2")


@pytest.fixture(scope="module")
def trained(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run with checkpoints of steps 2 and 4."""
    folder = tmp_path_factory.mktemp("schema") / "trained"
    assert here(*WORDS, f"run.dir={folder}", "loop.steps=4") == 0
    return folder


@pytest.fixture
def folder(trained: Path, tmp_path: Path) -> Path:
    """A copy of it, to be tampered with."""
    return Path(shutil.copytree(trained, tmp_path / "run"))


def forge(folder: Path, change: Callable[[Any], Any]) -> None:
    """Change what the newest state.json says, and make the manifest agree."""
    path = folder / "checkpoints" / "step-00000004"
    said = json.loads((path / "state.json").read_text())
    (path / "state.json").write_text(json.dumps(change(said) or said))
    manifest = read_manifest(path)
    manifest.files["state.json"] = _sync_and_hash(path / "state.json")
    (path / "manifest.json").write_bytes(encode_manifest(manifest))


def progress(**values: Any) -> Callable[[Any], None]:
    return lambda said: said["progress"].update(values)


def nested(depth: int) -> Any:
    return {"a": nested(depth - 1)} if depth else 1


STATES = {
    "a negative position": (progress(position=-120), "progress.position is -120, not a whole number"),
    "a huge position": (
        progress(position=10**12),
        "progress.position is 1,000,000,000,000, more than",
    ),
    "behind the epoch": (progress(position=10**6, samples=10**6), "progress.position is 1,000,000, an epoch has 1,437"),
    "a huge step": (progress(step=10**9, samples=10**12), "progress.step is 1,000,000,000, the manifest is of step 4"),
    "a huge epoch": (progress(epoch=10**9), "progress.epoch is 1,000,000,000, more than progress.step"),
    "beyond JSON": (progress(samples=10**300), "progress.samples is 1000"),
    "a text": (progress(samples="many"), "progress.samples is 'many', not a whole number"),
    "true": (progress(epoch=True), "progress.epoch is True, not a whole number"),
    "a fraction": (progress(position=0.5), "progress.position is 0.5, not a whole number"),
    "no position": (lambda said: said["progress"].pop("position") and None, "progress.position is missing"),
    "no progress": (lambda said: said.pop("progress") and None, "progress is missing"),
    "another kind": (lambda said: [said], "what it holds is list, not a mapping"),
    "a list of data": (lambda said: said.update(data=[1]), "data is list, not a mapping"),
    "no samples": (lambda said: said["data"].update(training={"fingerprint": ""}), "data.training.samples is missing"),
    "too deep": (lambda said: said.update(configuration=nested(400)), "what it holds is nested more than 40 deep"),
    "too large": (lambda said: said.update(more="x" * 2**23), "larger than 8,388,608 bytes"),
}


@pytest.mark.parametrize("name", STATES)
def test_a_state_that_cannot_be_true_is_passed_over_in_words(folder: Path, caplog: Any, name: str) -> None:
    change, said = STATES[name]
    forge(folder, change)
    found, rejected = open_newest(folder / "checkpoints", Ranks(), RESUME_KEYS)
    assert found is not None
    assert (found.step, [path.name for path in rejected]) == (2, ["step-00000004"])
    (record,) = caplog.records
    assert f"state.json: {said}" in record.getMessage()
    assert peek_checkpoint(folder).step == 2


def test_a_run_goes_on_from_the_checkpoint_before_whatever_else_is_damaged(folder: Path, caplog: Any) -> None:
    forge(folder, progress(position=-120))
    (folder / "status.json").write_text("[1, 2]")
    (folder / "config.yaml").write_text("a: [1\nb: 2\n")
    # what the run was is still compared: the checkpoint knows it
    with pytest.raises(Refusal, match=r"optimizer\.lr: 0\.\d+ → 0\.25"):
        here(*WORDS, f"run.dir={folder}", "loop.steps=6", "optimizer.lr=0.25")
    said = caplog.messages
    assert re.search(r"damaged, and not used: .*config\.yaml: ParserError: .*line 2", said[0])
    # as a user meets it, in a process of its own
    (folder / "status.json").write_text('{"state": "completed", "step": "99"}')
    screen = finish(single("device=cpu", *WORDS, f"run.dir={folder}", "loop.steps=6"), folder.parent)
    assert screen.count("progress.position is -120, not a whole number from 0") == 1
    assert screen.count("config.yaml: ParserError") == 1
    assert screen.count("status.json; starts are counted from 1 again") == 1
    assert (status(folder)["state"], status(folder)["resume_step"], status(folder)["attempt"]) == ("completed", 2, 1)
    assert len(curve(folder)) == 6


@pytest.mark.parametrize(
    "text",
    [
        "[]",
        "{",
        "3",
        '{"state": "done", "step": 1}',
        '{"state": "running", "step": -1}',
        "[" * 10**5,
        '{"step": 1}',
        '{"_target_": "os.abort"}',  # means an object in a configuration, and nothing here
        f'{{"state": "running", "step": 1, "time": 1{"0" * 400}}}',  # JSON takes it, a float does not
    ],
)
def test_a_status_that_cannot_be_true_is_none(tmp_path: Path, text: str) -> None:
    (tmp_path / "status.json").write_text(text)
    assert read_status(tmp_path) is None


def test_a_manifest_is_read_up_to_a_size_and_names_no_file_elsewhere(folder: Path) -> None:
    path = folder / "checkpoints" / "step-00000004"
    manifest = read_manifest(path)
    manifest.files["../../config.yaml"] = {"size": 1, "sha256": "0" * 64}
    (path / "manifest.json").write_bytes(encode_manifest(manifest))
    with pytest.raises(CorruptCheckpoint, match=r"manifest\.json: files has the name '\.\./\.\./config\.yaml'"):
        read_manifest(path)
    del manifest.files["../../config.yaml"]
    manifest.metrics["accuracy"] = "high"  # type: ignore[assignment]
    (path / "manifest.json").write_bytes(encode_manifest(manifest))
    with pytest.raises(CorruptCheckpoint, match=r"manifest\.json: figures\.accuracy is 'high', not a number"):
        read_manifest(path)
    (path / "manifest.json").write_text("[" + "{}," * (26 * 2**20 // 3) + "{}]")
    tracemalloc.start()
    try:
        with pytest.raises(CorruptCheckpoint, match=r"manifest\.json: larger than 8,388,608 bytes"):
            read_manifest(path)
        assert tracemalloc.get_traced_memory()[1] < 2**25
    finally:
        tracemalloc.stop()


BOMB = "a: &a [1, 1]\n" + "".join(
    f"{b}: &{b} [*{a}, *{a}, *{a}]\n" for a, b in zip("abcdefghij", "bcdefghijk", strict=True)
)


@pytest.mark.parametrize(
    ("text", "said"),
    [
        (BOMB, "refers to other places"),
        ("- 1\n", "what it holds is list, not a mapping"),
        ("checkpoint: {best: 3}\n", "checkpoint.best is 3, not a text"),
        ("a: !!python/object/apply:os.system [true]\n", "ConstructorError"),
    ],
)
def test_a_damaged_configuration_is_said_by_the_jobs_that_need_it(folder: Path, text: str, said: str) -> None:
    (folder / "config.yaml").write_text(text)
    for words in (["job=evaluate", f"run.dir={folder}"], [*SMALL, f"init_from={folder}", f"run.dir={folder}-on"]):
        with pytest.raises(Refusal, match=rf"(?s)config\.yaml: .*{said}"):
            here(*words)


def test_what_could_not_be_read_again_is_not_written() -> None:
    with pytest.raises(Exception, match=r"state\.json would have 8,388,609 bytes"):
        refuse_unreadable(b"x" * (2**23 + 1), "state.json")
