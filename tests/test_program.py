"""A trained network as a program: it takes pictures as cameras make them, and says what an evaluation says of them."""

from __future__ import annotations

import csv
import json
import re
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from PIL import Image, ImageOps
from safetensors.torch import load_file
from torch import Tensor

from recipes.vision.augment import Augment
from recipes.vision.digits import Digits
from tests.run import ROOT, run

PAGE = (ROOT / "docs" / "jobs.md").read_text(encoding="utf-8")
CLASSES = ("ant", "bee", "cat")
WORDS = ("data=imagefolder", "data.root=photos", "data.image_size=16", "data.held_out=0.5", "model=cnn")
SHORT = ("loop.epochs=4", "loop.global_batch=6", "optimizer.lr=0.01")
LAB = """
import torch
from recipes.vision.digits import Digits

class Brighter(Digits):
    def augment(self, inputs, targets, random, training):
        inputs, targets = super().augment(inputs, targets, random, training)
        return inputs + 1, targets

class Sums(torch.nn.Linear):
    def __init__(self, num_classes: int):
        super().__init__(64, num_classes)
    def forward(self, images):
        return super().forward(images.flatten(1)) * float(images.sum() > 0)
"""


def picture(seed: int, width: int, height: int) -> Image.Image:
    """Noise in large patches, which JPEG keeps."""
    patches = torch.randint(0, 256, (6, 6, 3), generator=torch.Generator().manual_seed(seed), dtype=torch.uint8)
    return Image.fromarray(patches.numpy()).resize((width, height))


def photos(root: Path) -> None:
    """Of each class: a small and a large JPEG, one that lies on its side, a PNG, a grey PNG, one with a palette."""
    sideways = Image.Exif()
    sideways[0x0112] = 6
    for at, name in enumerate(CLASSES):
        (root / name).mkdir(parents=True)
        for number in range(2):
            here, seed = root / name, 100 * at + number
            picture(seed, 41, 33).save(here / f"{number}-small.jpg")
            picture(seed, 400, 301).save(here / f"{number}-large.jpg")
            picture(seed, 50, 37).save(here / f"{number}-side.jpg", exif=sideways)
            picture(seed, 67, 90).save(here / f"{number}.png")
            picture(seed, 67, 90).convert("L").save(here / f"{number}-grey.png")
            picture(seed, 30, 20).convert("P").save(here / f"{number}-palette.png")


@pytest.fixture(scope="module")
def place(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with photos, and runs that learned them, in colour and in grey."""
    place = tmp_path_factory.mktemp("programs")
    photos(place / "photos")
    for name, channels in (
        ("colour", ()),
        ("grey", ("data.channels=1", "data.augment.mean=[0.4]", "data.augment.std=[0.2]")),
    ):
        run([*WORDS, *SHORT, *channels, f"run.dir={name}"], place=place)
        run([f"run.dir={name}", "job=predict"], place=place)
    return place


def opened(path: Path) -> Tensor:
    """(3, H, W) of uint8, as viewers show it."""
    from torchvision.transforms.functional import pil_to_tensor

    return pil_to_tensor(ImageOps.exif_transpose(Image.open(path)).convert("RGB"))


def answers(run: Path) -> dict[str, Tensor]:
    """What the run's own evaluation says of each picture: probabilities by file."""
    with (run / "predict" / "predictions.csv").open(encoding="utf-8") as table:
        names = [row["name"] for row in csv.DictReader(table)]
    shares = load_file(run / "predict" / "predictions.safetensors")["output"].softmax(1)
    return dict(zip(names, shares, strict=True))


@pytest.mark.long
@pytest.mark.parametrize("name", ["colour", "grey"])
def test_the_program_and_the_ten_lines_of_the_page_say_what_the_evaluation_says(place: Path, name: str) -> None:
    run([f"run.dir={name}", "job=export", "job.format=pt2", "job.prepared=true"], place=place)
    (lines,) = re.findall(r"```python\n# classify.py\n(.+?)```", PAGE, re.DOTALL)
    assert len(lines.splitlines()) <= 14
    watched = f"{lines}\nprint(*(name for name in ('trainer', 'recipes') if name in sys.modules))\n"
    known = answers(place / name)
    assert len({path.partition("-")[2] for path in known}) >= 4  # of each kind some
    command = [sys.executable, "-W", "error", "-c", watched, *(str(place / path) for path in known)]
    ended = subprocess.run(command, capture_output=True, text=True, check=False, cwd=place / name / "export")
    assert ended.returncode == 0, ended.stderr
    *said, imported = ended.stdout.split("\n")[:-1]
    assert imported == ""
    for line, (path, own) in zip(said, known.items(), strict=True):
        file, kind, share = line.rsplit(" ", 2)
        assert (file, kind) == (str(place / path), CLASSES[int(own.argmax())])
        assert float(share.rstrip("%")) / 100 == pytest.approx(float(own.max()), abs=0.02)
    program = torch.export.load(place / name / "export" / "model.pt2").module()
    card = json.loads((place / name / "export" / "model.json").read_text())
    assert card["classes"] == list(CLASSES)
    assert card["image_size"] == 16
    assert card["mean"] == ([0.485, 0.456, 0.406] if name == "colour" else [0.4])
    assert card["input"].startswith("uint8 (B, 3, H, W)")
    for path, own in known.items():
        said = program(opened(place / path)[None])[0]
        # PNG: every byte is the same. A JPEG is turned, or decoded at a part of its size, before it is cut out
        assert float((said - own).abs().max()) < (1e-6 if path.endswith("png") else 0.02), path


def test_pictures_of_a_set_in_memory_are_prepared_too(tmp_path: Path) -> None:
    run(["model=mlp", "model.width=16", "loop.steps=4", "run.dir=run"], place=tmp_path)
    run(["run.dir=run", "job=predict"], place=tmp_path)
    run(["run.dir=run", "job=export", "job.format=pt2", "job.prepared=true"], place=tmp_path)
    program = torch.export.load(tmp_path / "run/export/model.pt2").module()
    assert json.loads((tmp_path / "run/export/model.json").read_text())["classes"] == list("0123456789")
    own = load_file(tmp_path / "run/predict/predictions.safetensors")["output"].softmax(1)
    digits = Digits(Augment()).evaluation().images  # 16 is white
    images = (digits * (255 / 16)).round().byte().expand(-1, 3, -1, -1)
    assert float((program(images) - own).abs().max()) < 0.01  # of half a grey level of 255


def test_what_cannot_be_prepared_or_written_is_refused(tmp_path: Path) -> None:
    (tmp_path / "lab" / "conf").mkdir(parents=True)
    (tmp_path / "lab" / "data.py").write_text(LAB)
    lab = ("--config-dir", "lab/conf", "run.dir=lab-run")
    network = ("~model", "+model._target_=lab.data.Sums", "+model.num_classes=10", "loop.steps=1")
    run([*lab, *network, "data._target_=lab.data.Brighter"], place=tmp_path)

    def export(*words: str, code: int = 2) -> str:
        return run([*lab, "job=export", *words], place=tmp_path, code=code).out

    said = export("job.format=pt2", "job.prepared=true")
    assert re.search(r"Brighter does not say how it prepares .* preparation\(self\)", said), said
    said = export("job.prepared=true")
    assert re.search(r"job.format=safetensors holds weights .* job.format=pt2 and onnx do", said), said
    said = export("job.format=pt2")
    assert re.search(r"torch cannot write Sums as a program: .*; job\.format=safetensors and pt hold", said), said
    said = export("job.format=huggingface")
    assert "Sums has no method save_pretrained(self, folder), as decoders and networks of" in said
