"""Tokens that are made, tokens of long texts, and samples that are too long."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

from recipes.language.synthetic import SyntheticTokens
from recipes.language.text import Text
from recipes.language.tokens import Tokens
from tests.run import ROOT, run
from trainer import Refusal

MADE = ("data=synthetic_tokens", "task=language", "data.length=8", "data.vocab_size=16", "data.evaluation_size=16")
SMALL = ("model=gpt_nano", "model.width=16", "model.depth=1", "model.heads=2", "strategy=single", "loop.log_every=1")


def made(**changes: Any) -> SyntheticTokens:
    return SyntheticTokens(**{"size": 64, "evaluation_size": 16, "length": 20, "vocab_size": 50, **changes})


def test_made_tokens_follow_from_seed_and_number_alone() -> None:
    windows, numbers = made().train(), torch.tensor([5, 63, 0])
    inputs, targets = windows.batch(numbers)
    assert torch.equal(inputs[:, 1:], targets[:, :-1])
    assert 0 <= int(inputs.min()) <= int(targets.max()) < 50
    # in any order, in any batch, of a set of any size
    assert all(torch.equal(made(size=100).train()[number][0], row) for number, row in zip(numbers, inputs, strict=True))
    others = [made(seed=1).train(), made().evaluation(), made(learnable=False).train()]
    assert not any(torch.equal(other.batch(torch.tensor([5]))[0], inputs[:1]) for other in others if other is not None)
    assert made(evaluation_size=0).evaluation() is None
    # three of four tokens follow from the one before, or none
    counts = [
        float((made(learnable=yes).train().batch(torch.arange(64))[0].diff() % 50 == 1).double().mean())
        for yes in (True, False)
    ]
    assert counts[0] == pytest.approx(0.75**2, abs=0.1)
    assert counts[1] < 0.05


def test_a_decoder_learns_made_tokens(tmp_path: Path) -> None:
    words = ["schedule=constant", "optimizer.lr=0.01", "loop.steps=60", "loop.global_batch=64", "run.dir=run"]
    losses = run([*MADE, *SMALL, *words], place=tmp_path).curve()
    assert losses[0] == pytest.approx(2.77, abs=0.1)  # of 16 tokens: log 16
    assert losses[-1] < 2.2


def test_samples_longer_than_the_context_are_refused_before_anything_is_made(tmp_path: Path) -> None:
    said = run([*MADE, *SMALL, "model.context=6", "run.dir=run"], place=tmp_path, code=2).out
    assert "data.length 8 is more than model.context 6: " in said
    assert "data.length=6 works, or" in said
    assert not (tmp_path / "run").exists()
    said = run([*MADE, *SMALL, "data.size=0", "run.dir=run"], place=tmp_path, code=2).out
    assert "the training set is empty" in said


PREPARE = (sys.executable, str(ROOT / "scripts" / "prepare_tokens.py"))


def test_a_text_that_is_too_short_for_a_sample_is_told_what_is_long_enough(tmp_path: Path) -> None:
    (tmp_path / "note.txt").write_text("ab" * 50)
    for length, said in (
        (90, r"has 90 bytes to train on .* needs 91: data\.length=89 would work"),
        (16, r"has 10 bytes to evaluate on with data\.held=0\.1; .*: data\.length=9 would work"),
    ):
        with pytest.raises(Refusal, match=said):
            Text(str(tmp_path / "note.txt"), length)
    assert Text(str(tmp_path / "note.txt"), length=16, held=0).evaluation() is None

    subprocess.run([*PREPARE, "out", "note.txt", "--held", "0"], cwd=tmp_path, check=True, capture_output=True)
    with pytest.raises(Refusal, match=r"has 101 tokens to train on, .* 102 of them .*: data\.length=100 would work"):
        Tokens(str(tmp_path / "out"), length=101)
    assert len(Tokens(str(tmp_path / "out"), length=100).train()) == 1


@pytest.mark.parametrize(
    ("content", "said"),
    [
        (b'{"text": "a"}\n{"txt": "b"}', "a.jsonl, line 2, has no text in 'text'; it has txt: --column NAME"),
        (b'{"text": "a"}\n\nb', "a.jsonl, line 3, has no text in 'text'; it is no JSON object"),
        (b'{"text": null}', "a.jsonl, line 1, has no text in 'text'"),
        ('{"text": "\xe9"}'.encode("latin-1"), "a.jsonl cannot be read as UTF-8 text: "),
        (None, "a.jsonl cannot be read as UTF-8 text: "),
    ],
)
def test_what_is_no_text_is_told_with_its_place(tmp_path: Path, content: bytes | None, said: str) -> None:
    if content is not None:
        (tmp_path / "a.jsonl").write_bytes(content)
    ended = subprocess.run([*PREPARE, "out", "a.jsonl"], cwd=tmp_path, capture_output=True, text=True)
    assert ended.returncode
    assert ended.stderr.startswith(said), ended.stderr
