"""Folders of pictures, as a user trains on them: decoded in worker processes, damaged ones among them."""

from __future__ import annotations

import json
import os
import random
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy
import pytest
import torch
import yaml
from PIL import Image, ImageOps
from safetensors.torch import load_file
from torch import nn

from recipes.vision.augment import Augment
from recipes.vision.decode import Windows, decode
from recipes.vision.folder import ImageFolder
from tests.ranks import Processes
from tests.run import far, run

WORDS = ("data=imagefolder", "data.image_size=16", "model=mlp", "model.width=16", "loop.global_batch=12")
SHORT = ("loop.epochs=2", "loop.log_every=1", "schedule=constant", "data.augment.cutmix=1.0")
CLASSES = ("ant", "bee", "cat")


def picture(number: int, width: int = 40, height: int = 30) -> Image.Image:
    generator = torch.Generator().manual_seed(number)
    coarse = torch.randint(0, 256, (1, 3, 4, 4), generator=generator).float()
    smooth = torch.nn.functional.interpolate(coarse, (height, width), mode="bilinear").byte()
    return Image.fromarray(smooth[0].permute(1, 2, 0).numpy())


def write(root: Path, parts: dict[str, int], ending: str = "jpg") -> Path:
    """So many pictures of each class in each part; the part "" is the root itself."""
    for part, count in parts.items():
        for at, name in enumerate(CLASSES):
            folder = root / part / name
            folder.mkdir(parents=True, exist_ok=True)
            for number in range(count):
                picture(1000 * at + number).save(folder / f"{number:02}.{ending}")
    return root


WHOLE = Windows(area=(1.0, 1.0), aspect=(1.0, 1.0))


def data(root: Path, window: Windows = WHOLE, **fields: Any) -> ImageFolder:
    return ImageFolder(Augment(), window, root=str(root), image_size=16, **fields)


@pytest.fixture(scope="module")
def place(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Pictures as ImageNet's lie, and one that is none in each part."""
    place = tmp_path_factory.mktemp("pictures")
    write(place / "whole", {"train": 16, "val": 5})
    write(place / "torn", {"train": 16, "val": 5})
    for path in (torn := place / "torn" / "train" / "bee" / "03.jpg", place / "torn" / "val" / "cat" / "00.jpg"):
        path.write_bytes(path.read_bytes()[:200])
    (torn.parent / "04.jpg").write_bytes(b"no picture at all")
    return place


@pytest.mark.long
def test_one_curve_whoever_decodes(place: Path, processes: Processes) -> None:
    start = [f"data.root={place / 'whole'}", *WORDS, *SHORT, "data.repeat=2", "data.balance=0.5"]
    alone = run([*start, "run.dir=alone", "strategy=single", "loader.workers=1"], place=place)
    words = [*start, "run.dir=two", "strategy=ddp", "loader.workers=0", "loop.micro_batches=2"]
    two = run(words, 2, "group", place=place)
    assert far(two.curve(), alone.curve()) < 1e-6
    assert two.curve("sample_digest") == alone.curve("sample_digest")
    assert len(alone.curve()) == 8  # 48 pictures, 12 a step, 2 epochs
    assert {line["samples"] for line in two.lines("eval")} == {15}
    # the number of classes, which nobody typed, is known from the folder
    said = yaml.safe_load((alone.folder / "config.yaml").read_text())
    assert (said["data"]["num_classes"], said["model"]["num_classes"]) == (3, 3)


def any_size(num_classes: int, channels: int, image_size: int, width: int) -> nn.Module:
    convolution, pool = nn.Conv2d(channels, width, 3), nn.AdaptiveAvgPool2d(1)
    return nn.Sequential(convolution, nn.GELU(), pool, nn.Flatten(), nn.Linear(width, num_classes))


@pytest.mark.long
def test_sizes_that_grow_belong_to_the_epoch(place: Path, processes: Processes) -> None:
    """One curve on one rank and on two, and resumed in the middle of a later epoch; plans take the largest size."""
    grown = data(place / "whole", image_sizes=[[0, 8], [1, 12], [2, 16]], repeat=2)
    assert [grown.train().item(50, epoch)[0].shape[-1] for epoch in range(4)] == [8, 12, 16, 16]
    assert (grown.evaluation()[0][0].shape[-1], grown.largest_epoch) == (16, 2)
    words = [f"data.root={place / 'whole'}", *WORDS, *SHORT, "data.image_sizes=[[0,8],[1,16]]"]
    words += [f"model._target_={__name__}.any_size", "~model.depth", "trust=[tests]"]
    more = ["loader.workers=1", "loop.save_every=6", "checkpoint.keep=9"]
    alone = run([*words, "run.dir=grown", *more], place=place).curve()
    resume = ["run.dir=grown-resumed", "run.resume=grown/checkpoints/step-00000006", "loader.workers=0"]
    assert [line["loss"] for line in run([*words, *resume], place=place).lines("train")] == alone[6:]
    two = ["run.dir=grown-two", "strategy=ddp", "loader.workers=0", "loop.micro_batches=2"]
    assert far(run([*words, *two], 2, "group", place=place).curve(), alone) < 1e-6


@pytest.mark.long
def test_a_job_looks_at_each_training_picture_once_and_plainly(place: Path) -> None:
    run([f"data.root={place / 'whole'}", *WORDS, *SHORT, "data.repeat=2", "run.dir=seen"], place=place)
    run(["run.dir=seen", "job=evaluate", "job.split=train"], place=place)
    assert json.loads((place / "seen/evaluate/metrics.jsonl").read_text())["samples"] == 48
    # each picture by its path, with the class that is said
    run(["run.dir=seen", "job=predict", "loader.workers=0"], place=place)
    head, *rows = (place / "seen/predict/predictions.csv").read_text().splitlines()
    said = load_file(place / "seen/predict/predictions.safetensors")["output"].argmax(1).tolist()
    shown = sorted((place / "whole" / "val").glob("*/*.jpg"))
    kinds = sorted({path.parent.name for path in shown})
    assert [head, *rows] == [
        "index,name,class",
        *(f"{index},{path},{kinds[said[index]]}" for index, path in enumerate(shown)),
    ]
    plain = data(place / "whole", Windows(), repeat=2, eval_image_size=20).plain_train()
    assert torch.equal(plain[7][0], decode(plain.sources.source(7), 20, 3, Windows().evaluation))


def test_damaged_files_are_replaced_by_the_same_ones_on_any_rank(place: Path, processes: Processes) -> None:
    start = [f"data.root={place / 'torn'}", *WORDS, *SHORT, "data.on_bad=skip"]
    left = run([*start, "run.dir=left", "strategy=single", "loader.workers=1"], place=place)
    right = run([*start, "run.dir=right", "strategy=ddp", "loader.workers=0"], 2, "group", place=place)
    assert far(left.curve(), right.curve()) < 1e-6
    assert left.lines("eval")[-1]["samples"] == 15
    for ended in (left, right):
        said = (ended.folder / "logs" / "rank-0.log").read_text()
        (line,) = [line for line in said.splitlines() if "replaced" in line]
        assert "3 samples that could not be read" in line
        assert line.count(".jpg") == 3
        assert str(place / "torn" / "val" / "cat" / "00.jpg") in line
    # more of them than may be
    said = run([*start, "run.dir=ended", "loader.workers=0", "data.bad_budget=0.02"], place=place, code=1).out
    assert re.search(r"one of \d damaged pictures of \d+, and data\.bad_budget=0\.02 ", said), said
    # where none may be replaced the first is named, without a traceback of any process
    for workers in (0, 1):
        words = [*start, "data.on_bad=raise", f"loader.workers={workers}", f"run.dir=raised-{workers}"]
        ended = run(words, place=place, code=1)
        said = rf"{place}/torn/\S+\.jpg cannot be read as a picture: .+; data\.on_bad=skip .+"
        assert re.match(said, ended.status["reason"])
        assert ended.out.count(".jpg") == 1


def test_what_stands_for_a_damaged_file_is_the_next_one(place: Path) -> None:
    train = data(place / "torn", on_bad="skip").train()
    at = train.labels.tolist().index(1) + 3  # bee/03, and bee/04 after it
    expected = decode(place / "torn" / "train" / "bee" / "05.jpg", 16, 3, WHOLE.training)
    assert torch.equal(train[at][0], expected)
    assert train[at][1] == 1


def test_a_share_is_held_out_where_there_is_no_val(tmp_path: Path) -> None:
    write(tmp_path, {"": 10}, ending="png")
    one = data(tmp_path, held_out=0.2)
    train, evaluation = one.train(), one.evaluation()
    assert torch.bincount(train.labels).tolist() == [8, 8, 8]
    assert torch.bincount(evaluation.labels).tolist() == [2, 2, 2]
    names = {train.sources.name(at) for at in range(24)} | {evaluation.sources.name(at) for at in range(6)}
    assert names == {str(path) for path in tmp_path.rglob("*.png")}
    # another folder of the same pictures holds out the same ones
    (tmp_path / "again").mkdir()
    other = data(write(tmp_path / "again", {"train": 10}, ending="png"), held_out=0.2).evaluation()
    held = [[Path(part.sources.name(at)).name for at in range(6)] for part in (evaluation, other)]
    assert held[0] == held[1]
    assert data(tmp_path / "again", held_out=0.0).evaluation() is None


def test_classes_are_numbered_by_name_and_what_is_hidden_is_no_picture(tmp_path: Path) -> None:
    write(tmp_path, {"train": 3, "val": 2})
    for name in ("._0.jpg", ".ipynb_checkpoints/0-checkpoint.jpg"):  # as macOS and Jupyter leave them
        (tmp_path / "train" / "ant" / name).parent.mkdir(exist_ok=True)
        (tmp_path / "train" / "ant" / name).write_text("no picture")
    one = data(tmp_path)
    assert (one.num_classes, one.class_names, len(one.train())) == (3, list(CLASSES), 9)
    assert [one.train().sources.name(at).split("/")[-2] for at in (0, 3, 6)] == list(CLASSES)


def _lose(root: Path) -> None:
    (root / "val" / "bee" / "00.jpg").rename(root / "val" / "bee" / "00.heic")


@pytest.mark.long
def test_a_folder_that_is_none_of_pictures_is_refused(place: Path, tmp_path: Path) -> None:
    root, words = tmp_path / "root", [*WORDS, "data.root=root", "loop.steps=1", "schedule=constant"]
    makes: dict[str, Callable[[], Any]] = {
        r"data\.root: root cannot be read \(No such file or directory\)": lambda: None,
        r"ant has no pictures; expected files ending in .jpg": lambda: (root / "ant").mkdir(parents=True),
        r"ant has no pictures; .*\.webp, and it has 1 file \(1 \.gif\)": lambda: write(root, {"": 1}, "gif"),
        r"has Test and Train: parts of a data set, no classes; expected": lambda: write(root, {"Train": 1, "Test": 1}),
        r"has classes that .*train has not: dog": lambda: write(root, {"train": 3, "val": 2}) / "val" / "dog",
        r"val/bee has no pictures; .*data\.allow_empty=true": lambda: _lose(write(root, {"train": 4, "val": 1})),
    }
    for number, (said, make) in enumerate(makes.items()):
        if root.exists():
            root.rename(tmp_path / f"old-{number}")
        if "dog" in str(made := make()):
            made.mkdir()
        assert re.search(said, refused := run(words, place=tmp_path, code=2).out), refused
    more = ["data.allow_empty=true", "log=[console]"]
    assert "1 file (1 .heic) left out: no pictures by their names" in run([*words, *more], place=tmp_path).out
    assert re.search(r"data\.root.*a value must be given", run(WORDS, place=tmp_path, code=2).out)
    words = [*WORDS, f"data.root={place / 'whole'}", "data.num_classes=2"]
    assert "data.num_classes=2, but" in run(words, place=tmp_path, code=2).out


CHANGES: dict[str, Callable[[Path], object]] = {
    "nothing": lambda root: None,
    "added": lambda root: (root / "ant" / "new.jpg").touch(),
    "removed": lambda root: (root / "cat" / "01.jpg").unlink(),
    "in a subfolder": lambda root: (root / "cat" / "more" / "deep" / "1.jpg").unlink(),
    "a new subfolder": lambda root: (root / "ant" / "02.jpg").rename(root / "ant" / "in" / "02.jpg"),
    "torn cache": lambda root: os.truncate(next((root.parent / "cache/trainer/listings").iterdir()), 200),
}


def test_files_are_listed_once_and_again_after_each_change(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    root = write(tmp_path / "data", {"": 3})
    (root / "cat" / "more" / "deep").mkdir(parents=True)
    picture(9).save(root / "cat" / "more" / "deep" / "1.jpg")
    (root / "ant" / "in").mkdir()
    for name, change in CHANGES.items():
        change(root)
        # at once after the change, within the tick of the file system's clock; then from the cache
        for _ in range(2):
            train = data(root, held_out=0.0).train()
            files = [train.sources.name(at) for at in range(len(train))]
            assert files == sorted(str(path) for path in root.rglob("*.*")), name
    assert len([*(tmp_path / "cache" / "trainer" / "listings").iterdir()]) == 1


@pytest.mark.parametrize("ending", ["jpg", "png"])
def test_a_decoded_window_is_that_of_the_whole_picture(tmp_path: Path, ending: str) -> None:
    """Also where a JPEG is decoded at a part of its size: to the bit where it is not."""
    path = tmp_path / f"picture.{ending}"
    picture(1, width=640, height=480).save(path)
    box = (100.0, 60.0, 500.0, 360.0)
    with Image.open(path) as whole:
        expected = whole.resize((32, 32), Image.Resampling.BILINEAR, box=box)
    small = decode(path, 32, 3, lambda width, height: box)
    pixels = torch.tensor(list(expected.tobytes())).view(32, 32, 3).permute(2, 0, 1)
    assert (small.float() - pixels).abs().max() < 6
    assert torch.equal(small, pixels.byte()) is (ending == "png")
    assert torch.equal(decode(path, 32, 3, lambda width, height: box, draft=False), pixels.byte())
    grey = decode(path, 32, 1, lambda width, height: box)
    assert grey.shape == (1, 32, 32)
    assert (grey[0].float() - (small * torch.tensor([0.299, 0.587, 0.114])[:, None, None]).sum(0)).abs().max() < 6


def test_windows_lie_inside_and_have_the_area_that_was_asked_for() -> None:
    random.seed(0)
    window = Windows(area=(0.1, 0.5), aspect=(0.5, 2.0), centre=0.5)
    for _ in range(200):
        left, top, right, bottom = window.training(100, 60)
        assert 0 <= left < right <= 100.001
        assert 0 <= top < bottom <= 60.001
        assert 0.099 <= (right - left) * (bottom - top) / 6000 <= 0.501
    assert window.evaluation(100, 60) == (35.0, 15.0, 65.0, 45.0)
    assert WHOLE.training(100, 60) == (20.0, 0.0, 80.0, 60.0)  # such a window fits nowhere: the middle


def test_a_picture_of_16_bits_keeps_its_greys(tmp_path: Path) -> None:
    ramp = (torch.arange(64 * 64, dtype=torch.int32) * 16).to(torch.uint16).view(64, 64)
    Image.frombytes("I;16", (64, 64), ramp.numpy().tobytes()).save(tmp_path / "deep.png")
    for channels in (1, 3):
        found = decode(tmp_path / "deep.png", 64, channels, lambda width, height: (0, 0, width, height))
        assert (found[0].float() - ramp.float() / 257).abs().max() <= 1


def test_a_picture_of_32_bits_whose_white_is_not_known_is_refused(tmp_path: Path) -> None:
    Image.fromarray(numpy.tile(numpy.array((0, 100, 255), numpy.int32), (3, 1))).save(tmp_path / "deep.tif")
    with pytest.raises(ValueError, match="which one is white is not known; save it with 8 or 16 bits"):
        decode(str(tmp_path / "deep.tif"), 3, 1, WHOLE.evaluation)


@pytest.mark.parametrize("ending", ["jpg", "tif"])
def test_a_picture_stands_as_a_viewer_shows_it(tmp_path: Path, ending: str) -> None:
    whole = picture(5, width=48, height=48)
    for orientation in range(1, 9):
        exif = Image.Exif()
        exif[0x0112] = orientation
        whole.save(path := tmp_path / f"{orientation}.{ending}", exif=exif)
        with Image.open(path) as stored:
            expected = ImageOps.exif_transpose(stored).convert("RGB").tobytes()
        found = decode(path, 48, 3, lambda width, height: (0, 0, width, height))
        assert found.permute(1, 2, 0).contiguous().numpy().tobytes() == expected
