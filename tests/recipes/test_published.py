"""Published weights of torchvision's networks, out of a hub cache that the test makes."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from torchvision import models

from tests.recipes.test_lora import stored
from tests.run import quickly, run

WORDS = (
    *("data=synthetic_images", "data.image_size=16", "data.size=32", "data.evaluation_size=8"),
    *("loop.global_batch=8", "loop.steps=1", "loop.eval_every=null"),
)


@pytest.fixture
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Where torch's hub keeps files; nothing is downloaded."""

    def unreachable(*_: Any, **__: Any) -> None:
        raise OSError("Network is unreachable")

    monkeypatch.setenv("TORCH_HOME", str(tmp_path / "home"))
    monkeypatch.setattr(torch.hub, "download_url_to_file", unreachable)
    folder = tmp_path / "home" / "hub" / "checkpoints"
    folder.mkdir(parents=True)
    return folder


def published(folder: Path, weights: Any, **changes: Tensor) -> dict[str, Tensor]:
    """A file as torchvision's servers have it: of the older format, and without counts of batches."""
    torch.manual_seed(7)
    state = {name: torch.randn(value.shape) for name, value in models.resnet18().state_dict().items()}
    state = {name: value for name, value in state.items() if not name.endswith("num_batches_tracked")} | changes
    torch.save(state, folder / weights.url.rpartition("/")[2], _use_new_zipfile_serialization=False)
    return state


@pytest.mark.parametrize(
    ("words", "replaced"),
    quickly(
        [
            (("model=resnet18",), {"conv1.weight": "(64, 3, 7, 7) → (64, 3, 3, 3)"}),
            (("model=torchvision", "model.weights=IMAGENET1K_V1", "data.image_size=32"), {}),
        ],
        (("model=resnet18",), {"conv1.weight": "(64, 3, 7, 7) → (64, 3, 3, 3)"}),
    ),
)
def test_pretrained_gives_all_but_a_new_head_and_stem(
    cache: Path, tmp_path: Path, words: tuple[str, ...], replaced: dict[str, str]
) -> None:
    state = published(cache, models.ResNet18_Weights.IMAGENET1K_V1)
    words = (*WORDS, *words, "init_from=pretrained", "optimizer.lr=0", "run.dir=run")
    folder = run(words, place=tmp_path).folder
    fresh = replaced | {"fc.weight": "(1000, 512) → (10, 512)", "fc.bias": "(1000,) → (10,)"}
    said = (folder / "logs/rank-0.log").read_text()
    assert f"weights     {len(state) - len(fresh)} tensors from {cache}" in said
    listed = ", ".join(f"{name} {shapes}" for name, shapes in fresh.items())
    assert f"weights     {len(fresh)} of another shape, not loaded: {listed}" in said
    begun = stored(folder)
    moved = ("running_mean", "running_var")  # by the one step
    for name, value in state.items():
        if not name.endswith(moved):
            assert (name in fresh) != (begun[name].shape == value.shape and torch.equal(begun[name], value)), name


@pytest.mark.long
def test_what_cannot_be_had_is_said_with_the_place_to_put_it(cache: Path, tmp_path: Path) -> None:
    begin = (*WORDS, "init_from=pretrained", "run.dir=run")
    name = models.ResNet50_Weights.DEFAULT.url.rpartition("/")[2]
    for words, said in (
        (("model=resnet50",), rf"{name} cannot be downloaded from https://.*unreachable\); put it into {cache}"),
        (("model=resnet50", "model.weights=IMAGENET1K"), "resnet50 has no such weights; did you mean 'IMAGENET1K_V"),
        (("model=torchvision", "model.name=densenet121", "data.image_size=64"), r"names of an older densenet121"),
    ):
        assert re.search(said, run([*begin, *words], place=tmp_path, code=2).out)
    assert not (tmp_path / "run").exists()
