"""CIFAR from files of its own formats, as a user trains on them."""

from __future__ import annotations

import pickle
import re
import struct
from pathlib import Path
from typing import Any

import numpy
import pytest
import torch

from recipes.vision.augment import Augment
from recipes.vision.cifar import CIFAR10
from tests.ranks import Processes
from tests.run import SMALL, far, quickly, run
from trainer import Refusal


def pictures(count: int, classes: int = 10, seed: int = 0) -> tuple[Any, list[int]]:
    generator = numpy.random.default_rng(seed)
    return generator.integers(0, 256, (count, 3072), dtype=numpy.uint8), [at % classes for at in range(count)]


def of_python_2(pixels: Any, labels: list[int], key: bytes) -> bytes:
    """The opcodes that Python 2 and its numpy wrote into the published files."""
    content = pixels.tobytes()
    array = (
        b"cnumpy.core.multiarray\n_reconstruct\n(cnumpy\nndarray\n(I0\ntU\x01btR"
        + b"(I1\n(I%d\nI3072\ntcnumpy\ndtype\n(U\x02u1I0\nI1\ntR" % len(pixels)
        + b"(I3\nU\x01|NNNI-1\nI-1\nI0\ntbI00\nT"
        + struct.pack("<i", len(content))
        + content
        + b"tb"
    )
    numbers = b"(l" + b"".join(b"I%d\na" % label for label in labels)
    names = b"U\x0bbatch_labelU\x15training batch 1 of 5"
    return b"\x80\x02}(U\x04data" + array + b"U" + bytes([len(key)]) + key + numbers + names + b"u."


NAMES = ["airplane", "automobile", "bird", "cat", "deer", "dog", "frog", "horse", "ship", "truck"]


def write_ten(root: Path, train: int = 8, test: int = 20) -> Path:
    """CIFAR-10 with so many pictures in each of its five training files."""
    folder = root / "cifar-10-batches-py"
    folder.mkdir(parents=True)
    names = [*((f"data_batch_{at}", train) for at in range(1, 6)), ("test_batch", test)]
    for seed, (name, count) in enumerate(names):
        pixels, labels = pictures(count, seed=seed)
        (folder / name).write_bytes(of_python_2(pixels, labels, b"labels"))
    (folder / "batches.meta").write_bytes(pickle.dumps({b"label_names": [name.encode() for name in NAMES]}))
    return root


def test_the_files_give_their_pictures(tmp_path: Path) -> None:
    data = CIFAR10(Augment(), root=str(write_ten(tmp_path)))
    train = data.train()
    expected = [pictures(8, seed=seed) for seed in range(5)]
    whole = torch.cat([torch.from_numpy(pixels) for pixels, _ in expected])
    assert torch.equal(train.images, whole.view(40, 3, 32, 32))
    assert train.labels.tolist() == [label for _, labels in expected for label in labels]
    assert (len(data.evaluation()), train.labels.dtype) == (20, torch.int64)
    assert list(data.class_names) == NAMES


def test_files_that_are_missing_or_none_of_the_set_are_refused(tmp_path: Path) -> None:
    words = ["data=cifar10", "data.root=.", *SMALL, "loop.steps=1"]
    assert re.search("holds no folder cifar-10-batches-py or .*-bin; unpack", run(words, place=tmp_path, code=2).out)
    file = write_ten(tmp_path) / "cifar-10-batches-py" / "data_batch_3"
    for content, said in (
        (pickle.dumps({"data": 3}), "expected a dict of an array `data`, N × 3072 bytes, and a list `labels`"),
        (of_python_2(pictures(3)[0], [1, 2], b"labels"), "3 pictures, but 2 labels"),
        (of_python_2(pictures(3)[0], [1, 2, 10], b"labels"), r"labels 1\.\.10; expected 0\.\.9"),
    ):
        file.write_bytes(content)
        assert re.search(f"{file.name}.*{said}", run(words, place=tmp_path, code=2).out)
    file.unlink()
    assert "lacks cifar-10-batches-py/data_batch_3: unpack" in run(words, place=tmp_path, code=2).out


WORDS = ("data=cifar10", *SMALL, "loop.global_batch=20", "loop.epochs=4", "schedule=constant", "optimizer=sgd")
MIXED = ("data.augment.mixup=0.4", "data.augment.cutmix=1.0", "data.augment.erase=0.3", "task.label_smoothing=0.1")
COLOURED = ("data.augment.resized_crop=0.5", "data.augment.brightness=0.4", "data.augment.saturation=0.4")
DRAWN = ("data.repeat=3", "data.balance=0.5", "data.image_size=40")


EXTRAS = {"mixed": MIXED, "mixed, coloured and drawn": (*MIXED, *COLOURED, *DRAWN)}


@pytest.mark.parametrize("extra", quickly(EXTRAS, "mixed, coloured and drawn"))
def test_one_curve_with_mixed_images_and_soft_targets(tmp_path: Path, processes: Processes, extra: str) -> None:
    start = [f"data.root={write_ten(tmp_path)}", *WORDS, *EXTRAS[extra]]
    alone = run([*start, "run.dir=alone"], place=tmp_path)
    slices = run([*start, "run.dir=slices", "loop.micro_batches=3", "loop.uneven=true"], place=tmp_path)
    two = run([*start, "run.dir=two", "strategy=ddp", "loop.micro_batches=2"], 2, "group", place=tmp_path)
    for other in (slices, two):
        assert far(other.curve(), alone.curve()) < 1e-6
        assert other.curve("sample_digest") == alone.curve("sample_digest")
        assert other.lines("eval")[-1]["samples"] == 20
    said = (alone.folder / "logs" / "rank-0.log").read_text()
    assert said.count("is not the published file: its md5 is another one") == 6


def test_a_picture_comes_so_often_in_a_row_and_never_twice_the_same(tmp_path: Path) -> None:
    data = CIFAR10(Augment(crop=4, flip=True), root=str(write_ten(tmp_path)), repeat=3)
    order, train = data.order(0, torch.Generator().manual_seed(0)), data.train()
    rows = order[:39].view(-1, 3)
    assert len(order) == 40
    assert torch.equal(rows % 40, (rows[:, :1] % 40).expand(-1, 3))
    assert torch.equal(rows // 40, torch.arange(3).expand(13, -1))  # numbers of their own
    assert torch.equal(train.batch(rows[0])[0][0], train.batch(rows[0])[0][2])


def test_rare_classes_come_as_often_as_others(tmp_path: Path) -> None:
    folder = write_ten(tmp_path, train=200) / "cifar-10-batches-py"
    for at in range(1, 6):
        labels = [0] * 180 + [1] * 18 + [2] * 2
        (folder / f"data_batch_{at}").write_bytes(of_python_2(pictures(200)[0], labels, b"labels"))
    data = CIFAR10(Augment(), root=str(tmp_path), balance=1.0)
    labels = data.train().batch(data.order(0, torch.Generator().manual_seed(0)))[1]
    assert len(labels) == 1000
    assert all(280 < count < 390 for count in torch.bincount(labels).tolist())
    with pytest.raises(Refusal, match=r"data\.balance is 2"):
        CIFAR10(Augment(), root=str(tmp_path), balance=2.0)
