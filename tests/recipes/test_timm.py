"""Networks of timm by name, where timm is installed."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file

from tests.ranks import Processes
from tests.recipes.test_lora import stored
from tests.recipes.test_published import WORDS as IMAGES
from tests.run import quickly, run

timm = pytest.importorskip("timm")

WORDS = (*IMAGES, "loop.log_every=1", "schedule=constant", "loop.steps=2", "model=timm")
# networks with their sizes of images; one normalises by batches
MODELS = {"vit_tiny_patch16_224": 32, "convnext_atto.d2_in1k": 32, "resnet18": 32}


@pytest.mark.parametrize("name", quickly(MODELS))
def test_networks_of_timm_train(processes: Processes, tmp_path: Path, name: str) -> None:
    words = [*WORDS, f"model.name={name}", f"data.image_size={MODELS[name]}", "data.channels=1"]
    curves = [
        run([*words, "strategy.sync_bn=true", f"strategy={each}", f"run.dir={each}"], size, "group", place=tmp_path)
        for each, size in (("single", 1), ("ddp", 2), ("fsdp", 2))
    ]
    for other in curves[1:]:
        assert other.curve() == pytest.approx(curves[0].curve(), abs=1e-4)


def test_published_weights_come_from_the_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from huggingface_hub import constants

    monkeypatch.setattr(constants, "HF_HUB_CACHE", str(tmp_path))
    place = tmp_path / "models--timm--resnet18.a1_in1k"
    (place / "refs").mkdir(parents=True)
    (place / "refs" / "main").write_text("0" * 40)
    (place / "snapshots" / ("0" * 40)).mkdir(parents=True)
    torch.manual_seed(7)
    own = timm.create_model("resnet18").state_dict()
    state = {name: x + 0.01 * torch.rand(x.shape) if x.is_floating_point() else x for name, x in own.items()}
    save_file(state, place / "snapshots" / ("0" * 40) / "model.safetensors")
    folder = run([*WORDS, "init_from=pretrained", "model.freeze=[backbone]", "run.dir=run"], place=tmp_path).folder
    begun = stored(folder)
    other = {name for name, value in state.items() if begun[name].shape != value.shape}
    assert other == {"fc.weight", "fc.bias"}
    assert all(torch.equal(begun[name], value) for name, value in state.items() if name.startswith("layer"))
    assert "5,130 are trained" in (folder / "logs/rank-0.log").read_text()


@pytest.mark.long
def test_what_timm_does_not_have_or_take_is_said_and_any_argument_goes_on_to_it(tmp_path: Path) -> None:
    for words, said in (
        (("model.name=resnet1888",), "timm has no network 'resnet1888'; did you mean 'resnet1"),
        (("model.name=resnet18.a1",), r"timm has no such weights: .*did you mean 'resnet18\.a"),
        (("model.name=vit_tiny_patch16_224", "data.image_size=10"), r"cannot take images of 3 × 10 × 10"),
        (
            ("model.name=resnet18", "+model.drop_path_rat=0.2"),
            r"timm's resnet18 takes no such key",
        ),
    ):
        assert re.search(said, run([*WORDS, *words, "run.dir=run"], place=tmp_path, code=2).out)
    run([*WORDS, "model.name=resnet18", "data.image_size=32", "+model.drop_path_rate=0.2"], place=tmp_path)
