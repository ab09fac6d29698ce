"""What a language model writes after each evaluation."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from tests.ranks import Processes
from tests.run import run

WORDS = (
    *("data=text", "data.file=notes.txt", "data.length=8", "data.held=0.2", "task=language", "model=gpt_nano"),
    *("model.width=16", "model.depth=1", "model.heads=2", "model.dropout=0.1", "loop.global_batch=8"),
    *("loop.steps=4", "loop.eval_every=2", "loop.log_every=1"),
)
SAMPLE = ("sample.prompt='Call me '", "sample.tokens=12", "log=[tensorboard]")


@pytest.fixture
def place(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "notes.txt").write_text("Call me Ishmael. " * 40)
    return tmp_path


def samples(folder: Path) -> dict[int, str]:
    """What TensorBoard shows, by step."""
    from tensorboard.backend.event_processing.event_accumulator import TENSORS, EventAccumulator

    events: Any = EventAccumulator(str(folder / "tensorboard" / "eval"), {TENSORS: 0})
    events.Reload()
    return {one.step: one.tensor_proto.string_val[0].decode() for one in events.Tensors("sample/text_summary")}


def test_a_text_at_each_evaluation_changes_nothing_else(place: Path, processes: Processes) -> None:
    plain, written = (
        run([*WORDS, "strategy=single", f"run.dir={name}", *more])
        for name, more in (("plain", ()), ("written", SAMPLE))
    )
    assert plain.curve("loss_hex") == written.curve("loss_hex")
    shown = samples(written.folder)
    assert list(shown) == [2, 4]
    assert all(text.startswith("    Call me ") for text in shown.values())

    # one rank writes it for all
    run([*WORDS, "strategy=ddp", "run.dir=both", *SAMPLE], 2, "group")
    assert list(samples(place / "both")) == [2, 4]


def test_what_cannot_write_is_refused_before_anything_is_made(place: Path) -> None:
    for more, said in (
        (("strategy=fsdp",), "strategy=fsdp leaves a part of the network on each rank"),
        (("log=[console]",), "none of the run's sinks shows texts"),
        (("data.held=0",), "the data has no evaluation set"),
        (("sample.temperature=-1",), "sample.temperature=-1: expected a number from 0 on"),
        (("data=synthetic_tokens",), "SyntheticTokens makes no tokens of a text"),
    ):
        # keys of one data set mean nothing to another
        words = [word for word in WORDS if not word.startswith("data") or "data=synthetic_tokens" not in more]
        assert said in run([*words, *SAMPLE, "run.dir=run", *more], code=2).out
        assert not (place / "run").exists()
