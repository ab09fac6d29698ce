"""CIFAR from files of its own formats, as a user trains on them; what a crafted file can do: nothing."""

from __future__ import annotations

import os
import pickle
import struct
from pathlib import Path
from typing import Any

import numpy
import pytest
import torch

from recipes.vision.augment import Augment
from recipes.vision.cifar import CIFAR10, CIFAR100
from recipes.vision.plain_pickle import read_plain
from recipes.vision.sampling import numbered
from tests.commands import SMALL, curve, far, lines
from tests.inside import here, product
from tests.processes import Processes
from tests.quick import quickly
from trainer.messages import Refusal


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


def write_ten(root: Path, form: str = "py2", train: int = 8, test: int = 20) -> Path:
    """CIFAR-10 with so many pictures in each of its five training files."""
    folder = root / ("cifar-10-batches-bin" if form == "bin" else "cifar-10-batches-py")
    folder.mkdir(parents=True)
    names = [*((f"data_batch_{at}", train) for at in range(1, 6)), ("test_batch", test)]
    for seed, (name, count) in enumerate(names):
        pixels, labels = pictures(count, seed=seed)
        if form == "bin":
            records = b"".join(bytes([label]) + row.tobytes() for row, label in zip(pixels, labels, strict=True))
            (folder / f"{name}.bin").write_bytes(records)
        elif form == "py2":
            (folder / name).write_bytes(of_python_2(pixels, labels, b"labels"))
        else:
            (folder / name).write_bytes(pickle.dumps({b"data": pixels, "labels": labels}, protocol=int(form)))
    if form == "bin":
        (folder / "batches.meta.txt").write_text("\n".join(NAMES) + "\n\n")
    elif form != "py2":  # where there is no such file, nothing else is missing
        (folder / "batches.meta").write_bytes(pickle.dumps({b"label_names": [name.encode() for name in NAMES]}))
    return root


@pytest.mark.parametrize("form", ["py2", "2", "4", "5", "bin"])
def test_every_form_of_the_files_gives_the_same_pictures(tmp_path: Path, form: str) -> None:
    data = CIFAR10(Augment(), root=str(write_ten(tmp_path, form)))
    train, evaluation = data.train(), data.evaluation()
    expected = [pictures(8, seed=seed) for seed in range(5)]
    whole = torch.cat([torch.from_numpy(pixels) for pixels, _ in expected])
    assert torch.equal(train.images, whole.view(40, 3, 32, 32))
    assert train.labels.tolist() == [label for _, labels in expected for label in labels]
    assert (len(evaluation), train.labels.dtype) == (20, torch.int64)
    assert list(data.class_names) == ([] if form == "py2" else NAMES)
    assert len(data.notes()) == (0 if form == "bin" else 6)  # of the binary release no check sums are published


@pytest.mark.parametrize("form", ["py", "bin"])
def test_of_cifar_100_the_fine_labels_count(tmp_path: Path, form: str) -> None:
    folder = tmp_path / ("cifar-100-binary" if form == "bin" else "cifar-100-python")
    folder.mkdir()
    for name in ("train", "test"):
        pixels, labels = pictures(120, classes=100)
        if form == "bin":
            records = (bytes([label // 5, label]) + row.tobytes() for row, label in zip(pixels, labels, strict=True))
            (folder / f"{name}.bin").write_bytes(b"".join(records))
        else:
            (folder / name).write_bytes(of_python_2(pixels, labels, b"fine_labels"))
    train = CIFAR100(Augment(), root=str(tmp_path)).train()
    assert train.labels.tolist() == [at % 100 for at in range(120)]
    assert torch.equal(train.images.view(120, -1), torch.from_numpy(pictures(120)[0]))


class Attack:
    """A picture file that would run a command."""

    def __init__(self, call: Any, *words: Any) -> None:
        self.call, self.words = call, words

    def __reduce__(self) -> Any:
        return self.call, self.words


@pytest.mark.parametrize(
    ("call", "words"),
    [(os.system, ("touch ran",)), (eval, ("open('ran', 'w')",)), (numpy.fromfile, ("ran",)), (getattr, (os, "getcwd"))],
    ids=["system", "eval", "numpy", "getattr"],
)
def test_a_crafted_file_runs_no_code(tmp_path: Path, monkeypatch: Any, call: Any, words: tuple) -> None:
    monkeypatch.chdir(tmp_path)
    file = write_ten(tmp_path) / "cifar-10-batches-py" / "data_batch_1"
    if call is getattr:  # a name with a dot in it, which pickle would walk along
        file.write_bytes(b"\x80\x04\x8c\x05numpy\x94\x8c\x0fndarray.tofile\x94\x93\x94\x8c\x03ran\x94\x85\x94R.")
    else:
        file.write_bytes(pickle.dumps({b"data": Attack(call, *words), b"labels": [0]}, protocol=2))
    with pytest.raises(Refusal, match=f"{file} is damaged, or holds more than .* asks for was run") as refusal:
        here("data=cifar10", f"data.root={tmp_path}", *SMALL, "run.dir=run")
    assert "\n" not in str(refusal.value)
    assert not (tmp_path / "ran").exists()
    assert not (tmp_path / "run").exists()


def laughs(depth: int) -> list:
    """2^depth lists, in a few hundred bytes."""
    value: list = []
    for _ in range(depth):
        value = [value, value]
    return value


@pytest.mark.parametrize(
    ("content", "words"),
    [
        (b"", "exhausted before"),
        (of_python_2(*pictures(3), b"labels")[:-2000], "only 7278 remain"),
        (pickle.dumps({"data": 3}), "expected a dict of an array `data`, N × 3072 bytes, and a list `labels`"),
        (pickle.dumps({"data": {1, 2}}), "a set"),
        (pickle.dumps({"data": numpy.zeros((2, 3072)), "labels": [0, 1]}, protocol=2), "not one of bytes"),
        (of_python_2(*pictures(3), b"labels").replace(b"\x02u1", b"\x02O8"), "not one of bytes"),
        (of_python_2(pictures(3)[0], [1, 2], b"labels"), "3 pictures, but 2 labels"),
        (of_python_2(pictures(3)[0], [1, 2, 10], b"labels"), r"labels 1\.\.10; expected 0\.\.9"),
        (pickle.dumps({"data": numpy.zeros((1, 3072), "u1"), "labels": [10**30]}, protocol=2), "from 0 to 255"),
        # a few bytes that would take all memory, the stack, or change what reads them
        (b"\x80\x02]r\x00\xc2\xeb\x0b.", "a place that nothing before it needs"),
        (b"\x80\x02})" + b"\x85" * 3_000_000 + b"K\x00s.", "more than 1000 tuples"),
        (b"\x80\x02c_codecs\nencode\nN}X\x01\x00\x00\x00aK\x01s\x86b.", "a change of what makes"),
        (pickle.dumps(laughs(40)), "expected a dict"),
        pytest.param(
            b"\x80\x02(" + b"]" * 11_000_000 + b"l.", "more than 10,000,000 operations", marks=pytest.mark.long
        ),
    ],
    ids=lambda value: value if isinstance(value, str) else "file",
)
def test_a_file_that_is_none_of_the_set_is_refused(tmp_path: Path, content: bytes, words: str) -> None:
    file = write_ten(tmp_path) / "cifar-10-batches-py" / "data_batch_3"
    file.write_bytes(content)
    with pytest.raises(Refusal, match=words) as refusal:
        CIFAR10(Augment(), root=str(tmp_path)).train()
    assert str(file) in str(refusal.value)


@pytest.mark.parametrize("form", ["py2", "bin"])
def test_a_file_that_is_too_large_for_any_of_the_set_is_not_read(tmp_path: Path, form: str) -> None:
    file = next((write_ten(tmp_path, form) / f"cifar-10-batches-{form.replace('py2', 'py')}").glob("test_batch*"))
    os.truncate(file, 50 << 30)  # 50 GiB of nothing
    with pytest.raises(Refusal, match=r"test_batch.* has 53,687,091,200 bytes; .* is read up to 1,073,741,824"):
        CIFAR10(Augment(), root=str(tmp_path)).evaluation()


def test_plain_data_is_read_as_it_is(tmp_path: Path) -> None:
    plain = {"a": [1, 2.5, None, True], b"b": (b"c", "d"), 3: {}}
    (tmp_path / "plain").write_bytes(pickle.dumps(plain))
    assert read_plain(tmp_path / "plain") == plain


def test_where_the_files_are_not_it_says_what_to_put_where(tmp_path: Path, monkeypatch: Any) -> None:
    with pytest.raises(Refusal, match=f"{tmp_path} holds no folder cifar-10-batches-py or .*-bin; unpack"):
        CIFAR10(Augment(), root=str(tmp_path))
    (write_ten(tmp_path) / "cifar-10-batches-py" / "data_batch_4").unlink()
    with pytest.raises(Refusal, match="lacks cifar-10-batches-py/data_batch_4: unpack"):
        CIFAR10(Augment(), root=str(tmp_path))

    def unreachable(cache: Path) -> None:
        raise OSError("no route to host")

    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    monkeypatch.setattr(CIFAR100, "_download", staticmethod(unreachable))
    with pytest.raises(Refusal, match=r"CIFAR-100 is not on this machine .*no route.* unpack .*FOLDER/cifar-100"):
        CIFAR100(Augment())
    write_ten(tmp_path / "cache" / "trainer")
    assert len(CIFAR10(Augment()).train()) == 40  # from where a download puts it


WORDS = ("data=cifar10", *SMALL, "loop.global_batch=20", "loop.epochs=4", "schedule=constant", "optimizer=sgd")
MIXED = ("data.augment.mixup=0.4", "data.augment.cutmix=1.0", "data.augment.erase=0.3", "task.label_smoothing=0.1")
COLOURED = ("data.augment.resized_crop=0.5", "data.augment.brightness=0.4", "data.augment.saturation=0.4")
DRAWN = ("data.repeat=3", "data.balance=0.5", "data.image_size=40")


EXTRAS = {"mixed": MIXED, "mixed, coloured and drawn": (*MIXED, *COLOURED, *DRAWN)}


@pytest.mark.parametrize("extra", quickly(EXTRAS))
def test_one_curve_with_mixed_images_and_soft_targets(tmp_path: Path, processes: Processes, extra: str) -> None:
    folders = {name: tmp_path / name for name in ("alone", "slices", "two")}
    start = [f"data.root={write_ten(tmp_path)}", *WORDS, *EXTRAS[extra]]
    assert processes.run(1, product, tmp_path, [*start, f"run.dir={folders['alone']}"]) == [0]
    cut = [*start, f"run.dir={folders['slices']}", "loop.micro_batches=3", "loop.uneven=true"]
    assert processes.run(1, product, tmp_path, cut) == [0]
    two = [*start, f"run.dir={folders['two']}", "strategy=ddp", "loop.micro_batches=2"]
    assert processes.run(2, product, tmp_path, two) == [0, 0]
    for name in ("slices", "two"):
        assert far(curve(folders[name]), curve(folders["alone"])) < 1e-6
        assert curve(folders[name], "sample_digest") == curve(folders["alone"], "sample_digest")
        assert lines(folders[name], "eval")[-1]["samples"] == 20
    said = (folders["alone"] / "logs" / "rank-0.log").read_text()
    assert said.count("is not the published file: its md5 is another one") == 6


def test_a_picture_comes_so_often_in_a_row_and_never_twice_the_same(tmp_path: Path) -> None:
    data = CIFAR10(Augment(crop=4, flip=True), root=str(write_ten(tmp_path)), repeat=3)
    order, train = data.order(0, torch.Generator().manual_seed(0)), data.train()
    rows = order[:39].view(-1, 3)
    assert len(order) == 40
    assert torch.equal(rows % 40, (rows[:, :1] % 40).expand(-1, 3))
    assert torch.equal(rows // 40, torch.arange(3).expand(13, -1))  # numbers of their own
    assert torch.equal(train.batch(rows[0])[0][0], train.batch(rows[0])[0][2])
    assert numbered(torch.tensor([4, 1, 4, 4, 1]), 10).tolist() == [4, 1, 14, 24, 11]


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
