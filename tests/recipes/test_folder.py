"""Folders of pictures, as a user trains on them: decoded in worker processes, damaged ones among them."""

from __future__ import annotations

import json
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
from tests.commands import curve, far, finish, lines, single, status
from tests.inside import here, product
from tests.processes import Processes
from trainer.launch.rendezvous import Launch
from trainer.messages import BadData, Refusal

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


def test_one_curve_whoever_decodes(place: Path, processes: Processes) -> None:
    start = [f"data.root={place / 'whole'}", *WORDS, *SHORT, "data.repeat=2", "data.balance=0.5"]
    assert product(Launch(), place, [*start, "run.dir=alone", "strategy=single", "loader.workers=1"]) == 0
    two = [*start, "run.dir=two", "strategy=ddp", "loader.workers=0", "loop.micro_batches=2"]
    assert processes.run(2, product, place, two) == [0, 0]
    assert far(curve(place / "two"), curve(place / "alone")) < 1e-6
    assert curve(place / "two", "sample_digest") == curve(place / "alone", "sample_digest")
    assert len(curve(place / "alone")) == 8  # 48 pictures, 12 a step, 2 epochs
    assert {line["samples"] for line in lines(place / "two", "eval")} == {15}
    # the number of classes, which nobody typed, is known from the folder
    said = yaml.safe_load((place / "alone" / "config.yaml").read_text())
    assert (said["data"]["num_classes"], said["model"]["num_classes"]) == (3, 3)


def test_an_evaluation_may_have_a_size_of_its_own(place: Path) -> None:
    larger = data(place / "whole", eval_image_size=24)
    assert (larger.train()[0][0].shape, larger.evaluation()[0][0].shape) == ((3, 16, 16), (3, 24, 24))
    with pytest.raises(Refusal, match=r"data\.eval_image_size is 0"):
        data(place / "whole", eval_image_size=0)


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
    alone = [*words, "run.dir=grown", "loader.workers=1", "loop.save_every=6", "checkpoint.keep=9"]
    assert product(Launch(), place, alone) == 0
    resumed = [*words, "run.dir=grown-resumed", "run.resume=grown/checkpoints/step-00000006", "loader.workers=0"]
    assert product(Launch(), place, resumed) == 0
    losses = [line["loss"] for line in lines(place / "grown-resumed", "train")]
    assert losses == curve(place / "grown")[6:]
    assert len(losses) == 2
    two = [*words, "run.dir=grown-two", "strategy=ddp", "loader.workers=0", "loop.micro_batches=2"]
    assert processes.run(2, product, place, two) == [0, 0]
    assert far(curve(place / "grown-two"), curve(place / "grown")) < 1e-6
    for wrong in ([[1, 16]], [[0, 16, 3]], [[0, 0], [1, 16]], [[0, 16], [0, 8]]):
        with pytest.raises(Refusal, match=r"it is a list of \[first epoch, pixels\]"):
            data(place / "whole", image_sizes=wrong)
    with pytest.raises(Refusal, match=r"the largest must be data\.image_size"):
        data(place / "whole", image_sizes=[[0, 8], [1, 12]])


@pytest.mark.long
def test_a_job_looks_at_each_training_picture_once_and_plainly(place: Path) -> None:
    words = [f"data.root={place / 'whole'}", *WORDS, *SHORT, "data.repeat=2", "run.dir=seen"]
    assert product(Launch(), place, words) == 0
    assert product(Launch(), place, ["run.dir=seen", "job=evaluate", "job.split=train"]) == 0
    assert json.loads((place / "seen/evaluate/metrics.jsonl").read_text())["samples"] == 48
    # each picture by its path, with the class that is said
    assert product(Launch(), place, ["run.dir=seen", "job=predict", "loader.workers=0"]) == 0
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


@pytest.mark.long
def test_a_damaged_file_ends_the_run_with_its_path(place: Path) -> None:
    words = [f"data.root={place / 'torn'}", *WORDS, *SHORT, "run.dir=ended", "strategy=single", "loader.workers=1"]
    screen = finish(single(*words, "device=cpu"), place, code=1)
    said = rf"{place}/torn/(train/bee/0[34]|val/cat/00)\.jpg cannot be read as a picture: .+; data\.on_bad=skip .+"
    _, *message = screen[screen.index("the run failed") :].splitlines()  # no traceback, of no process
    assert re.fullmatch(said, "\n".join(message)), screen
    assert re.fullmatch(said, status(place / "ended")["reason"])


def test_damaged_files_are_replaced_by_the_same_ones_on_any_rank(place: Path, processes: Processes) -> None:
    start = [f"data.root={place / 'torn'}", *WORDS, *SHORT, "data.on_bad=skip"]
    assert product(Launch(), place, [*start, "run.dir=left", "strategy=single", "loader.workers=1"]) == 0
    two = [*start, "run.dir=right", "strategy=ddp", "loader.workers=0"]
    assert processes.run(2, product, place, two) == [0, 0]
    assert far(curve(place / "left"), curve(place / "right")) < 1e-6
    assert lines(place / "left", "eval")[-1]["samples"] == 15
    for folder in ("left", "right"):
        said = (place / folder / "logs" / "rank-0.log").read_text()
        (line,) = [line for line in said.splitlines() if "replaced" in line]
        assert "3 samples that could not be read" in line
        assert line.count(".jpg") == 3
        assert str(place / "torn" / "val" / "cat" / "00.jpg") in line


# What can be wrong with a picture: it ends early, nothing is in it, it is something else, it has colours that there are
# not (two of them), it unpacks to 400 million pixels.
DAMAGE: dict[str, Callable[[bytes], bytes]] = {
    "torn": lambda jpg: jpg[: len(jpg) // 2],
    "empty": lambda jpg: b"",
    "text": lambda jpg: b"no picture at all",
    "colours": lambda jpg: header(jpg, 9, b"\x02"),
    "bomb": lambda jpg: header(jpg, 5, (20_000).to_bytes(2) * 2),
}


def header(jpg: bytes, at: int, value: bytes) -> bytes:
    """A JPEG whose frame says something else: from byte 5 its height and width, at byte 9 how many colours it has."""
    start = jpg.index(b"\xff\xc0") + at
    return jpg[:start] + value + jpg[start + len(value) :]


@pytest.fixture
def hundred(tmp_path: Path) -> Path:
    """100 pictures, one of them of printers' colours, five of them damaged, each in another way."""
    folders = [tmp_path / "hundred" / name for name in ("ant", "bee")]
    for at, folder in enumerate(folders):
        folder.mkdir(parents=True)
        for number in range(50):
            picture(1000 * at + number).save(folder / f"{number:02}.jpg")
    picture(7).convert("CMYK").save(folders[1] / "00.jpg")
    for number, damage in enumerate(DAMAGE.values()):
        path = folders[number % 2] / f"{10 * number:02}.jpg"
        path.write_bytes(damage(path.read_bytes()))
    return tmp_path / "hundred"


HUNDRED = ("data.image_size=16", "data.held_out=0", "model=mlp", "model.width=16", "loop.global_batch=20")


@pytest.mark.long
def test_of_damaged_files_one_is_named_or_each_is_counted_once(hundred: Path, processes: Processes) -> None:
    words = [f"data.root={hundred}", "data=imagefolder", *HUNDRED, "loop.epochs=2", "loader.workers=0"]
    with pytest.raises(BadData, match=r"hundred/(ant|bee)/\d0\.jpg cannot be read as a picture") as raised:
        product(Launch(), hundred.parent, [*words, "run.dir=raised"])
    assert str(raised.value).count(".jpg") == 1
    two = [*words, "data.on_bad=skip", "strategy=ddp", "run.dir=skipped"]
    assert processes.run(2, product, hundred.parent, two) == [0, 0]
    (line,) = [
        one for one in (hundred.parent / "skipped/logs/rank-0.log").read_text().splitlines() if "replaced" in one
    ]
    assert "5 samples that could not be read" in line
    assert re.findall(r"(\w+/\d\d)\.jpg", line) == ["ant/00", "ant/20", "ant/40", "bee/10", "bee/30"]
    # more of them than may be: the run says which
    with pytest.raises(BadData, match=r"one of 4 damaged pictures of 100, and data\.bad_budget=0\.03 .* 3: ") as raised:
        product(Launch(), hundred.parent, [*words, "data.on_bad=skip", "data.bad_budget=0.03", "run.dir=ended"])
    assert len({*re.findall(r"\w+/\d\d\.jpg", str(raised.value))}) == 4


def test_what_unpacks_to_very_much_takes_no_memory(hundred: Path) -> None:
    damaged = data(hundred, held_out=0.0, on_bad="skip")
    before = memory_peak(fresh=True)
    for index in range(100):
        damaged.train()[index]
    assert len(damaged.replaced()) == 5
    assert memory_peak() - before < 30 * 2**20  # decoded at an eighth of its size, as JPEGs can be, it would be 48 MB


def memory_peak(fresh: bool = False) -> int:
    """The most bytes that this process has had in memory, since the beginning or since the last fresh start."""
    if fresh:
        Path("/proc/self/clear_refs").write_text("5")
    return 1024 * int(re.findall(r"VmHWM:\s+(\d+) kB", Path("/proc/self/status").read_text())[0])


def test_what_stands_for_a_damaged_file_is_the_next_one(place: Path) -> None:
    train = data(place / "torn", on_bad="skip").train()
    at = train.labels.tolist().index(1) + 3  # bee/03, and bee/04 after it
    expected = decode(place / "torn" / "train" / "bee" / "05.jpg", 16, 3, WHOLE.training)
    assert torch.equal(train[at][0], expected)
    assert train[at][1] == 1


def test_where_nothing_can_be_read_it_ends(tmp_path: Path) -> None:
    write(tmp_path, {"": 2})
    for path in tmp_path.rglob("*.jpg"):
        path.write_bytes(b"")
    with pytest.raises(BadData, match="pictures after it cannot be read"):
        data(tmp_path, on_bad="skip", bad_budget=1.0).train()[0]
    with pytest.raises(Refusal, match=r"data\.bad_budget is 1\.5"):
        data(tmp_path, on_bad="skip", bad_budget=1.5)


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


def test_what_is_hidden_is_no_picture(tmp_path: Path) -> None:
    write(tmp_path, {"": 2})
    for name in ("._0.jpg", ".ipynb_checkpoints/0-checkpoint.jpg"):  # as macOS and Jupyter leave them
        (tmp_path / CLASSES[0] / name).parent.mkdir(exist_ok=True)
        (tmp_path / CLASSES[0] / name).write_text("no picture")
    assert len(data(tmp_path, held_out=0.0).train()) == 6


def test_classes_are_numbered_by_name_and_val_has_no_others(tmp_path: Path) -> None:
    write(tmp_path, {"train": 3, "val": 2})
    one = data(tmp_path)
    assert (one.num_classes, one.class_names) == (3, list(CLASSES))
    assert [one.train().sources.name(at).split("/")[-2] for at in (0, 3, 6)] == list(CLASSES)
    (tmp_path / "val" / "dog").mkdir()
    with pytest.raises(Refusal, match=r"has classes that .*train has not: dog"):
        data(tmp_path).train()


def _lose(root: Path) -> Path:
    (root / "val" / "bee" / "00.jpg").rename(root / "val" / "bee" / "00.heic")
    return root


def test_a_class_may_have_no_picture_in_val_and_other_files_are_counted(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    place = _lose(write(tmp_path / "root", {"train": 4, "val": 1}))
    words = [*WORDS, "data.allow_empty=true", "loop.steps=1", "schedule=constant", "log=[console]"]
    assert here(f"data.root={place}", *words, f"run.dir={tmp_path / 'run'}") == 0
    assert "1 file (1 .heic) left out: no pictures by their names" in capsys.readouterr().out
    (line,) = lines(tmp_path / "run", "eval")
    assert line["samples"] == 2


@pytest.mark.parametrize(
    ("make", "words"),
    [
        (lambda root: None, r"data\.root: .* cannot be read .*; expected ROOT/train/CLASS"),
        (lambda root: root.mkdir(), "has no folders of classes"),
        (
            lambda root: write(root, {"Train": 1, "Test": 1}),
            r"data\.root: .* has Test and Train: parts of a data set, no classes; expected",
        ),
        (lambda root: write(root, {"val": 1}), r"data\.root: .* has val: parts of a data set"),
        (lambda root: (root / "ant").mkdir(parents=True), "ant has no pictures; expected files ending in .jpg"),
        (lambda root: write(root, {"": 1}, "gif"), r"ant has no pictures; .*\.webp, and it has 1 file \(1 \.gif\)"),
        (lambda root: _lose(write(root, {"train": 1, "val": 1})), r"val/bee has no pictures; .*data\.allow_empty=true"),
    ],
)
def test_a_folder_without_pictures_is_refused(tmp_path: Path, make: Any, words: str) -> None:
    make(tmp_path / "root")
    with pytest.raises(Refusal, match=words):
        here(f"data.root={tmp_path / 'root'}", *WORDS, f"run.dir={tmp_path / 'run'}")


def test_the_folder_must_be_named_and_have_no_more_classes_than_the_network(place: Path, tmp_path: Path) -> None:
    with pytest.raises(Refusal, match=r"data\.root.*a value must be given"):
        here(*WORDS, f"run.dir={tmp_path}")
    with pytest.raises(Refusal, match=r"data\.num_classes=2, but .*train has 3 folders of classes"):
        here(*WORDS, f"data.root={place / 'whole'}", "data.num_classes=2", f"run.dir={tmp_path}")


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
    # 300 rows make 150 without a loss, not 151
    for size, halved in ((150, ending == "jpg"), (151, False)):
        drafted, undrafted = (decode(path, size, 3, lambda width, height: box, draft) for draft in (True, False))
        assert torch.equal(drafted, undrafted) is not halved
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
    with pytest.raises(Refusal, match=r"window\.area=\[0\.0, 1\.0\]"):
        Windows(area=(0.0, 1.0))


def test_a_picture_of_16_bits_keeps_its_greys(tmp_path: Path) -> None:
    ramp = (torch.arange(64 * 64, dtype=torch.int32) * 16).to(torch.uint16).view(64, 64)
    Image.frombytes("I;16", (64, 64), ramp.numpy().tobytes()).save(tmp_path / "deep.png")
    for channels in (1, 3):
        found = decode(tmp_path / "deep.png", 64, channels, lambda width, height: (0, 0, width, height))
        assert (found[0].float() - ramp.float() / 257).abs().max() <= 1


@pytest.mark.parametrize(
    ("kind", "values", "seen"),
    [
        (numpy.float32, (0.0, 0.5, 1.0), (0, 127, 255)),
        (numpy.float32, (0.0, 100.0, 255.0), (0, 100, 255)),
        (numpy.int32, (0, 257 * 100, 65535), (0, 100, 255)),
        (numpy.int32, (0, 100, 255), None),  # of 8 bits, or dark
        (numpy.int32, (0, 100, 70000), None),
        (numpy.float32, (-1.0, 0.5, 1.0), None),
        (numpy.float32, (numpy.nan, numpy.nan, numpy.nan), None),
    ],
)
def test_a_picture_of_32_bits_is_scaled_by_what_it_holds_or_refused(
    tmp_path: Path, kind: Any, values: tuple[float, ...], seen: tuple[int, ...] | None
) -> None:
    Image.fromarray(numpy.tile(numpy.array(values, kind), (3, 1))).save(tmp_path / "deep.tif")
    window = WHOLE.evaluation
    if seen is None:
        with pytest.raises(ValueError, match="which one is white is not known; save it with 8 or 16 bits"):
            decode(str(tmp_path / "deep.tif"), 3, 1, window)
    else:
        assert decode(str(tmp_path / "deep.tif"), 3, 1, lambda width, height: (0, 0, 3, 3))[0, 0].tolist() == [*seen]


@pytest.mark.parametrize("ending", ["jpg", "png", "tif"])
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


@pytest.mark.filterwarnings("ignore:Corrupt EXIF data")
def test_a_picture_whose_note_is_damaged_stands_as_it_is_stored(tmp_path: Path) -> None:
    picture(5).save(tmp_path / "plain.jpg")
    picture(5).save(tmp_path / "odd.jpg", exif=b"Exif\x00\x00MM\x00*damaged")
    plain, odd = (decode(tmp_path / f"{name}.jpg", 16, 3, WHOLE.evaluation) for name in ("plain", "odd"))
    assert torch.equal(plain, odd)
