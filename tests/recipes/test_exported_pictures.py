"""A classifier of pictures as a folder of transformers: `pipeline` opens it without this program."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch

from recipes.vision.exported import save
from recipes.vision.resnet import resnet18, resnet50
from recipes.vision.timm_model import timm_model
from recipes.vision.zoo import torchvision_model
from tests.inside import product
from tests.quick import quickly
from tests.test_program import CLASSES, SHORT, WORDS, answers, photos
from trainer.launch.rendezvous import Launch
from trainer.messages import Refusal

transformers = pytest.importorskip("transformers")
VIT = ("model=vit_tiny", "model.width=24", "model.heads=4", "model.depth=2")
GREY = ("data.channels=1", "data.augment.mean=[0.4]", "data.augment.std=[0.2]")
OURS: dict[str, Any] = {
    "resnet18, small": lambda: resnet18(3, 3, 96),
    "resnet50, grey": lambda: resnet50(3, 1, 96),
    "vit_b_32": lambda: torchvision_model("vit_b_32", 4, 3, 64),
    "timm's convnext": lambda: timm_model("convnext_atto", 3, 1, 64),
    "timm's vit": lambda: timm_model("vit_tiny_patch16_224", 3, 3, 64, drop_path_rate=0.1),
}


@pytest.mark.long
@pytest.mark.parametrize("name", quickly(["colour", "grey"], "grey"))
def test_a_pipeline_opens_the_folder(tmp_path: Path, name: str) -> None:
    photos(tmp_path / "photos")
    words = [*WORDS, *SHORT, *VIT, *(GREY if name == "grey" else ()), "run.dir=run"]
    assert product(Launch(), tmp_path, words) == 0
    for job in (["job=predict"], ["job=export", "job.format=huggingface"]):
        assert product(Launch(), tmp_path, ["run.dir=run", *job]) == 0
    folder = tmp_path / "run" / "export" / "model"
    assert json.loads((folder / "config.json").read_text())["id2label"] == {"0": "ant", "1": "bee", "2": "cat"}
    classify = transformers.pipeline("image-classification", model=str(folder))
    for path, own in answers(tmp_path / "run").items():
        if "side" in path or "palette" in path:  # its processor turns no picture, and rounds a small one otherwise
            continue
        said = {each["label"]: each["score"] for each in classify(str(tmp_path / path))}
        assert said.keys() == {*CLASSES}
        theirs = torch.tensor([said[label] for label in CLASSES])
        assert float((theirs - own).abs().max()) < 0.05, path  # it resizes all, then cuts out whole pixels


@pytest.mark.long
@pytest.mark.parametrize("which", quickly(OURS, "resnet50, grey"))
def test_scores_are_the_same(tmp_path: Path, which: str) -> None:
    save(OURS[which]().eval(), tmp_path)  # it compares them
    assert transformers.AutoModelForImageClassification.from_pretrained(tmp_path).config.num_labels in (3, 4)


def test_a_network_that_transformers_does_not_have_is_refused(tmp_path: Path) -> None:
    for network, said in (
        (resnet18(3, 3, 32), "a stem of its own"),
        (torchvision_model("alexnet", 3, 3, 64), "AlexNet"),
    ):
        with pytest.raises(Refusal, match=f"{said}.* it works for .* job.prepared=true"):
            save(network.eval(), tmp_path)
