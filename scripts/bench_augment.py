"""Measure crop + flip + normalise of 32×32 images: whole batches in memory against per-sample transforms in workers.

With --decode: images a second of one core, from JPEGs in memory to normalised batches, beside torchvision's transforms.
The ways are run in turn, so that a change in the machine's load meets all; medians and their ratio are printed.
"""

import argparse
import io
import random
import statistics
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import torch
from torch import Tensor
from torch.utils.data import DataLoader, Dataset

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from recipes.vision.augment import Augment, Random
from recipes.vision.decode import Windows, decode
from recipes.vision.images import Images
from trainer.jobs.out_of_memory import keep_freed_memory

MEAN, STD = (0.4914, 0.4822, 0.4465), (0.2470, 0.2435, 0.2616)


class PerSample(Dataset):
    """What a torchvision data set does: each image through PIL, alone."""

    def __init__(self, images: Tensor, labels: Tensor) -> None:
        from torchvision import transforms

        self.images, self.labels = images.permute(0, 2, 3, 1).contiguous().numpy(), labels.tolist()
        self.transform = transforms.Compose(
            [
                transforms.RandomCrop(32, padding=4),
                transforms.RandomHorizontalFlip(),
                transforms.ToTensor(),
                transforms.Normalize(MEAN, STD),
            ]
        )

    def __len__(self) -> int:
        return len(self.labels)

    def __getitem__(self, index: int) -> tuple[Tensor, int]:
        from PIL import Image

        return self.transform(Image.fromarray(self.images[index])), self.labels[index]


def per_sample(images: Tensor, labels: Tensor, batch: int, workers: int) -> Iterator[None]:
    """One epoch after another through a DataLoader; yields after each batch."""
    loader = DataLoader(
        PerSample(images, labels), batch, shuffle=True, num_workers=workers, persistent_workers=workers > 0
    )
    while True:
        for _ in loader:
            yield


def batched(images: Tensor, labels: Tensor, batch: int) -> Iterator[None]:
    """One epoch after another, gathered and augmented a batch at a time; yields after each batch."""
    dataset, augment, epoch = Images(images, labels), Augment(crop=4, flip=True, mean=MEAN, std=STD), 0
    while True:
        epoch += 1
        order = torch.randperm(len(dataset))
        for start in range(0, len(order) - batch + 1, batch):
            indices = order[start : start + batch]
            inputs, _ = dataset.batch(indices)
            augment(inputs, Random(0, epoch, indices), training=True)
            yield


def rate(batches: Iterator[None], batch: int, seconds: float, clock: Callable[[], float]) -> float:
    """Samples a second over about that many seconds of this clock."""
    begin, count = clock(), 0
    while (passed := clock() - begin) < seconds:
        next(batches)
        count += batch
    return count / passed


PHOTO_MEAN, PHOTO_STD = (0.485, 0.456, 0.406), (0.229, 0.224, 0.225)
ROUND = 64  # JPEGs of a set, and images of a batch


def jpegs(width: int, height: int) -> list[bytes]:
    """JPEGs of quality 90, waves with noise: of 500×375 pixels as many bytes as ImageNet's have in the mean, 110 kB."""
    import numpy
    from PIL import Image

    noise, files = numpy.random.default_rng(0), []
    rows, columns = numpy.mgrid[0:height, 0:width]
    for at in range(ROUND):
        waves = [128 + 60 * numpy.sin(columns / (20 + at) + rows / (30 + at) + colour) for colour in range(3)]
        pixels = numpy.stack(waves, -1) + noise.normal(0, 26, (height, width, 3))
        file = io.BytesIO()
        Image.fromarray(pixels.clip(0, 255).astype("uint8")).save(file, "JPEG", quality=90)
        files.append(file.getvalue())
    return files


def decoded(files: list[bytes], size: int, draft: bool) -> Iterator[None]:
    """As a worker process decodes a batch and the device augments it, both on this core; yields after each batch."""
    window, epoch, indices = Windows(draft=draft), 0, torch.arange(ROUND)
    augment = Augment(flip=True, mean=PHOTO_MEAN, std=PHOTO_STD)
    while True:
        epoch += 1
        pictures = [decode(io.BytesIO(file), size, 3, window.training, draft) for file in files]
        augment(torch.stack(pictures), Random(0, epoch, indices), training=True)
        yield


def transformed(files: list[bytes], size: int) -> Iterator[None]:
    """As torchvision's ImageFolder and transforms do it; yields after each batch."""
    from PIL import Image
    from torchvision import transforms

    transform = transforms.Compose(
        [
            transforms.RandomResizedCrop(size),
            transforms.RandomHorizontalFlip(),
            transforms.ToTensor(),
            transforms.Normalize(PHOTO_MEAN, PHOTO_STD),
        ]
    )
    while True:
        torch.stack([transform(Image.open(io.BytesIO(file)).convert("RGB")) for file in files])
        yield


def main_decode(rounds: int, seconds: float) -> None:
    """Print a line for each size of the files, size of the images and way."""
    torch.set_num_threads(1)
    random.seed(0)
    for width, height in ((500, 375), (2000, 1500)):
        files = jpegs(width, height)
        kilobytes = sum(map(len, files)) / len(files) / 1e3
        for size in (224, 160):
            ways = {
                "torchvision": transformed(files, size),
                "draft=false": decoded(files, size, draft=False),
                "draft=true": decoded(files, size, draft=True),
            }
            # the time that this process had a core: others on a busy machine do not count
            batches = {name: (way, ROUND) for name, way in ways.items()}
            found = medians(batches, rounds, seconds, time.process_time)
            for name, median in found.items():
                kind, times = f"{width}×{height}, {kilobytes:.0f} kB → {size}", median / found["torchvision"]
                print(f"{kind:26} {name:12} {median:8,.0f} images/s of one core {times:6.2f} times")


def medians(
    ways: dict[str, tuple[Iterator[None], int]], rounds: int, seconds: float, clock: Callable[[], float]
) -> dict[str, float]:
    """Samples a second of each way, which yields after so many samples; the first turn warms up."""
    rates: dict[str, list[float]] = {name: [] for name in ways}
    for turn in range(rounds + 1):
        for name, (batches, size) in ways.items():
            measured = rate(batches, size, seconds, clock)
            if turn:
                rates[name].append(measured)
    return {name: statistics.median(measured) for name, measured in rates.items()}


def main() -> None:
    """Read the arguments, and measure."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--samples", type=int, default=10_000, help="images in the set")
    parser.add_argument("--batch", type=int, nargs="+", default=[128, 512], help="batch sizes of the batched way")
    parser.add_argument("--rounds", type=int, default=5, help="turns of each way")
    parser.add_argument("--seconds", type=float, default=1.0, help="length of a turn")
    parser.add_argument("--threads", type=int, default=2, help="threads of the batched way")
    parser.add_argument("--workers", type=int, default=2, help="worker processes of the per-sample way")
    parser.add_argument("--decode", action="store_true", help="JPEGs of 500×375 and 2000×1500 pixels, on one core")
    args = parser.parse_args()
    if args.decode:
        main_decode(args.rounds, args.seconds)
    else:
        main_in_memory(args)


def main_in_memory(args: argparse.Namespace) -> None:
    """Print the medians of both ways and how many times faster the batched one is."""
    torch.set_num_threads(args.threads)
    keep_freed_memory()  # as a run does
    images = torch.randint(0, 256, (args.samples, 3, 32, 32), dtype=torch.uint8)
    labels = torch.randint(0, 10, (args.samples,))
    ways = {f"batched, {size} at a time": (batched(images, labels, size), size) for size in args.batch}
    slow = f"per sample, {args.workers} workers"
    ways[slow] = (per_sample(images, labels, 128, args.workers), 128)
    found = medians(ways, args.rounds, args.seconds, time.perf_counter)
    for name, median in found.items():
        print(f"{name:28} {median:12,.0f} samples/s {median / found[slow]:8.1f} times")


if __name__ == "__main__":
    main()
