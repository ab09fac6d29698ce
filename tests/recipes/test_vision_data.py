"""The sets of images: what they hold, and what they say of files that are not theirs."""

import gzip
import re
import struct
import sys
from pathlib import Path

import pytest
import torch

from recipes.vision.augment import Augment
from recipes.vision.decode import Windows
from recipes.vision.digits import Digits
from recipes.vision.fashion_mnist import FashionMNIST
from recipes.vision.huggingface import HuggingFaceImages
from recipes.vision.images import Images
from recipes.vision.synthetic import SyntheticImages
from trainer import Refusal
from trainer.data.rng import Random

PLAIN = Augment()
INSTALLED = Path("/usr/share/datasets/fashion-mnist")


def idx(array, kind=8):
    header = struct.pack(">HBB", 0, kind, array.dim()) + struct.pack(f">{array.dim()}I", *array.shape)
    return header + bytes(array.long().flatten().tolist())


def write_fashion(folder, train=20, test=10):
    generator = torch.Generator().manual_seed(0)
    for part, count in (("train", train), ("t10k", test)):
        images = torch.randint(0, 256, (count, 28, 28), generator=generator)
        labels = torch.arange(count) % 10
        (folder / f"{part}-images-idx3-ubyte.gz").write_bytes(gzip.compress(idx(images)))
        (folder / f"{part}-labels-idx1-ubyte.gz").write_bytes(gzip.compress(idx(labels)))
    return folder


def test_a_batch_is_its_items_stacked():
    images = Images(torch.arange(24).view(6, 1, 2, 2), torch.arange(6))
    indices = torch.tensor([4, 0, 4])
    inputs, targets = images.batch(indices)
    items = [images[index] for index in indices.tolist()]
    assert len(images) == 6
    assert torch.equal(inputs, torch.stack([item[0] for item in items]))
    assert torch.equal(targets, torch.stack([item[1] for item in items]))


def test_digits_are_all_there():
    digits = Digits(PLAIN)
    train, evaluation = digits.train(), digits.evaluation()
    assert (len(train), len(evaluation)) == (1437, 360)
    assert train.images.shape[1:] == (1, 8, 8)
    assert train.images.dtype == torch.uint8
    assert (train.images.min(), train.images.max()) == (0, 16)
    assert torch.bincount(torch.cat([train.labels, evaluation.labels])).tolist() == [
        178, 182, 177, 183, 181, 182, 181, 179, 174, 180,
    ]  # fmt: skip
    assert train.images[0, 0, 0].tolist() == [0, 0, 5, 13, 9, 1, 0, 0]
    assert train.labels[:3].tolist() == [0, 1, 2]


def test_digits_are_augmented_only_in_training():
    digits = Digits(Augment(shift=1.0, full_scale=16.0))
    inputs, targets = digits.train().batch(torch.arange(4))
    plain, same = digits.augment(inputs, targets, Random(0, 0, torch.arange(4)), training=False)
    moved, _ = digits.augment(inputs, targets, Random(0, 0, torch.arange(4)), training=True)
    assert torch.allclose(plain, (inputs / 16 - 0.5) / 0.5)
    assert not torch.allclose(plain, moved)
    assert same is targets


@pytest.mark.parametrize(
    ("content", "words"),
    [
        (None, "No such file"),
        (b"1,2,3\n", "Not a gzipped file"),
        (gzip.compress(b"1,2,3\n"), "table of 1 × 3"),
        (gzip.compress((",".join(["17"] * 65) + "\n").encode() * 1797), "out of range"),
    ],
    ids=lambda value: value if isinstance(value, str) else "file",
)
def test_a_file_that_holds_no_digits_is_refused(tmp_path, content, words):
    file = tmp_path / "digits.csv.gz"
    if content is not None:
        file.write_bytes(content)
    with pytest.raises(Refusal, match=rf"{re.escape(str(file))}.*{words}.*1797 lines of 64 values"):
        Digits(PLAIN, file=str(file))


def test_fashion_mnist_from_a_folder(tmp_path):
    data = FashionMNIST(PLAIN, root=str(write_fashion(tmp_path)))
    assert (len(data.train()), len(data.evaluation())) == (20, 10)
    inputs, targets = data.train().batch(torch.tensor([3, 13]))
    assert inputs.shape == (2, 1, 28, 28)
    assert targets.tolist() == [3, 3]
    assert targets.dtype == torch.long


def test_files_that_are_none_of_fashion_mnist_are_refused(tmp_path):
    labels, images = (tmp_path / f"train-{kind}-ubyte.gz" for kind in ("labels-idx1", "images-idx3"))
    whole = idx(torch.zeros(20, 28, 28))
    write_fashion(tmp_path)
    for file, content, said in (
        (labels, gzip.compress(idx(torch.zeros(19))), r"20 images, but .* 19 labels"),
        (labels, gzip.compress(idx(torch.full((20,), 11))), r"label 11; expected 0\.\.9"),
        (images, gzip.compress(whole)[:-9], "damaged or cut short"),
        (images, gzip.compress(whole[:-1]), "holds 15679 bytes behind its header, which announces 15680"),
        (images, gzip.compress(idx(torch.zeros(3, 32, 32))), "holds 3 × 32 × 32"),
    ):
        file.write_bytes(content)
        with pytest.raises(Refusal, match=said):
            FashionMNIST(PLAIN, root=str(tmp_path)).train()
    labels.unlink()
    with pytest.raises(Refusal, match=f"{tmp_path} lacks train-labels-idx1-ubyte.gz; .* is train-images"):
        FashionMNIST(PLAIN, root=str(tmp_path))


@pytest.mark.skipif(not INSTALLED.is_dir(), reason="Debian's package dataset-fashion-mnist is not installed")
def test_fashion_mnist_from_debians_package():
    data = FashionMNIST(PLAIN)
    assert data.folder == INSTALLED
    assert (len(data.train()), len(data.evaluation())) == (60_000, 10_000)
    assert torch.bincount(data.train().labels).tolist() == [6000] * 10
    assert abs(data.train().images.float().mean() / 255 - 0.2860) < 1e-4


def test_without_the_package_of_hugging_face_the_extra_is_named(monkeypatch, tmp_path):
    monkeypatch.setitem(sys.modules, "datasets", None)
    with pytest.raises(Refusal, match=r"needs the package datasets: pip install -e '\.\[hf\]'"):
        HuggingFaceImages(PLAIN, Windows(), path=str(tmp_path), image_size=8)


@pytest.mark.parametrize("learnable", [True, False])
def test_synthetic_images_follow_from_their_seed_and_differ_by_class_where_learnable(learnable):
    def make(**changes):
        facts = {"size": 512, "evaluation_size": 256, "num_classes": 4, "channels": 3, "image_size": 10}
        return SyntheticImages(PLAIN, **facts | {"learnable": learnable} | changes)

    data = make()
    train, evaluation = data.train(), data.evaluation()
    assert torch.equal(train.images, make().train().images)
    assert not torch.equal(train.images, make(seed=1).train().images)
    assert (train.images.shape, int(train.labels.max())) == ((512, 3, 10, 10), 3)
    assert make(evaluation_size=0).evaluation() is None
    centres = torch.stack([train.images[train.labels == label].float().mean(0) for label in range(4)])
    distances = (evaluation.images.float()[:, None] - centres).flatten(2).norm(dim=2)
    accuracy = (distances.argmin(1) == evaluation.labels).float().mean()
    assert accuracy > 0.9 if learnable else accuracy < 0.5
