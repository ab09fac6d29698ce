"""Data and weights that strangers made: nothing that they name is run, and nothing makes a run hang or fill memory."""

from __future__ import annotations

import gzip
import json
import os
import re
import resource
import struct
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file

from tests.commands import Command, single
from tests.inside import here
from tests.recipes.test_folder import SHORT, WORDS, data, write
from trainer.messages import BadData, Refusal

TEXTS = ("data=labelled_text", "data.tokenizer=nothing", "model=hf_classifier", "model.path=nothing")


@contextmanager
def room(more: int) -> Iterator[None]:
    """Inside, the process gets no more than so many bytes beyond what it has."""
    limits, now = resource.getrlimit(resource.RLIMIT_AS), int(Path("/proc/self/statm").read_text().split()[0])
    resource.setrlimit(resource.RLIMIT_AS, (now * resource.getpagesize() + more, limits[1]))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_AS, limits)


def bomb(path: Path, before: bytes = b"") -> Path:
    """A gzip file of 1 MB, 1 GiB long when it is unpacked."""
    path.write_bytes(gzip.compress(before) + 16 * gzip.compress(bytes(2**26)))
    return path


# ---------------------------------------------------------------------------------------------------------- pictures


def test_a_picture_that_is_none_of_the_formats_runs_no_program(tmp_path: Path, monkeypatch) -> None:
    root = write(tmp_path / "pictures", {"": 8})
    (root / "cat" / "00.jpg").write_bytes(b"%!PS-Adobe-3.0 EPSF-3.0\n%%BoundingBox: 0 0 9 9\n%%EndComments\nshowpage\n")
    (tmp_path / "bin").mkdir()
    # in the place of Ghostscript, which PIL would start for it
    (tmp_path / "bin" / "gs").write_text(f"#!/bin/sh\ntouch {tmp_path}/ran\n")
    (tmp_path / "bin" / "gs").chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path / 'bin'}:{os.environ['PATH']}")
    with pytest.raises(BadData, match=r"00\.jpg cannot be read as a picture: .*JPEG, PNG"):
        here(*WORDS, *SHORT, f"data.root={root}", "loader.workers=0", f"run.dir={tmp_path / 'run'}")
    assert not (tmp_path / "ran").exists()


@pytest.mark.slow
def test_a_picture_that_is_no_file_does_not_hang(tmp_path: Path) -> None:
    root = write(tmp_path / "pictures", {"": 8})
    os.mkfifo(root / "ant" / "zz.jpg")
    (root / "bee" / "zz.jpg").symlink_to("/dev/zero")
    command = Command(
        single(*WORDS, *SHORT, f"data.root={root}", "loader.workers=0", f"run.dir={tmp_path / 'run'}"), tmp_path
    )
    ended = command.end()
    assert ended.code == 1
    assert re.search(r"zz\.jpg cannot be read as a picture: .*no regular file", ended.screen), ended.screen


def test_links_in_circles_are_refused_and_other_links_are_followed_once(tmp_path: Path) -> None:
    root = write(tmp_path / "pictures", {"": 4})
    words = (*WORDS, *SHORT, f"data.root={root}", "loader.workers=0", f"run.dir={tmp_path / 'run'}")
    for name in ("a", "b", "c"):  # 3^40 ways, until the system gives up
        (root / "ant" / name).symlink_to("..")
    with pytest.raises(Refusal, match=r"ant/a is a link to .*pictures, a folder that it lies in"):
        here(*words)
    for name in ("a", "b", "c"):
        (root / "ant" / name).unlink()
    other = write(tmp_path / "others", {"": 2})
    (other / "bee" / "back").symlink_to(other / "cat")  # and each other's
    (other / "cat" / "back").symlink_to(other / "bee")
    for name in ("x", "y"):
        (root / "bee" / name).symlink_to(other / "bee")
    assert len(data(root, held_out=0.0).train()) == 3 * 4 + 2 + 2


# ------------------------------------------------------------------------------------------------- compressed files


def test_a_gzip_bomb_in_the_place_of_idx_files_is_refused(tmp_path: Path) -> None:
    for part, count in (("train", 60_000), ("t10k", 10_000)):
        bomb(tmp_path / f"{part}-images-idx3-ubyte.gz", struct.pack(">4I", 0x803, 2**31, 28, 28))
        labels = gzip.compress(struct.pack(">2I", 0x801, count) + bytes(count))
        (tmp_path / f"{part}-labels-idx1-ubyte.gz").write_bytes(labels)
    with room(2**29), pytest.raises(Refusal, match=r"train-images-idx3-ubyte\.gz .*more than"):
        here("data=fashion_mnist", f"data.root={tmp_path}", f"run.dir={tmp_path / 'run'}", "loop.steps=1")


@pytest.mark.parametrize(
    ("name", "words"),
    [
        ("book.txt.gz", ("data=text", "task=language", "model=gpt_nano", "data.file={}")),
        pytest.param("rows.csv.gz", (*TEXTS, "data.file={}"), marks=pytest.mark.long),
        pytest.param("rows.jsonl.gz", (*TEXTS, "data.file={}"), marks=pytest.mark.long),
        pytest.param("digits.csv.gz", ("data.file={}",), marks=pytest.mark.long),
    ],
)
def test_a_gzip_bomb_in_the_place_of_texts_is_refused(tmp_path: Path, name: str, words: tuple[str, ...]) -> None:
    path = bomb(tmp_path / name)
    with room(2**29), pytest.raises(Refusal, match=rf"{name} .*more than"):
        here(*(word.format(path) for word in words), f"run.dir={tmp_path / 'run'}", "loop.steps=1")


def test_rows_nested_too_deep_are_refused(tmp_path: Path) -> None:
    path = tmp_path / "rows.jsonl"
    path.write_text('{"text": ' + "[" * 100_000 + "]" * 100_000 + "}\n")
    with pytest.raises(Refusal, match=r"rows\.jsonl cannot be read as rows"):
        here(*TEXTS, f"data.file={path}", f"run.dir={tmp_path / 'run'}")


# ---------------------------------------------------------------------------------------------------------- weights


@pytest.mark.parametrize("name", ["../secret.safetensors", "{}/secret.safetensors", "part/../../secret.safetensors"])
def test_an_index_of_weights_names_files_beside_it_alone(tmp_path: Path, name: str) -> None:
    folder = tmp_path / "weights"
    folder.mkdir()
    save_file({"features.0.weight": torch.zeros(1)}, tmp_path / "secret.safetensors")
    index = {"weight_map": {"features.0.weight": name.format(tmp_path)}}
    (folder / "model.safetensors.index.json").write_text(json.dumps(index))
    with pytest.raises(Refusal, match=r"index\.json names .*, which is no file beside it"):
        here(f"init_from={folder}", f"run.dir={tmp_path / 'run'}", "loop.steps=1")


@pytest.mark.parametrize("name", ["model.safetensors.index.json", "config.json"])
def test_json_beside_weights_that_is_nested_too_deep_is_refused(tmp_path: Path, name: str) -> None:
    folder = tmp_path / "weights"
    folder.mkdir()
    if name == "config.json":
        save_file({"features.0.weight": torch.zeros(1)}, folder / "model.safetensors")
    (folder / name).write_text('{"weight_map": ' + "[" * 100_000 + "]" * 100_000 + "}")
    with pytest.raises(Refusal, match=re.escape(name)):
        here(f"init_from={folder}", f"run.dir={tmp_path / 'run'}", "loop.steps=1")


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["fifo", "zero"])
def test_weights_that_are_no_file_are_refused(tmp_path: Path, kind: str) -> None:
    path = tmp_path / "weights.safetensors"
    os.mkfifo(path) if kind == "fifo" else path.symlink_to("/dev/zero")
    ended = Command(single(f"init_from={path}", f"run.dir={tmp_path / 'run'}", "loop.steps=1"), tmp_path).end()
    assert (ended.code, "no regular file" in ended.screen) == (2, True), ended.screen


def test_code_beside_a_network_of_transformers_is_neither_run_nor_asked_about(tmp_path: Path, monkeypatch) -> None:
    transformers = pytest.importorskip("transformers", reason="the package transformers is not installed: '.[hf]'")
    import tokenizers

    marker = tmp_path / "ran"
    words, own = tmp_path / "words", tmp_path / "own"
    transformers.PreTrainedTokenizerFast(
        tokenizer_object=tokenizers.Tokenizer(tokenizers.models.WordLevel({"?": 0}, unk_token="?"))
    ).save_pretrained(words)
    own.mkdir()
    code = {"AutoConfig": "own.Own", "AutoModel": "own.Net", "AutoTokenizer": ["own.Words", None]}
    (own / "own.py").write_text(f"open({str(marker)!r}, 'w')\n")
    (own / "config.json").write_text(json.dumps({"model_type": "own", "auto_map": code}))
    (own / "tokenizer_config.json").write_text(json.dumps({"tokenizer_class": "Words", "auto_map": code}))
    asked: list[str] = []

    def answer(text: str = "") -> str:
        asked.append(text)
        return "y"

    monkeypatch.setattr("builtins.input", answer)
    (tmp_path / "rows.csv").write_text("text,label\nw1,a\nw2,b\n")
    for tokenizer, network, key in ((own, words, "data.tokenizer"), (words, own, "model.path")):
        more = ("model=hf_classifier", f"data.tokenizer={tokenizer}", f"model.path={network}")
        with pytest.raises(Refusal, match=f"^{key}=.* code of its own, which is never run"):
            here(
                "data=labelled_text",
                f"data.file={tmp_path / 'rows.csv'}",
                *more,
                "loop.steps=1",
                "loop.global_batch=1",
                "run.name=none",
            )
    assert (asked, marker.exists()) == ([], False)
