"""Folders that are not there are told at once: they are not looked for on a hub."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

import pytest

from recipes.hub import located
from recipes.language.text import Text
from tests.run import ROOT, run
from trainer import Refusal


def test_what_can_only_be_a_folder_is_none_of_the_hub(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "models" / "qwen2").mkdir(parents=True)
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("HOME", str(tmp_path))
    for name in ("gpt2", "Qwen/Qwen2.5-0.5B", "model"):
        assert located(name, "model.path=") == name
    assert located("~/models/qwen2", "model.path=") == str(tmp_path / "models" / "qwen2")
    for name in ("models/qwen", "./models/qwen", "../qwen", "/nowhere", "~/qwen", "a/b/c"):
        with pytest.raises(Refusal, match=rf"^model\.path={name}: there is no folder /"):
            located(name, "model.path=")
    with pytest.raises(Refusal, match=r"did you mean 'qwen2'\?"):
        located("models/qwen", "")
    (tmp_path / "mine.txt").write_text("a text of one's own " * 9)
    assert len(Text(length=4, file="~/mine.txt").train()) > 0


@pytest.mark.long
def test_it_is_asked_of_networks_tokenizers_and_data_sets(tmp_path: Path) -> None:
    pytest.importorskip("datasets", reason="the extra bench brings it")
    classifier = ("model=hf_classifier", "model.path=./none")
    for key, words in (
        ("data.tokenizer", ("data=labelled_text", "data.label=era", *classifier, "data.tokenizer=./none")),
        ("model.path", ("data=synthetic_tokens", *classifier, "model.num_classes=2")),
        ("data.path", ("data=huggingface_text", "data.path=./none", "model=gpt_nano")),
    ):
        said = run(["run.dir=run", "loop.steps=1", *words], place=tmp_path, code=2).out
        assert re.search(rf"{key}=\./none: there is no folder", said)
    for word in ("--tokenizer", "--dataset"):
        command = [sys.executable, str(ROOT / "scripts" / "prepare_tokens.py"), "out", "a.txt", word, "./none"]
        (tmp_path / "a.txt").touch()
        ended = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True)
        assert ended.stderr.startswith(f"{word} ./none: there is no folder"), ended.stderr
