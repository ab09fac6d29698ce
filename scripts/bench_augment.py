"""Measure crop + flip + normalise of 32×32 images: whole batches in memory against per-sample transforms in workers.

Both are run in turn, so that a change in the machine's load meets both; medians and their ratio are printed.
"""

import argparse
import statistics
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import torch
from torch import Tensor
from torch.utils.data import DataLoader, Dataset

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from recipes.vision.augment import Augment, Random
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


def rate(batches: Iterator[None], batch: int, seconds: float) -> float:
    """Samples a second over about that many seconds."""
    begin, count = time.perf_counter(), 0
    while (passed := time.perf_counter() - begin) < seconds:
        next(batches)
        count += batch
    return count / passed


def main() -> None:
    """Print the medians of both ways and how many times faster the batched one is."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--samples", type=int, default=10_000, help="images in the set")
    parser.add_argument("--batch", type=int, nargs="+", default=[128, 512], help="batch sizes of the batched way")
    parser.add_argument("--rounds", type=int, default=5, help="turns of each way")
    parser.add_argument("--seconds", type=float, default=1.0, help="length of a turn")
    parser.add_argument("--threads", type=int, default=2, help="threads of the batched way")
    parser.add_argument("--workers", type=int, default=2, help="worker processes of the per-sample way")
    args = parser.parse_args()
    torch.set_num_threads(args.threads)
    keep_freed_memory()  # as a run does
    images = torch.randint(0, 256, (args.samples, 3, 32, 32), dtype=torch.uint8)
    labels = torch.randint(0, 10, (args.samples,))
    ways = {f"batched, {size} at a time": (batched(images, labels, size), size) for size in args.batch}
    slow = f"per sample, {args.workers} workers"
    ways[slow] = (per_sample(images, labels, 128, args.workers), 128)
    rates: dict[str, list[float]] = {name: [] for name in ways}
    for turn in range(args.rounds + 1):  # the first turn warms up
        for name, (batches, size) in ways.items():
            measured = rate(batches, size, args.seconds)
            if turn:
                rates[name].append(measured)
    base = statistics.median(rates[slow])
    for name, measured_rates in rates.items():
        median = statistics.median(measured_rates)
        print(f"{name:28} {median:12,.0f} samples/s {median / base:8.1f} times")


if __name__ == "__main__":
    main()
