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
from tests.commands import TRANSFORMER, finish, lines, single
from tests.inside import here, product
from tests.processes import Processes
from trainer.api import build_run
from trainer.jobs.trained_run import make_eval_loader, read_samples
from trainer.launch.rendezvous import Launch
from trainer.messages import Refusal
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
SPREAD = {"ddp on 2": (2, "ddp"), "ddp on 3": (3, "ddp"), "fsdp on 2": (2, "fsdp"), "pp on 2": (2, "pp")}


@pytest.fixture(scope="module")
def trained(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run of one process, with a moving average."""
    place = tmp_path_factory.mktemp("jobs")
    assert product(Launch(), place, [*WORDS, "run.dir=run", "ema.decay=0.9", "optimizer.lr=0.003"]) == 0
    return place / "run"


@pytest.fixture
def run(trained: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """That run, of which no job may change anything that was there."""
    monkeypatch.chdir(tmp_path)
    return trained


def above(folder: Path) -> dict[Path, bytes]:
    jobs = ("evaluate", "predict", "export")
    files = [path for path in folder.rglob("*") if path.is_file() and path.relative_to(folder).parts[0] not in jobs]
    return {path: path.read_bytes() for path in files}


def last(folder: Path) -> dict[str, Any]:
    return json.loads((folder / "evaluate" / "metrics.jsonl").read_text().splitlines()[-1])


def test_the_figures_are_the_runs_own_to_the_last_digit(run: Path, capsys: pytest.CaptureFixture[str]) -> None:
    before = above(run)
    for which, wanted in (("best", None), ("last", 12), (6, 6)):
        assert here("job=evaluate", f"run.dir={run}", f"job.checkpoint={which}") == 0
        said = last(run)
        (own,) = [line for line in lines(run, "eval") if line["step"] == said["step"]]
        assert said == {**own, "checkpoint": own["step"], "split": "evaluation"}
        assert wanted in (None, said["step"])
    assert re.search(rf"^accuracy +{own['accuracy']:.6g}$", capsys.readouterr().out, re.MULTILINE)
    assert above(run) == before


@pytest.mark.long
@pytest.mark.parametrize("where", SPREAD)
def test_on_any_placement_the_same_figures_and_answers(run: Path, processes: Processes, where: str) -> None:
    size, strategy = SPREAD[where]
    assert here("job=evaluate", f"run.dir={run}") == here("job=predict", f"run.dir={run}", "job.out=a.safetensors") == 0
    own, place = last(run), Path.cwd()
    words = [f"run.dir={run}", f"strategy={strategy}"]
    assert processes.run(size, product, place, ["job=evaluate", *words]) == [0] * size
    assert last(run) == pytest.approx(own, abs=1e-6)
    assert processes.run(size, product, place, ["job=predict", *words, "job.out=b.safetensors"]) == [0] * size
    one, other = load_file("a.safetensors"), load_file("b.safetensors")
    assert one["index"].tolist() == other["index"].tolist() == list(range(360))
    assert torch.allclose(one["output"], other["output"], 0, 1e-6)


def test_answers_belong_to_their_samples(run: Path) -> None:
    assert here("job=predict", f"run.dir={run}", *LAST, "loop.eval_batch=100", "loop.micro_batches=3") == 0
    assert here("job=evaluate", f"run.dir={run}", *LAST) == 0
    answers, truth = load_file(run / "predict" / "predictions.safetensors"), Digits(Augment()).evaluation().labels
    assert (answers["output"].argmax(1) == truth).float().mean().item() == pytest.approx(last(run)["accuracy"])


@pytest.mark.long
def test_what_was_exported_loads_where_the_framework_is_not(run: Path, tmp_path: Path) -> None:
    for form in ("safetensors", "pt", "pt2"):
        assert here("job=export", f"run.dir={run}", f"job.format={form}", f"job.out={tmp_path}/model.{form}") == 0
    assert here("job=predict", f"run.dir={run}", f"job.out={tmp_path}/answers.safetensors") == 0
    assert here("job=export", f"run.dir={run}", "job.weights=ema", "job.format=pt", "job.out=ema.pt") == 0
    torch.save(seen_by_the_network(run), tmp_path / "inputs.pt")
    with pytest.raises(Refusal, match="wants a name that ends in"):
        here("job=export", f"run.dir={run}", "job.format=pt", "job.out=model.bin")
    said = subprocess.run([sys.executable, "-c", USE, tmp_path], capture_output=True, text=True, check=False, cwd="/")
    assert said.returncode == 0, said.stderr
    assert said.stdout.split() == ["same", "same", "close", "other"]


@pytest.mark.long
def test_large_weights_have_several_files_and_an_index(
    run: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    words = ["job=export", f"run.dir={run}", f"job.out={tmp_path}/model.safetensors"]
    assert here(*words) == 0
    whole = load_file(tmp_path / "model.safetensors")
    largest = max(tensor.nbytes for tensor in whole.values())
    monkeypatch.setattr(weight_files, "MAX_FILE_BYTES", largest)
    assert here(*words) == 0
    # as transformers looks for it; the one file of before would be taken first
    assert not (tmp_path / "model.safetensors").exists()
    index = json.loads((tmp_path / "model.safetensors.index.json").read_text())
    files = sorted({*index["weight_map"].values()})
    assert files == [f"model-{number:05}-of-{len(files):05}.safetensors" for number in range(1, len(files) + 1)]
    assert index["metadata"]["total_size"] == sum(tensor.nbytes for tensor in whole.values())
    apart = {name: load_file(tmp_path / file)[name] for name, file in index["weight_map"].items()}
    assert apart.keys() == whole.keys()
    assert all(torch.equal(apart[name], whole[name]) for name in whole)
    assert all((tmp_path / file).stat().st_size < largest + 10_000 for file in files)
    # and it is read back as it was
    monkeypatch.undo()
    assert here(*words) == 0
    assert not (tmp_path / "model.safetensors.index.json").exists()


@pytest.mark.long
def test_of_several_processes_one_exports_and_waits_for_nobody(run: Path, processes: Processes) -> None:
    words = ["job=export", f"run.dir={run}", "job.format=pt2", "job.out=model.pt2"]
    assert processes.run(2, product, Path.cwd(), words) == [0, 0]
    assert here("job=predict", f"run.dir={run}", "job.out=answers.safetensors") == 0
    said = torch.export.load("model.pt2").module()(seen_by_the_network(run))
    assert torch.allclose(said, load_file("answers.safetensors")["output"], 0, 1e-6)


def test_another_runtime_takes_the_network(run: Path) -> None:
    pytest.importorskip("onnxscript")
    runtime = pytest.importorskip("onnxruntime")
    assert here("job=export", f"run.dir={run}", "job.format=onnx", "job.out=model.onnx") == 0
    assert here("job=predict", f"run.dir={run}", "job.out=answers.safetensors") == 0
    session = runtime.InferenceSession("model.onnx")
    (given,) = session.get_inputs()
    (answers,) = session.run(None, {given.name: seen_by_the_network(run).numpy()})
    assert torch.allclose(torch.from_numpy(answers), load_file("answers.safetensors")["output"], 0, 1e-5)


def test_a_job_computes_as_many_samples_at_once_as_an_evaluation_of_the_training(trained: Path) -> None:
    parts = build_run(["job=evaluate", f"run.dir={trained}", "device=cpu", "loop.micro_batch=20"], Launch())
    with parts.strategy:
        batches = make_eval_loader(parts, read_samples(parts, "evaluation", Launch())).batches()
        assert max(len(batch.indices) for batch, _ in batches) == 4 * 20  # loop.eval_batch=null: four global batches


def seen_by_the_network(run: Path) -> torch.Tensor:
    """All inputs of the evaluation set."""
    parts = build_run(["job=evaluate", f"run.dir={run}", "device=cpu"], Launch())
    with parts.strategy:
        stream = make_eval_loader(parts, read_samples(parts, "evaluation", Launch()))
        return torch.cat([batch.inputs for batch, _ in stream.batches()])


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
def test_what_cannot_be_is_said(run: Path, words: tuple[str, ...], said: str) -> None:
    before = above(run)
    with pytest.raises(Refusal, match=said):
        here("job=evaluate", *[word.format(run=run) for word in words])
    assert above(run) == before


@pytest.mark.slow
def test_the_last_line_of_a_run_is_a_command_that_works(tmp_path: Path) -> None:
    screen = finish(single(*WORDS, "run.name=first", "device=cpu"), tmp_path)
    line = screen.rstrip().splitlines()[-1]
    words = line.split("python -m trainer ")[1].split("   (or")[0].split()
    assert "accuracy" in finish(single(*words), tmp_path)


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


def test_outputs_of_several_sizes_are_a_file_each(processes: Processes, tmp_path: Path) -> None:
    (tmp_path / "sizes.py").write_text(SIZES)
    for group, target in (("data", "sizes.Maps"), ("task", "sizes.Segment"), ("model", "torch.nn.Conv2d")):
        file = tmp_path / f"conf/{group}/sizes.yaml"
        file.parent.mkdir(parents=True)
        file.write_text(
            f"_target_: {target}\n" + "in_channels: 1\nout_channels: 1\nkernel_size: 1\n" * (group == "model")
        )
    sizes = [f"{group}=sizes" for group in ("data", "task", "model")]
    words = ["--config-dir", "conf", "loader.workers=0", "run.dir=run"]
    trained = ["trust=[sizes]", *sizes, "loop.global_batch=2", "loop.eval_batch=1", "loop.steps=1"]
    assert processes.run(1, elsewhere, tmp_path, [*words, *trained]) == [0]
    answers = {}
    for size, word in ((1, "single"), (2, "ddp")):
        predict = [f"strategy={word}", "job=predict", f"job.out={word}.safetensors"]
        assert processes.run(size, elsewhere, tmp_path, [*words, *predict]) == [0] * size
        files = sorted((tmp_path / word).iterdir())
        answers[word] = [load_file(file)["output"] for file in files]
        assert [file.stem for file in files] == [f"{number:08}" for number in range(5)]
        assert [rows.shape[1] for rows in answers[word]] == [4, 4, 5, 6, 4]
    assert all(torch.equal(one, other) for one, other in zip(*answers.values(), strict=True))


def elsewhere(launch: Launch, place: Path, words: list[str]) -> int:
    """The exit code of this command in a folder that has code, too."""
    sys.path.insert(0, str(place))
    try:
        return product(launch, place, words)
    finally:
        sys.path.remove(str(place))
        sys.modules.pop("sizes", None)
