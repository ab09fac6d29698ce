"""The files of CIFAR-10 and Fashion-MNIST with few pictures: each class a coarse pattern of its own, in much noise."""

from __future__ import annotations

import gzip
import pickle
from pathlib import Path

import numpy
import torch

from tests.recipes.test_vision_data import idx

TRAINED = {"cifar10": 5 * 77, "fashion_mnist": 401}  # pictures; as in real sets, more than whole batches
TESTED = {"cifar10": 100, "fashion_mnist": 101}


def write(place: Path) -> Path:
    """Both sets, where torchvision looks for them below `place`."""
    draw = numpy.random.default_rng(0)
    patterns = draw.integers(60, 196, (10, 3, 8, 8))

    def pictures(count: int, colours: int, side: int) -> tuple[numpy.ndarray, numpy.ndarray]:
        """(count, colours, side, side) bytes, and their labels (count,)."""
        labels = draw.integers(0, 10, count)
        coarse = numpy.kron(patterns[labels, :colours, : side // 4, : side // 4], numpy.ones((1, 1, 4, 4)))
        noisy = coarse + draw.normal(0, 90, (count, colours, side, side))
        return noisy.clip(0, 255).astype(numpy.uint8), labels.astype(numpy.uint8)

    cifar = place / "cifar-10-batches-py"
    cifar.mkdir()
    fifth = TRAINED["cifar10"] // 5
    for name, count in [*((f"data_batch_{part}", fifth) for part in range(1, 6)), ("test_batch", TESTED["cifar10"])]:
        images, labels = pictures(count, 3, 32)
        (cifar / name).write_bytes(pickle.dumps({"data": images.reshape(count, -1), "labels": labels.tolist()}))
    clothes = place / "FashionMNIST" / "raw"
    clothes.mkdir(parents=True)
    for part, count in (("train", TRAINED["fashion_mnist"]), ("t10k", TESTED["fashion_mnist"])):
        images, labels = pictures(count, 1, 28)
        # torchvision reads the files as they are, ours are compressed
        for name, content in ((f"{part}-images-idx3-ubyte", images[:, 0]), (f"{part}-labels-idx1-ubyte", labels)):
            (clothes / name).write_bytes(idx(torch.from_numpy(content)))
            (clothes / f"{name}.gz").write_bytes(gzip.compress((clothes / name).read_bytes()))
    return place
