"""Scripts as tutorials have them, by hand, beside the words that replace them: the same losses, the same end."""

from __future__ import annotations

import json
import pickle
import re
import shutil
import sys
from pathlib import Path

import numpy
import pytest
import torch

from tests.commands import SMALL, curve, far, finish_all, lines, single, torchrun
from tests.inside import product
from trainer.launch.launch import Launch

pytestmark = pytest.mark.slow

HERE = Path(__file__).parent
# what stands in the scripts, in words; rounding grows fast in this network, so the images lie in memory as there
SAME = (
    *("--config-dir", "lab/conf", "data=as_sampled", "model=torchvision", "model.name=resnet18"),
    *("optimizer=sgd", "optimizer.lr=0.01", "optimizer.nesterov=false", "optimizer.weight_decay=5e-4"),
    *("optimizer.decay=all", "schedule=constant", "loop.global_batch=32", "loop.log_every=1", "channels_last=false"),
)


@pytest.fixture(scope="module")
def root(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """CIFAR-10's files, of few images: each class a coarse pattern of its own, in noise."""
    place = tmp_path_factory.mktemp("cifar")
    folder = place / "cifar-10-batches-py"
    folder.mkdir()
    draw = numpy.random.default_rng(0)
    patterns = draw.integers(60, 196, (10, 3, 8, 8))
    for name, count in [*((f"data_batch_{part}", 80) for part in range(1, 6)), ("test_batch", 100)]:
        labels = draw.integers(0, 10, count)
        images = numpy.kron(patterns[labels], numpy.ones((1, 1, 4, 4))) + draw.normal(0, 30, (count, 3, 32, 32))
        pixels = images.clip(0, 255).astype(numpy.uint8).reshape(count, -1)
        (folder / name).write_bytes(pickle.dumps({"data": pixels, "labels": labels.tolist()}))
    return place


def beside(script: list[str], words: list[str], root: Path, home: Path) -> None:
    """Run both; what the script has learned, step by step and at its end, this program has learned, too."""
    shutil.copytree(HERE / "lab", home / "lab")
    finish_all([script, words], home)
    theirs = json.loads((home / "script.json").read_text())
    assert far(curve(home / "run"), theirs["losses"]) < 1e-6
    assert lines(home / "run", "eval")[-1]["accuracy"] == pytest.approx(theirs["accuracy"])


@pytest.mark.long
def test_the_losses_of_a_script_with_ddp_are_those_of_a_run_with_ddp(root: Path, tmp_path: Path) -> None:
    launcher = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"]
    script = [*launcher, str(HERE / "tutorial_ddp.py"), str(root), "script.json", "20"]
    own = torchrun(2, *SAME, "strategy=ddp", "loop.steps=20", f"data.root={root}", "run.dir=run", "device=cpu")
    beside(script, own, root, tmp_path)
    # and the weights that it has saved on rank 0 are where a run may begin
    words = (*SAME, f"data.root={root}", "device=cpu", "init_from=script.pt", "loop.steps=1", "optimizer.lr=0")
    (screen,) = finish_all([single(*words, "run.dir=on")], tmp_path)
    assert "122 tensors from" in screen


@pytest.mark.long
@pytest.mark.skipif(torch.cuda.device_count() > 1, reason="of several GPUs the script averages in another order")
def test_the_losses_of_a_script_with_data_parallel_are_those_of_a_run_with_dp(root: Path, tmp_path: Path) -> None:
    script = [sys.executable, str(HERE / "tutorial_dp.py"), str(root), "script.json", "12"]
    own = single(*SAME, "strategy=dp", "loop.steps=12", f"data.root={root}", "run.dir=run", "device=cpu")
    beside(script, own, root, tmp_path)


def rows() -> list[tuple[str, ...]]:
    """The words on the right of the page's table for those who come from a script, where they need no files."""
    page = (HERE.parents[1] / "docs" / "recipes.md").read_text()
    table = page.split("| in the script | here |")[1].split("\n\n")[0]
    spans = [re.findall(r"`(\+?[a-z][\w.]*=[^`]+)`", line.split("|")[2]) for line in table.splitlines() if "|" in line]
    words = [tuple(word for span in row for word in span.split()) for row in spans]
    return [row for row in words if row and not re.search(r"FILE|runs/|compile", " ".join(row))]


@pytest.mark.parametrize(
    "words",
    [pytest.param(row, id=" ".join(row), marks=pytest.mark.long if at % 5 else ()) for at, row in enumerate(rows())],
)
def test_the_words_that_replace_a_script_train(tmp_path: Path, words: tuple[str, ...]) -> None:
    last = {word.split("=")[0]: word for word in words}  # precision=bf16, precision=fp16: one of them
    small = (*SMALL, "loop.steps=2", "loop.global_batch=120", "loop.eval_every=1", f"run.dir={tmp_path / 'run'}")
    assert product(Launch(), tmp_path, [*small, *last.values()]) == 0
    assert len(curve(tmp_path / "run")) == 2
