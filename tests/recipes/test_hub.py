"""Folders that are not there are told at once: they are not looked for on a hub."""

from __future__ import annotations

from pathlib import Path

import pytest

from recipes.hub import located
from recipes.language.text import Text
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
