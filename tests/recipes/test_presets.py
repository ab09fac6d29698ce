"""The recipes of tutorials, by their names: some steps of each on files of the same form, under several strategies."""

from __future__ import annotations

from pathlib import Path
from unittest.mock import patch

import pytest
import torch
from torchvision import models

from tests.commands import curve, far, lines, status
from tests.inside import product
from tests.processes import Processes
from tests.recipes.test_cifar import write_ten
from tests.recipes.test_folder import write
from tests.recipes.test_vision_data import INSTALLED, write_fashion
from trainer.launch.rendezvous import Launch

pytestmark = pytest.mark.slow

# small images, few of them; the files that a test can make have three or ten classes
BRIEF = ("loop.global_batch=8", "loop.eval_batch=16", "loop.steps=3", "loop.log_every=1", "loader.workers=0")
SMALL = ("data.image_size=32", "data.root=pictures", "schedule.warmup=1")
TOKENS = ("data=synthetic_tokens", "data.length=8", "data.vocab_size=32", "schedule.warmup=1")
PRESETS = {
    "cifar10_resnet18": ("data.image_size=64", "data.root=."),
    "cifar10_resnet50": ("data.root=.",),
    "imagenet_resnet50": SMALL,
    "imagenet_resnet50_strong": (*SMALL, "data.eval_image_size=40", "ema.every=1"),
    "imagenet_resnet50_fast": (*SMALL, "data.image_sizes=[[0,24],[1,32]]", "data.eval_image_size=40"),
    "gpt2_speedrun": (*TOKENS, "model.width=16", "model.heads=2", "model.depth=2"),
    "llama_8b": (*TOKENS, "model.width=16", "model.heads=4", "model.groups=2", "model.inner=32", "model.depth=2"),
    "imagenet_vit_small": (*SMALL, "model.depth=2", "model.patch_size=8"),
    "fashion_mnist": ("data.root=clothes",),
    "fashion_mnist_small": ("data.root=clothes",),
}
QUICK = "cifar10_resnet18"  # the one that is tried without --long


@pytest.fixture(scope="module")
def home(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """CIFAR-10's and Fashion-MNIST's files, folders as ImageNet's, and in a hub cache weights as torchvision's."""
    place = tmp_path_factory.mktemp("presets")
    write_ten(place)
    write(place / "pictures", {"train": 16, "val": 5})
    (place / "clothes").mkdir()
    write_fashion(place / "clothes", train=40)
    cache = place / "home" / "hub" / "checkpoints"
    cache.mkdir(parents=True)
    for weights, make in (
        (models.ResNet18_Weights.DEFAULT, models.resnet18),
        (models.ResNet50_Weights.DEFAULT, models.resnet50),
    ):
        torch.manual_seed(0)
        torch.save(make().state_dict(), cache / weights.url.rpartition("/")[2])
    return place


def train(launch: Launch, home: Path, *words: str) -> int:
    """`python -m trainer …` where no weights need be downloaded."""
    with patch.dict("os.environ", TORCH_HOME=str(home / "home")):
        return product(launch, home, list(words))


@pytest.mark.parametrize(
    "strategy",
    ["ddp", pytest.param("dp", marks=pytest.mark.long), pytest.param("fsdp", marks=pytest.mark.long)],
)
@pytest.mark.parametrize(
    "preset", [QUICK, *(pytest.param(name, marks=pytest.mark.long) for name in PRESETS if name != QUICK)]
)
def test_a_preset_trains(home: Path, processes: Processes, preset: str, strategy: str) -> None:
    folder = home / f"{preset}-{strategy}"
    words = [f"experiment={preset}", *BRIEF, *PRESETS[preset], f"strategy={strategy}", f"run.dir={folder}"]
    size = 1 if strategy == "dp" else 2
    assert processes.run(size, train, home, *words) == [0] * size
    assert status(folder)["state"] == "completed"
    assert len(curve(folder)) == 3
    found = lines(folder, "eval")[-1]
    assert ({"perplexity"} if "data=synthetic_tokens" in words else {"accuracy", "macro_accuracy"}) <= set(found)
    assert ("ema_accuracy" in found) is ("strong" in preset)
    said = (folder / "logs" / "rank-0.log").read_text()
    assert "Warning" not in said
    assert ("of another shape, not loaded" in said) is (
        "cifar10_resnet" in preset
    )  # the head; of ResNet-50 the stem, too


@pytest.mark.long
@pytest.mark.parametrize(("preset", "strategy"), [("imagenet_vit_small", "fsdp"), ("fashion_mnist", "ddp")])
def test_a_network_without_batch_statistics_has_one_curve(
    home: Path, processes: Processes, preset: str, strategy: str
) -> None:
    words = [f"experiment={preset}", *BRIEF, *PRESETS[preset]]
    alone, two = home / f"{preset}-alone", home / f"{preset}-two"
    assert train(Launch(), home, *words, f"run.dir={alone}") == 0
    assert processes.run(2, train, home, *words, f"strategy={strategy}", f"run.dir={two}") == [0, 0]
    assert far(curve(two), curve(alone)) < 1e-5


@pytest.mark.long
@pytest.mark.skipif(not INSTALLED.is_dir(), reason="Debian's package dataset-fashion-mnist is not installed")
def test_fashion_mnist_is_learned(home: Path) -> None:
    """Not what the recipe reaches, but that it is on its way: 200 steps, over which the rate falls to nothing."""
    words = ["experiment=fashion_mnist_small", "loop.epochs=null", "loop.steps=200", "loop.eval_every=null"]
    assert train(Launch(), home, *words, f"run.dir={home / 'learned'}") == 0
    (found,) = lines(home / "learned", "eval")
    assert found["samples"] == 10_000
    assert found["accuracy"] > 0.8  # guessing: 0.1
