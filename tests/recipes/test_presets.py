"""The recipes of tutorials, by their names: some steps of each on files of the same form."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from torchvision import models

from tests.ranks import Processes
from tests.recipes.test_cifar import write_ten
from tests.recipes.test_folder import write
from tests.recipes.test_vision_data import write_fashion
from tests.run import far, quickly, run

# small images, few of them; the files that a test can make have three or ten classes
BRIEF = ("loop.global_batch=8", "loop.eval_batch=16", "loop.steps=3", "loop.log_every=1", "loader.workers=0")
SMALL = ("data.image_size=32", "data.root=pictures", "schedule.warmup=1")
TOKENS = ("data=synthetic_tokens", "data.length=8", "data.vocab_size=32", "schedule.warmup=1")
SHALLOW = ("model.depth=2",)
PRESETS = {
    "cifar10_resnet18": ("ddp", "data.image_size=64", "data.root=."),
    "cifar10_resnet50": ("fsdp", "data.root=."),
    "imagenet_resnet50": ("ddp", *SMALL),
    "imagenet_resnet50_strong": ("fsdp", *SMALL, "data.eval_image_size=40", "ema.every=1"),
    "imagenet_resnet50_fast": ("ddp", *SMALL, "data.image_sizes=[[0,24],[1,32]]", "data.eval_image_size=40"),
    "gpt2_speedrun": ("fsdp", *TOKENS, "model.width=16", "model.heads=2", *SHALLOW),
    "llama_8b": ("fsdp", *TOKENS, *SHALLOW, "model.width=16", "model.heads=4", "model.groups=2", "model.inner=32"),
    "imagenet_vit_small": ("fsdp", *SMALL, *SHALLOW, "model.patch_size=8"),
    "fashion_mnist": ("ddp", "data.root=clothes"),
    "fashion_mnist_small": ("ddp", "data.root=clothes"),
}


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


@pytest.mark.parametrize("preset", quickly(PRESETS, "fashion_mnist"))
def test_a_preset_trains(home: Path, processes: Processes, preset: str) -> None:
    strategy, *more = PRESETS[preset]
    words = [f"experiment={preset}", *BRIEF, *more]
    where = {"TORCH_HOME": str(home / "home")}  # no weights need be downloaded
    ended = run([*words, f"strategy={strategy}", f"run.dir={preset}"], 2, "group", place=home, environment=where)
    assert ended.status["state"] == "completed"
    assert len(ended.curve()) == 3
    found = ended.lines("eval")[-1]
    assert ({"perplexity"} if "data=synthetic_tokens" in words else {"accuracy", "macro_accuracy"}) <= set(found)
    assert ("ema_accuracy" in found) is ("strong" in preset)
    said = (ended.folder / "logs" / "rank-0.log").read_text()
    assert "Warning" not in said
    # the head; of ResNet-50 the stem, too
    assert ("of another shape, not loaded" in said) is ("cifar10_resnet" in preset)
    if preset in ("imagenet_vit_small", "fashion_mnist"):  # without batch statistics it is one curve
        alone = run([*words, f"run.dir={preset}-alone"], place=home, environment=where)
        assert far(ended.curve(), alone.curve()) < 1e-5
