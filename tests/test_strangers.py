"""What strangers made: configurations, pictures, texts, weights, checkpoints. Nothing that they name is run, nothing
makes a run hang or fills memory, and what is damaged is said in words."""

from __future__ import annotations

import gzip
import hashlib
import json
import os
import pickle
import re
import shutil
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import yaml
from safetensors.torch import save_file

from tests.recipes.test_cifar import write_ten
from tests.recipes.test_folder import SHORT, write
from tests.recipes.test_folder import WORDS as PICTURES
from tests.run import SMALL, run
from trainer.records.checkpoint.manifest import encode_manifest, read_manifest

BEGIN = ("loop.steps=1", "run.dir=run")


# ---------------------------------------------------------------------------------------------------- configurations

# each would make a file `canary`, or take away `payload.pt`
HOSTILE: dict[str, dict[str, Any]] = {
    "os.system": {"command": "touch canary"},
    "subprocess.Popen": {"args": ["touch", "canary"]},
    "builtins.eval": {"_args_": ["open('canary', 'w')"]},
    "builtins.open": {"file": "canary", "mode": "w"},
    "shutil.copyfile": {"src": "payload.pt", "dst": "canary"},
    "pathlib.Path.touch": {"_args_": ["canary"]},
    "importlib.import_module": {"name": "outside"},
    "functools.partial": {"_args_": [{"_target_": "os.system", "command": "touch canary"}]},
    "outside.Net": {},
    "torch.load": {"f": "payload.pt", "weights_only": False},
    "torch.hub.load": {"repo_or_dir": ".", "model": "net", "source": "local"},
    "torch.serialization.pickle.loads": {"_args_": ["x"]},
    "torch.save": {"obj": 1, "f": "canary"},
    "torch.utils.cpp_extension.load": {"name": "x", "sources": []},
    "torch.nn.Module.__init__.__globals__": {},
    "torchvision.datasets.CIFAR10": {"root": "canary", "download": True},
    "biolab.net.os.system": {"command": "touch canary"},
    "biolab.net.system": {"command": "touch canary"},
    "trainer.launch.safe_files.os.remove": {"path": "payload.pt"},
    "trainer.__main__.main": {},
}
LAB = "import os\nfrom os import system\nfrom torch import nn\nclass Net(nn.Module):\n    def __init__(self, given):\n"
LAB += "        super().__init__()\n"
INSIDE: dict[str, Callable[[Any], Any]] = {
    "inside": lambda node: {"_target_": "biolab.net.Net", "given": {"deep": [node]}},
    "partly": lambda node: {"_target_": "biolab.net.Net", "given": [{"_partial_": True} | node]},
}
GROUPS = ("data", "task", "optimizer", "schedule", "strategy", "job", "log")


@pytest.mark.parametrize(
    ("target", "place"),
    [(target, "model") for target in HOSTILE]
    + [(target, place) for target in ("os.system", "torch.load") for place in INSIDE]
    + [("os.system", group) for group in GROUPS],
)
def test_nothing_hostile_is_called(tmp_path: Path, target: str, place: str) -> None:
    (tmp_path / "hubconf.py").write_text("open('canary', 'w')\n")
    (tmp_path / "outside.py").write_text("open('canary', 'w')\n")
    (tmp_path / "payload.pt").write_bytes(b"cos\nsystem\n(S'touch canary'\ntR.")
    (tmp_path / "biolab").mkdir()
    (tmp_path / "biolab" / "net.py").write_text(LAB)
    node = INSIDE.get(place, lambda node: node)({"_target_": target, **HOSTILE[target]})
    group = "model" if place in INSIDE else place
    file = tmp_path / "biolab" / "conf" / group / "own.yaml"
    file.parent.mkdir(parents=True)
    facts = {"num_classes": 2, "channels": 1, "image_size": 8} if group == "data" else {}
    file.write_text(yaml.safe_dump({"own": node} if group == "log" else node | facts))
    chosen = "log=[own]" if group == "log" else f"{group}=own"
    ended = run(["--config-dir", "biolab/conf", chosen, *BEGIN], place=tmp_path, code=2)
    assert target.rpartition(".")[2] in ended.out or target in ended.out, ended.out
    assert not (tmp_path / "canary").exists()
    assert (tmp_path / "payload.pt").exists()
    assert "outside" not in sys.modules


# ----------------------------------------------------------------------------------------------------------- pickles


class Attack:
    """A value that runs a call where it is unpickled."""

    def __init__(self, call: Any, *words: Any) -> None:
        self.call, self.words = call, words

    def __reduce__(self) -> Any:
        return self.call, self.words


@pytest.mark.parametrize("attack", [Attack(os.system, "touch ran"), Attack(eval, "open('ran', 'w')")])
def test_a_pickle_of_pictures_or_of_weights_runs_no_code(tmp_path: Path, attack: Attack) -> None:
    file = write_ten(tmp_path) / "cifar-10-batches-py" / "data_batch_1"
    file.write_bytes(pickle.dumps({b"data": attack, b"labels": [0]}, protocol=2))
    (tmp_path / "weights.pt").write_bytes(pickle.dumps({"features.0.weight": attack}, protocol=2))
    torch.save({"features.0.weight": attack}, tmp_path / "zipped.pt")
    for words in (("data=cifar10", "data.root=.", *SMALL), ("init_from=weights.pt",), ("init_from=zipped.pt",)):
        said = run([*words, *BEGIN], place=tmp_path, code=2).out
        assert "\n" not in said.strip()
        assert words[0] != "data=cifar10" or re.search(
            rf"{file.name} is damaged, or holds more .* asks for was run", said
        )
        assert not (tmp_path / "ran").exists()
        assert not (tmp_path / "run").exists()


# ---------------------------------------------------------------------------------------------------------- pictures


def test_a_picture_that_is_none_of_the_formats_runs_no_program(tmp_path: Path, monkeypatch: Any) -> None:
    root = write(tmp_path / "pictures", {"": 8})
    (root / "cat" / "00.jpg").write_bytes(b"%!PS-Adobe-3.0 EPSF-3.0\n%%BoundingBox: 0 0 9 9\n%%EndComments\nshowpage\n")
    (tmp_path / "bin").mkdir()
    # in the place of Ghostscript, which PIL would start for it
    (tmp_path / "bin" / "gs").write_text(f"#!/bin/sh\ntouch {tmp_path}/ran\n")
    (tmp_path / "bin" / "gs").chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path / 'bin'}:{os.environ['PATH']}")
    said = run([*PICTURES, *SHORT, f"data.root={root}", "loader.workers=0", "run.dir=run"], place=tmp_path, code=1).out
    assert re.search(r"00\.jpg cannot be read as a picture: .*JPEG, PNG", said)
    assert not (tmp_path / "ran").exists()


def test_a_pipe_does_not_hang_and_links_in_circles_are_refused(tmp_path: Path) -> None:
    root = write(tmp_path / "pictures", {"": 8})
    words = [*PICTURES, *SHORT, f"data.root={root}", "loader.workers=0", "run.dir=run"]
    os.mkfifo(root / "ant" / "zz.jpg")
    said = run(words, place=tmp_path, code=1).out
    assert re.search(r"zz\.jpg cannot be read as a picture: .*no regular file", said)
    (root / "ant" / "a").symlink_to("..")
    assert re.search(r"ant/a is a link to .*pictures, a folder that it lies in", run(words, place=tmp_path, code=2).out)


# ------------------------------------------------------------------------------------------------- texts and weights


def test_a_gzip_bomb_is_refused(tmp_path: Path) -> None:
    (tmp_path / "book.txt.gz").write_bytes(16 * gzip.compress(bytes(2**26)))  # 1 MB, that holds 1 GiB
    words = ["data=text", "task=language", "model=gpt_nano", "data.file=book.txt.gz"]
    assert re.search(r"book.txt.gz .*more than", run([*words, *BEGIN], place=tmp_path, code=2).out)


@pytest.mark.parametrize("name", ["../secret.safetensors", "{}/secret.safetensors", "part/../../secret.safetensors"])
def test_an_index_of_weights_names_files_beside_it_alone(tmp_path: Path, name: str) -> None:
    (tmp_path / "weights").mkdir()
    save_file({"features.0.weight": torch.zeros(1)}, tmp_path / "secret.safetensors")
    index = {"weight_map": {"features.0.weight": name.format(tmp_path)}}
    (tmp_path / "weights" / "model.safetensors.index.json").write_text(json.dumps(index))
    said = run(["init_from=weights", *BEGIN], place=tmp_path, code=2).out
    assert re.search(r"index\.json names .*, which is no file beside it", said)


def test_code_beside_a_network_of_transformers_is_neither_run_nor_asked_about(tmp_path: Path, monkeypatch: Any) -> None:
    transformers = pytest.importorskip("transformers", reason="the package transformers is not installed: '.[hf]'")
    import tokenizers

    own = tmp_path / "own"
    words = transformers.PreTrainedTokenizerFast(
        tokenizer_object=tokenizers.Tokenizer(tokenizers.models.WordLevel({"?": 0}, unk_token="?"))
    )
    words.save_pretrained(tmp_path / "words")
    own.mkdir()
    code = {"AutoConfig": "own.Own", "AutoModel": "own.Net", "AutoTokenizer": ["own.Words", None]}
    (own / "own.py").write_text(f"open({str(tmp_path / 'ran')!r}, 'w')\n")
    (own / "config.json").write_text(json.dumps({"model_type": "own", "auto_map": code}))
    (own / "tokenizer_config.json").write_text(json.dumps({"tokenizer_class": "Words", "auto_map": code}))
    asked: list[str] = []

    def answer(text: str = "") -> str:
        asked.append(text)
        return "y"

    monkeypatch.setattr("builtins.input", answer)
    (tmp_path / "rows.csv").write_text("text,label\nw1,a\nw2,b\n")
    for tokenizer, network, key in (("own", "words", "data.tokenizer"), ("words", "own", "model.path")):
        more = (
            "model=hf_classifier",
            f"data.tokenizer=./{tokenizer}",
            f"model.path=./{network}",
            "loop.global_batch=1",
        )
        said = run(["data=labelled_text", "data.file=rows.csv", *more, *BEGIN], place=tmp_path, code=2).out
        assert re.search(rf"(?m)^{key}=.* code of its own, which is never run", said)
    assert (asked, (tmp_path / "ran").exists()) == ([], False)


# ------------------------------------------------------------------------------------- a run's own files, tampered with

WORDS = (*SMALL, "strategy=single", "schedule=constant", "loop.global_batch=120", "loop.save_every=2")


@pytest.fixture(scope="module")
def trained(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run with checkpoints of steps 2 and 4."""
    place = tmp_path_factory.mktemp("tampered")
    return run([*WORDS, "run.dir=trained", "loop.steps=4"], place=place).folder


@pytest.fixture
def folder(trained: Path, tmp_path: Path) -> Path:
    """A copy of it, to be tampered with."""
    return Path(shutil.copytree(trained, tmp_path / "run"))


def forge(folder: Path, change: Callable[[Any], Any], **figures: Any) -> None:
    """Change what the newest state.json says, and make the manifest agree."""
    path = folder / "checkpoints" / "step-00000004"
    said = json.loads((path / "state.json").read_text())
    content = json.dumps(change(said) or said).encode()
    (path / "state.json").write_bytes(content)
    manifest = read_manifest(path)
    manifest.files["state.json"] = {"size": len(content), "sha256": hashlib.sha256(content).hexdigest()}
    manifest.metrics.update(figures)
    (path / "manifest.json").write_bytes(encode_manifest(manifest))


def progress(**values: Any) -> Callable[[Any], None]:
    return lambda said: said["progress"].update(values)


def nested(depth: int) -> Any:
    return {"a": nested(depth - 1)} if depth else 1


STATES = {
    "negative": (progress(position=-120), "progress.position is -120, not a whole number"),
    "other step": (progress(step=10**9, samples=10**12), "progress.step is 1,000,000,000, the manifest is of step 4"),
    "a text": (progress(samples="many"), "progress.samples is 'many', not a whole number"),
    "too deep": (lambda said: said.update(configuration=nested(400)), "what it holds is nested more than 40 deep"),
    "too large": (lambda said: said.update(more="x" * 2**23), "larger than 8,388,608 bytes"),
}


@pytest.mark.parametrize("name", STATES)
def test_a_checkpoint_that_cannot_be_true_is_passed_over_in_words(folder: Path, name: str) -> None:
    change, said = STATES[name]
    forge(folder, change)
    screen = run([*WORDS, "log=[console]", "run.dir=run", "loop.steps=6"], place=folder.parent).out
    assert screen.count(f"state.json: {said}") == 1, screen
    ended = run([*WORDS, "run.dir=run", "loop.steps=6"], place=folder.parent)
    assert (ended.status["state"], ended.status["step"], len(ended.curve())) == ("completed", 6, 6)


def test_a_run_goes_on_whatever_is_damaged_and_compares_what_it_was(folder: Path, caplog: Any) -> None:
    forge(folder, progress(position=-120))
    (folder / "config.yaml").write_text("a: [1\nb: 2\n")
    more = ("log=[console]", "run.dir=run", "loop.steps=6")
    refused = run([*WORDS, *more, "optimizer.lr=0.25"], place=folder.parent, code=2).out
    assert re.search(r"optimizer\.lr: 0\.\d+ → 0\.25", refused)  # the checkpoint knows it
    for text in ('{"state": "done", "step": 1}', "[" * 10**5, '{"_target_": "os.abort"}'):
        (folder / "status.json").write_text(text)
        run([*WORDS, *more, "optimizer.lr=0.25"], place=folder.parent, code=2)
    (folder / "status.json").write_text('{"state": "completed", "step": "99"}')
    ended = run([*WORDS, *more], place=folder.parent)
    assert ended.out.count("progress.position is -120, not a whole number from 0") == 1
    assert "config.yaml: ParserError" in caplog.messages[0]
    assert ended.out.count("status.json; starts are counted from 1 again") == 1
    now = ended.status
    assert (now["state"], now["resume_step"], now["attempt"], len(ended.curve())) == ("completed", 2, 1, 6)


BOMB = "a: &a [1, 1]\n" + "".join(
    f"{b}: &{b} [*{a}, *{a}, *{a}]\n" for a, b in zip("abcdefghij", "bcdefghijk", strict=True)
)


@pytest.mark.parametrize(
    ("text", "said"),
    [
        (BOMB, "refers to other places"),
        ("checkpoint: {best: 3}\n", "checkpoint.best is 3, not a text"),
        ("a: !!python/object/apply:os.system ['touch ran']\n", "ConstructorError"),
    ],
)
def test_a_damaged_configuration_is_said_by_the_jobs_that_need_it(folder: Path, text: str, said: str) -> None:
    (folder / "config.yaml").write_text(text)
    for words in (["job=evaluate", "run.dir=run"], [*SMALL, "init_from=run", "run.dir=on"]):
        assert re.search(rf"(?s)config\.yaml: .*{said}", run(words, place=folder.parent, code=2).out)
    assert not (folder.parent / "ran").exists()
