"""What people take home: a trained run's figures again, its answers in a file, its network in one file."""

from __future__ import annotations

import json
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from recipes.vision.augment import Augment
from recipes.vision.digits import Digits
from tests.ranks import Processes
from tests.run import TRANSFORMER, lines, quickly, run
from trainer.records import weight_files

USE = """
import sys
from pathlib import Path
import torch
from safetensors.torch import load_file

place = Path(sys.argv[1])
plain, program = torch.load(place / "model.pt", weights_only=True), torch.export.load(place / "model.pt2")
other = torch.load(place / "ema.pt", weights_only=True)

def alike(one, two):
    return one.keys() == two.keys() and all(torch.equal(one[name], two[name]) for name in one)

answers = program.module()(torch.load(place / "inputs.pt", weights_only=True))  # all at once: of any number of samples
close = torch.allclose(answers, load_file(place / "answers.safetensors")["output"], 0, 1e-5)
print("same" if alike(plain, load_file(place / "model.safetensors")) else "another")
print("same" if alike(plain, dict(program.state_dict)) else "another")
print("close" if close else "far")
print("other" if plain.keys() == other.keys() and not alike(plain, other) else "same")
assert "trainer" not in sys.modules
"""
WORDS = (*TRANSFORMER, "loop.global_batch=120", "loop.steps=12", "loop.eval_every=6", "loop.save_every=6", "seed=3")
LAST = ("job.checkpoint=last",)


@pytest.fixture(scope="module")
def trained(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run of one process, with a moving average."""
    place = tmp_path_factory.mktemp("jobs")
    return run([*WORDS, "run.dir=run", "ema.decay=0.9", "optimizer.lr=0.003"], place=place).folder


@pytest.fixture
def opened(trained: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> str:
    """The word that names that run, of which no job may change anything that was there."""
    monkeypatch.chdir(tmp_path)
    return f"run.dir={trained}"


def above(folder: Path) -> dict[Path, bytes]:
    jobs = ("evaluate", "predict", "export")
    files = [path for path in folder.rglob("*") if path.is_file() and path.relative_to(folder).parts[0] not in jobs]
    return {path: path.read_bytes() for path in files}


def last(folder: Path) -> dict[str, Any]:
    return json.loads((folder / "evaluate" / "metrics.jsonl").read_text().splitlines()[-1])


def seen_by_the_network() -> torch.Tensor:
    """All inputs of the evaluation set."""
    digits = Digits(Augment(rotate=10.0, scale=0.1, shear=0.1, shift=0.5, mean=(0.305,), std=(0.376,), full_scale=16.0))
    found = digits.evaluation()
    return digits.augment(found.images, found.labels, None, training=False)[0]


def test_the_figures_are_the_runs_own_to_the_last_digit(trained: Path, opened: str) -> None:
    before = above(trained)
    for which, wanted in (("best", None), ("last", 12), (6, 6)):
        out = run(["job=evaluate", opened, f"job.checkpoint={which}"]).out
        said = last(trained)
        (own,) = [line for line in lines(trained, "eval") if line["step"] == said["step"]]
        assert said == {**own, "checkpoint": own["step"], "split": "evaluation"}
        assert wanted in (None, said["step"])
    assert re.search(rf"^accuracy +{own['accuracy']:.6g}$", out, re.MULTILINE)
    assert above(trained) == before


@pytest.mark.parametrize(("size", "strategy"), quickly([(2, "ddp"), (3, "ddp"), (2, "fsdp"), (2, "pp")], (2, "fsdp")))
def test_on_any_placement_the_same_figures_and_answers(
    trained: Path, opened: str, processes: Processes, size: int, strategy: str
) -> None:
    run(["job=evaluate", opened])
    run(["job=predict", opened, "job.out=a.safetensors"])
    own = last(trained)
    run(["job=evaluate", opened, f"strategy={strategy}"], size, "group")
    assert last(trained) == pytest.approx(own, abs=1e-6)
    run(["job=predict", opened, f"strategy={strategy}", "job.out=b.safetensors"], size, "group")
    one, other = load_file("a.safetensors"), load_file("b.safetensors")
    assert one["index"].tolist() == other["index"].tolist() == list(range(360))
    assert torch.allclose(one["output"], other["output"], 0, 1e-6)


def test_answers_belong_to_their_samples(trained: Path, opened: str) -> None:
    run(["job=predict", opened, *LAST, "loop.eval_batch=100", "loop.micro_batches=3"])
    run(["job=evaluate", opened, *LAST])
    answers, truth = load_file(trained / "predict" / "predictions.safetensors"), Digits(Augment()).evaluation().labels
    assert (answers["output"].argmax(1) == truth).float().mean().item() == pytest.approx(last(trained)["accuracy"])


@pytest.mark.long
def test_what_was_exported_loads_where_the_framework_is_not(opened: str, tmp_path: Path) -> None:
    for form in ("safetensors", "pt", "pt2"):
        run(["job=export", opened, f"job.format={form}", f"job.out=model.{form}"])
    run(["job=predict", opened, "job.out=answers.safetensors"])
    run(["job=export", opened, "job.weights=ema", "job.format=pt", "job.out=ema.pt"])
    torch.save(seen_by_the_network(), tmp_path / "inputs.pt")
    wrong = run(["job=export", opened, "job.format=pt", "job.out=model.bin"], code=2)
    assert "wants a name that ends in" in wrong.out
    said = subprocess.run([sys.executable, "-c", USE, tmp_path], capture_output=True, text=True, check=False, cwd="/")
    assert said.returncode == 0, said.stderr
    assert said.stdout.split() == ["same", "same", "close", "other"]


def test_large_weights_have_several_files_and_an_index(
    opened: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    words = ["job=export", opened, "job.out=model.safetensors"]
    run(words)
    whole = load_file(tmp_path / "model.safetensors")
    largest = max(tensor.nbytes for tensor in whole.values())
    monkeypatch.setattr(weight_files, "MAX_FILE_BYTES", largest)
    run(words)
    # as transformers looks for it; the one file of before would be taken first
    assert not (tmp_path / "model.safetensors").exists()
    index = json.loads((tmp_path / "model.safetensors.index.json").read_text())
    files = sorted({*index["weight_map"].values()})
    assert files == [f"model-{number:05}-of-{len(files):05}.safetensors" for number in range(1, len(files) + 1)]
    assert index["metadata"]["total_size"] == sum(tensor.nbytes for tensor in whole.values())
    apart = {name: load_file(tmp_path / file)[name] for name, file in index["weight_map"].items()}
    assert apart.keys() == whole.keys()
    assert all(torch.equal(apart[name], whole[name]) for name in whole)
    monkeypatch.undo()


@pytest.mark.long
def test_other_runtimes_take_the_network_and_of_several_processes_one_exports(
    trained: Path, processes: Processes, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.chdir(tmp_path)
    word = f"run.dir={trained}"
    run(["job=predict", word, "job.out=answers.safetensors"])
    answers = load_file("answers.safetensors")["output"]
    run(["job=export", word, "job.format=pt2", "job.out=model.pt2"], 2, "group")
    assert torch.allclose(torch.export.load("model.pt2").module()(seen_by_the_network()), answers, 0, 1e-6)
    pytest.importorskip("onnxscript")
    runtime = pytest.importorskip("onnxruntime")
    run(["job=export", word, "job.format=onnx", "job.out=model.onnx"])
    session = runtime.InferenceSession("model.onnx")
    (given,) = session.get_inputs()
    (said,) = session.run(None, {given.name: seen_by_the_network().numpy()})
    assert torch.allclose(torch.from_numpy(said), answers, 0, 1e-5)


@pytest.mark.parametrize(
    ("words", "said"),
    [
        ((), "opens a run that was trained: add run.dir=FOLDER"),
        (("run.dir=nowhere",), "nowhere does not exist"),
        (("run.dir=.",), "holds no config.yaml"),
        (("run.dir={run}", "job.checkpoint=7"), "there are best, last and the steps 6, 12"),
        (("run.dir={run}", "experiment=digits"), "leave experiment out"),
        (("run.dir={run}", "model.depth=3"), "of another network"),
        (("run.dir={run}", "job.split=test"), "job.split=test: Evaluate expects one of evaluation, train"),
    ],
)
def test_what_cannot_be_is_said(trained: Path, opened: str, words: tuple[str, ...], said: str) -> None:
    before = above(trained)
    assert said in run(["job=evaluate", *[word.format(run=trained) for word in words]], code=2).out
    assert above(trained) == before


SIZES = """
import torch
from torch import nn
from trainer import Data, Task

class Maps(Data):
    def train(self):
        return self.evaluation()[:2]  # these are alike

    def evaluation(self):
        generator = torch.Generator().manual_seed(0)
        return [(x := torch.randn(1, side, 4, generator=generator), (x > 0).float()) for side in (4, 4, 5, 6, 4)]

class Segment(Task):
    def loss(self, output, target):
        return nn.functional.binary_cross_entropy_with_logits(output, target)
"""


@pytest.mark.long
def test_outputs_of_several_sizes_are_a_file_each(processes: Processes, tmp_path: Path) -> None:
    (tmp_path / "sizes.py").write_text(SIZES)
    words = ["trust=[sizes]", "loader.workers=0", "run.dir=run"]
    own = ["~data", "+data._target_=sizes.Maps", "~task", "+task._target_=sizes.Segment", "~model"]
    own += ["+model._target_=torch.nn.Conv2d", "+model={in_channels:1,out_channels:1,kernel_size:1}"]
    run([*words, *own, "loop.global_batch=2", "loop.eval_batch=1", "loop.steps=1"], place=tmp_path)
    answers = {}
    for size, word in ((1, "single"), (2, "ddp")):
        predict = [*words, f"strategy={word}", "job=predict", f"job.out={word}.safetensors"]
        run(predict, size, "group" if size > 1 else "here", place=tmp_path)
        files = sorted((tmp_path / word).iterdir())
        answers[word] = [load_file(file)["output"] for file in files]
        assert [file.stem for file in files] == [f"{number:08}" for number in range(5)]
        assert [rows.shape[1] for rows in answers[word]] == [4, 4, 5, 6, 4]
    assert all(torch.equal(one, other) for one, other in zip(*answers.values(), strict=True))
