"""The sets of images: what they hold, and what they say of files that are not theirs."""

import fcntl
import gzip
import multiprocessing
import os
import struct
import sys
from pathlib import Path

import pytest
import torch

from recipes.vision import fashion_mnist
from recipes.vision.augment import Augment, Random
from recipes.vision.decode import Windows
from recipes.vision.digits import Digits
from recipes.vision.fashion_mnist import FashionMNIST
from recipes.vision.huggingface import HuggingFaceImages
from recipes.vision.idx import read_idx
from recipes.vision.images import Images
from recipes.vision.synthetic import SyntheticImages
from trainer.messages import Refusal

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
        (gzip.compress(b"1,2\n1\n"), "expected 1797 lines"),
        (gzip.compress(b"a,b\n"), "invalid literal"),
        (gzip.compress(b"\xff\xfe"), "ascii"),
        (gzip.compress((",".join(["17"] * 65) + "\n").encode() * 1797), "out of range"),
        (gzip.compress(b"0,1\n" * 99)[:-12], "expected 1797 lines"),
    ],
    ids=lambda value: value if isinstance(value, str) else "file",
)
def test_a_file_that_holds_no_digits_is_refused(tmp_path, content, words):
    file = tmp_path / "digits.csv.gz"
    if content is not None:
        file.write_bytes(content)
    with pytest.raises(Refusal, match=words) as refusal:
        Digits(PLAIN, file=str(file))
    assert str(file) in str(refusal.value)
    assert "1797 lines of 64 values" in str(refusal.value)


def test_idx_gives_back_what_was_written(tmp_path):
    array = torch.randint(0, 256, (5, 28, 28))
    (tmp_path / "a.gz").write_bytes(gzip.compress(idx(array)))
    assert torch.equal(read_idx(tmp_path / "a.gz", 28, 28).long(), array)
    (tmp_path / "b.gz").write_bytes(gzip.compress(idx(torch.empty(0, 28, 28))))
    assert read_idx(tmp_path / "b.gz", 28, 28).shape == (0, 28, 28)


WHOLE = idx(torch.zeros(3, 28, 28))


@pytest.mark.parametrize(
    ("content", "words"),
    [
        (None, "is missing"),
        (WHOLE, "damaged or cut short"),
        (gzip.compress(os.urandom(4000))[:-1500], "damaged or cut short"),
        (gzip.compress(WHOLE)[:-9], "damaged or cut short"),
        (gzip.compress(WHOLE[:-1]), "holds 2351 bytes behind its header, which announces 2352"),
        (gzip.compress(WHOLE + b"x"), "holds 2353 bytes"),
        (gzip.compress(WHOLE[:10]), "ends within its header"),
        (gzip.compress(idx(torch.zeros(3))), "begins with 0x00000801"),
        (gzip.compress(idx(torch.zeros(3, 28, 28), kind=13)), "begins with 0x00000d03"),
        (gzip.compress(idx(torch.zeros(3, 32, 32))), "holds 3 × 32 × 32"),
    ],
    ids=lambda value: value if isinstance(value, str) else "file",
)
def test_a_file_that_is_no_idx_file_is_refused(tmp_path, content, words):
    file = tmp_path / "train-images-idx3-ubyte.gz"
    if content is not None:
        file.write_bytes(content)
    with pytest.raises(Refusal, match=words) as refusal:
        read_idx(file, 28, 28)
    assert str(file) in str(refusal.value)
    assert "N × 28 × 28 (magic number 0x00000803)" in str(refusal.value)


def test_fashion_mnist_from_a_folder(tmp_path):
    data = FashionMNIST(PLAIN, root=str(write_fashion(tmp_path)))
    assert (len(data.train()), len(data.evaluation())) == (20, 10)
    inputs, targets = data.train().batch(torch.tensor([3, 13]))
    assert inputs.shape == (2, 1, 28, 28)
    assert targets.tolist() == [3, 3]
    assert targets.dtype == torch.long
    assert data.train() is data.train()  # read once


def test_fashion_mnist_says_which_files_a_folder_lacks(tmp_path):
    write_fashion(tmp_path)
    (tmp_path / "t10k-labels-idx1-ubyte.gz").unlink()
    with pytest.raises(Refusal, match=f"{tmp_path} lacks t10k-labels-idx1-ubyte.gz; .* is train-images"):
        FashionMNIST(PLAIN, root=str(tmp_path))


def test_fashion_mnist_files_must_belong_together(tmp_path):
    write_fashion(tmp_path)
    (tmp_path / "train-labels-idx1-ubyte.gz").write_bytes(gzip.compress(idx(torch.zeros(19))))
    with pytest.raises(Refusal, match=r"20 images, but .* 19 labels"):
        FashionMNIST(PLAIN, root=str(tmp_path)).train()
    (tmp_path / "train-labels-idx1-ubyte.gz").write_bytes(gzip.compress(idx(torch.full((20,), 11))))
    with pytest.raises(Refusal, match=r"label 11; expected 0\.\.9"):
        FashionMNIST(PLAIN, root=str(tmp_path)).train()


@pytest.mark.parametrize("error", [RuntimeError("Error downloading x:\nno route"), TimeoutError("timed out")])
def test_an_unreachable_download_says_where_the_files_go(tmp_path, monkeypatch, error):
    def unreachable(cache):
        raise error

    monkeypatch.setattr(fashion_mnist, "_DEBIAN", tmp_path / "no package")
    monkeypatch.setattr(fashion_mnist, "_download", unreachable)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    with pytest.raises(Refusal, match="cannot be downloaded") as refusal:
        FashionMNIST(PLAIN)
    message = str(refusal.value)
    assert "\n" not in message
    assert "data.root=FOLDER" in message
    assert all(f"{part}-ubyte.gz" in message for part in ("train-images-idx3", "t10k-labels-idx1"))


def _construct(cache, done):
    """In a process of its own: the set from the cache of downloads."""
    os.environ["XDG_CACHE_HOME"] = cache
    fashion_mnist._DEBIAN = Path(cache) / "no package"
    done.put(str(FashionMNIST(PLAIN).folder))


@pytest.mark.long
def test_a_download_waits_for_that_of_another_process(tmp_path):
    (tmp_path / "trainer").mkdir()
    context = multiprocessing.get_context("spawn")
    done = context.Queue()
    with (tmp_path / "trainer" / ".lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        other = context.Process(target=_construct, args=(str(tmp_path), done))
        other.start()
        folder = tmp_path / "trainer" / "FashionMNIST" / "raw"
        folder.mkdir(parents=True)
        write_fashion(folder)
    assert done.get(timeout=60) == str(folder)
    other.join()
    assert other.exitcode == 0


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


def synthetic(**changes):
    facts = {"size": 64, "evaluation_size": 32, "num_classes": 4, "channels": 3, "image_size": 10}
    return SyntheticImages(PLAIN, **facts | changes)


def test_synthetic_images_follow_from_their_seed():
    first, again, other = synthetic(), synthetic(), synthetic(seed=1)
    assert torch.equal(first.train().images, again.train().images)
    assert torch.equal(first.evaluation().labels, again.evaluation().labels)
    assert not torch.equal(first.train().images, other.train().images)
    assert first.train().images.shape == (64, 3, 10, 10)
    assert first.train().labels.max() < 4
    assert synthetic(evaluation_size=0).evaluation() is None


@pytest.mark.parametrize("learnable", [True, False])
def test_synthetic_classes_differ_where_learnable(learnable):
    data = synthetic(size=512, evaluation_size=256, learnable=learnable)
    train, evaluation = data.train(), data.evaluation()
    centres = torch.stack([train.images[train.labels == label].float().mean(0) for label in range(4)])
    distances = (evaluation.images.float()[:, None] - centres).flatten(2).norm(dim=2)
    accuracy = (distances.argmin(1) == evaluation.labels).float().mean()
    assert accuracy > 0.9 if learnable else accuracy < 0.5
