"""Seeds and random numbers that are functions of numbers, so that no generator state need be saved.

`mix_seeds` makes one seed of several numbers, `SeededDataset` reads items under seeded generators, and `Random` gives
each sample its own random numbers, from (seed, epoch, sample index). All of it is SplitMix64 (Steele, Lea, Flood 2014):
a counter that grows by the golden ratio, and a mixing of its bits.
"""

from __future__ import annotations

import math
import random
import sys
from collections.abc import Iterable, Iterator
from contextlib import contextmanager, nullcontext
from functools import cache, cached_property
from traceback import format_exception_only
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.utils.data import Dataset, get_worker_info

from trainer.launch.devices import accumulation_dtype, default_generator

GOLDEN = 0x9E3779B97F4A7C15  # 2^64 over the golden ratio: multiples of it lie as evenly as can be
POSITIVE = 2**63 - 1  # all bits but the sign
_FIRST, _SECOND = 0xBF58476D1CE4E5B9, 0x94D049BB133111EB  # the multipliers of the paper
_WORD = 2**64 - 1  # Python's whole numbers have no end: this cuts them to 64 bits


def mix_seeds(*numbers: int) -> int:
    """Hash whole numbers into 63 bits; their order counts."""
    word = 0
    for number in numbers:  # + 1: a zero counts, too
        word = (word + (number + 1) * GOLDEN) & _WORD
        word = ((word ^ (word >> 30)) * _FIRST) & _WORD
        word = ((word ^ (word >> 27)) * _SECOND) & _WORD
        word ^= word >> 31
    return word & POSITIVE


def mix_bits(words: Tensor) -> Tensor:
    """The same mixing for int64 tensors of any shape. torch's shifts keep the sign, so masks remove it."""
    words = ((words >> 30).bitwise_and_(2**34 - 1).bitwise_xor_(words)).mul_(to_int64(_FIRST))
    words = ((words >> 27).bitwise_and_(2**37 - 1).bitwise_xor_(words)).mul_(to_int64(_SECOND))
    return (words >> 31).bitwise_and_(2**33 - 1).bitwise_xor_(words)


def to_int64(word: int) -> int:
    """The same 64 bits as the int64 that torch understands."""
    word &= _WORD
    return word - 2**64 if word > POSITIVE else word


def seed_torch(seed: int, device: torch.device) -> None:
    """Seed torch's generators of the CPU and of the current device; a tenth of the cost of `torch.manual_seed`."""
    # torch.manual_seed asks for every backend that there is, and this runs in each step with dropout
    torch.default_generator.manual_seed(seed)
    if device.type != "cpu":
        torch.get_device_module(device).manual_seed(seed)


def seed_more_gpus(indices: Iterable[int]) -> None:
    """Seed further CUDA GPUs, each differently, from the seed that the CPU's generator was given last."""
    for index in indices:
        default_generator(torch.device("cuda", index)).manual_seed(mix_seeds(torch.initial_seed(), index))


def seed_all(seed: int) -> None:
    """Seed the global generators of Python, torch and, if somebody has imported it, NumPy."""
    random.seed(seed)
    torch.default_generator.manual_seed(seed)
    if "numpy" in sys.modules:
        sys.modules["numpy"].random.seed(seed & 0xFFFFFFFF)


class SeededDataset(Dataset):
    """A data set whose item (epoch, i) is read with all generators (Python, NumPy, torch) seeded from (seed, epoch, i).

    A set with a method `item(index, epoch)` is asked by it: its samples may depend on the epoch (growing images).

    So a random transform changes a sample in the same way on every rank, in every worker, in every order. In the main
    process the generators get their state back afterwards.
    """

    def __init__(self, dataset: Any, seed: int) -> None:
        self._dataset, self._seed = dataset, seed

    def __len__(self) -> int:
        return len(self._dataset)

    def __getitem__(self, at: tuple[int, int]) -> Any:
        epoch, index = at
        # in a worker nothing else uses the generators; in the main process the network may (dropout)
        with preserve_rng_state() if get_worker_info() is None else nullcontext():
            seed_all(mix_seeds(self._seed, epoch, index))
            # an array has another method of that name
            item = None if hasattr(self._dataset, "__array__") else getattr(self._dataset, "item", None)
            try:
                return item(index, epoch) if callable(item) else self._dataset[index]
            except Exception as error:
                if isinstance(error, StopIteration) or not _is_importable(type(error)):
                    # the first would end the epoch without a word, the second never arrive from a worker process
                    what = format_exception_only(error)[-1].strip()
                    raise RuntimeError(f"data: sample {index} raised {what}") from error
                raise


def _is_importable(kind: type) -> bool:
    """Can another process find this class by its name, as pickle does?"""
    return getattr(sys.modules.get(kind.__module__), kind.__qualname__, None) is kind


@contextmanager
def preserve_rng_state() -> Iterator[None]:
    """Give the generators of the CPU their state back at the end."""
    numpy = sys.modules.get("numpy")
    before = random.getstate(), numpy.random.get_state() if numpy else None
    with torch.random.fork_rng(devices=[]):
        try:
            yield
        finally:
            random.setstate(before[0])
            if numpy:
                numpy.random.set_state(before[1])


_SPREAD = 0x9E3779B1 - 2**32  # a prime near 2^32 over the golden ratio, as the int32 that torch understands


class TensorPart(NamedTuple):
    """A part of a larger tensor that a rank draws: some places along one dimension, which is not the batch."""

    dim: int
    places: tuple[range, ...]  # in this order
    size: int  # of the whole dimension


class Random:
    """Random numbers for a batch: each sample has its own, the same bits on every rank, on CPU and GPU.

    Successive calls continue the streams: `uniform(B, 3)` gives the numbers of `uniform(B)` called three times.
    """

    def __init__(self, seed: int, epoch: int, indices: Tensor) -> None:
        self._seed, self._epoch, self._indices = seed, epoch, indices
        self._drawn = 0  # numbers that were drawn for each sample
        self._part: TensorPart | None = None

    def of(self, number: int | Tensor, part: TensorPart | None = None) -> Random:
        """Other random numbers for the same samples, chosen by an int64 number; perhaps of a part of a tensor.

        A part has the numbers that it would have in the whole. A number depends on its place in its sample, not on the
        shape: padding a sample does not change its numbers.
        """
        return DerivedRandom(self._indices, self.starts + number, part)

    @cached_property
    def starts(self) -> Tensor:
        """Where the stream of each sample begins: (B,) int64. Made at the first use, because many batches need none."""
        return mix_bits(self._indices * to_int64(GOLDEN) + mix_seeds(self._seed, self._epoch))

    def uniform(self, *shape: int) -> Tensor:
        """Uniform float32 numbers in [0, 1), multiples of 2^-24; the first dimension is the batch."""
        return (self._words(shape) >> 39).float().mul_(2.0**-24)

    def normal(self, *shape: int) -> Tensor:
        """Standard normal float32 numbers; the first dimension is the batch.

        The quantile function is a table with linear interpolation, because a device's own log and cos may differ in
        their last bit. Cells halve towards the tail: 256 for each power of two of the probability, down to 2^-32.
        """
        drawn = self._words(shape)
        # 33 bits want float64: where the device has none the host computes, and waits for it
        words = drawn if accumulation_dtype(drawn.device) == torch.float64 else drawn.cpu()
        tail, power = torch.frexp(((words >> 31) + 1).double())  # P(|z| > result) = tail · 2^power / 2^32
        place = (tail - 0.5) * 512
        cell = place.floor()
        index = power.long() * 256 + cell.long()
        table = self._quantiles(words.device)
        near, far = table[index], table[index + 1]
        # (B, …): between two entries of the table, with a sign from the lowest bit, which the tail does not use
        magnitude = near + (far - near) * (place - cell).float()
        return (magnitude * (1 - 2 * (words & 1)).float()).to(drawn.device)

    def integers(self, low: int, high: int, *shape: int) -> Tensor:
        """Int64 numbers in [low, high); the first dimension is the batch."""
        if high <= low:
            raise ValueError(f"integers in [{low}, {high}) do not exist")
        return self._words(shape).remainder_(high - low).add_(low)

    def bernoulli(self, p: float, *shape: int) -> Tensor:
        """True with probability p, to 2^-32; the first dimension is the batch.

        Masks are as large as activations, and 64 bits for each element would cost several times what the mask is for.
        So a row (the last dimension) has one word of its stream, and an element 32 bits that are hashed from this word
        and from the element's place in the row.
        """
        batch, *rows, width = shape if len(shape) > 1 else (*shape, 1)
        part = self._part
        of_row = part if part and part.dim == len(rows) + 1 else None
        words = self._bits((batch, *rows, 1), part if of_row is None else None)
        columns = self._row_words(of_row.size if of_row else width)
        columns = columns[self._positions(of_row.places)] if of_row else columns
        # a multiplier and a summand for each row; between two products the high bits come down to the low ones
        bits = (columns + words.int()).mul_(_SPREAD)
        bits = (bits >> 15).bitwise_xor_(bits).mul_((words >> 32).int().bitwise_or_(1))
        return (bits < min(round(p * 2**32), 2**32 - 1) - 2**31).view(shape)

    def _words(self, shape: tuple[int, ...]) -> Tensor:
        """The next 63 random bits for each element of the shape."""
        return self._bits(shape, self._part).bitwise_and_(POSITIVE)

    def _bits(self, shape: tuple[int, ...], part: TensorPart | None) -> Tensor:
        """The next 64."""
        batch = self._indices.shape[0]
        if not shape or shape[0] != batch:
            raise ValueError(f"shape {shape} must begin with the batch of {batch}")
        return mix_bits(self.starts[:, None] + self._places(shape[1:], part)).view(shape)

    # tables, which a compiled graph has in another way (trainer/parallel/rng/compiled_rng.py)

    def _positions(self, places: tuple[range, ...]) -> Tensor:
        """The numbers in these ranges, one after the other: (places,) int64."""
        pieces = [torch.arange(place.start, place.stop, device=self._indices.device) for place in places]
        return pieces[0] if len(pieces) == 1 else torch.cat(pieces)  # only context ranks have several

    def _row_words(self, width: int) -> Tensor:
        return row_words(width, self._indices.device)

    def _quantiles(self, device: torch.device) -> Tensor:
        return quantiles(device)

    def _places(self, shape: tuple[int, ...], part: TensorPart | None) -> Tensor:
        """The distance of each number of a sample from the beginning of its stream: (numbers,) int64."""
        # the counter goes on where the last call ended, so that no two calls share numbers
        first, self._drawn = self._drawn + 1, self._drawn + math.prod(shape)
        return torch.arange(first, self._drawn + 1, device=self._indices.device) * to_int64(GOLDEN)


# the distance between two neighbours along each dimension of a sample: odd numbers of 64 bits
_STRIDES = tuple(to_int64(GOLDEN if dim == 0 else mix_seeds(dim) * 2 + 1) for dim in range(16))


class DerivedRandom(Random):
    """The streams of `Random.of`, for one draw."""

    def __init__(self, indices: Tensor, start: Tensor, part: TensorPart | None) -> None:
        super().__init__(0, 0, indices)
        self.starts, self._part = start, part

    def _places(self, shape: tuple[int, ...], part: TensorPart | None) -> Tensor:
        # every dimension has its own stride: counted through, a number would move in a wider tensor
        places = torch.full((1,) * len(shape), to_int64(GOLDEN), device=self._indices.device)
        for dim, size in enumerate(shape):
            ranges = part.places if part and part.dim == dim + 1 else (range(size),)
            if ranges == (range(1),):
                continue
            offsets = self._positions(ranges) * _STRIDES[dim]  # (places of this dimension,)
            places = places + offsets.view(-1, *(1,) * (len(shape) - dim - 1))
        return places.flatten()


@cache
def row_words(width: int, device: torch.device) -> Tensor:
    """32 bits for each place of a row: (width,) int32, the same for every row; those of a shorter row are its first."""
    with torch.inference_mode(False):
        return mix_bits(torch.arange(1, width + 1) * to_int64(GOLDEN)).int().to(device)


@cache
def quantiles(device: torch.device) -> Tensor:
    """Half-normal quantiles at the probabilities (0.5 + cell / 512) · 2^(power - 32), at index power · 256 + cell."""
    with torch.inference_mode(False):
        cells = torch.arange(34 * 256 + 1, dtype=torch.float64)
        probability = (0.5 + (cells % 256) / 512) * 2.0 ** (torch.floor(cells / 256) - 32)
        return (-torch.special.ndtri(probability.clamp(max=1.0) / 2)).float().to(device)
