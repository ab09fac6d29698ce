"""The sets of images: what they hold, and what they say of files that are not theirs."""

import gzip
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
from recipes.vision.synthetic import SyntheticImages
from trainer import Refusal

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


def test_fashion_mnist_from_a_folder(tmp_path):
    data = FashionMNIST(PLAIN, root=str(write_fashion(tmp_path)))
    assert (len(data.train()), len(data.evaluation())) == (20, 10)
    inputs, targets = data.train().batch(torch.tensor([3, 13]))
    assert inputs.shape == (2, 1, 28, 28)
    assert targets.tolist() == [3, 3]
    assert targets.dtype == torch.long


def test_files_that_are_none_of_fashion_mnist_are_refused(tmp_path):
    labels = write_fashion(tmp_path) / "train-labels-idx1-ubyte.gz"
    for content, said in (
        (gzip.compress(idx(torch.zeros(19))), r"20 images, but .* 19 labels"),
        (gzip.compress(idx(torch.full((20,), 11))), r"label 11; expected 0\.\.9"),
    ):
        labels.write_bytes(content)
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
