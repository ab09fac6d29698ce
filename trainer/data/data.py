"""Where samples come from: `Data`, which a lab writes, and a fingerprint that tells one data set from another."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from copy import copy
from dataclasses import fields, is_dataclass
from hashlib import sha256
from inspect import signature
from typing import TYPE_CHECKING, Any

import numpy
import torch
from torch import Tensor
from torch.utils.data import Dataset, default_collate

from trainer.data.rng import SeededDataset, mix_seeds, preserve_rng_state, seed_all
from trainer.messages import Refusal

if TYPE_CHECKING:
    from trainer.data.rng import Random


from dataclasses import dataclass, field

from torch import nn

_ITEMS = 8  # items in a fingerprint, from the first to the last of the set
_READINGS = 3  # of each of them, under different seeds: what then differs is random


def fingerprint_items(dataset: Any) -> str:
    """16 hex digits from the length and some items of a map-style data set; empty where its items cannot be read.

    What is random in an item (augmentation, noise) is found by reading it again, and left out. Floating-point numbers
    count with four digits of their mean magnitude, since another processor may compute them with other last bits.
    """
    size = len(dataset)
    indices = sorted({at * (size - 1) // (_ITEMS - 1) for at in range(_ITEMS)}) if size else []
    # of a copy: a file that the first item opens must not be open in workers that are forked later
    try:
        read = _make_item_reader(copy(dataset))
        with preserve_rng_state():
            readings = [[_read_leaves(read, index, seed) for index in indices] for seed in range(_READINGS)]
    except Exception:  # whatever it is, training meets it too and has a better message
        return ""
    # a value that is random in one item counts as random in all: eight coins may fall alike, but not three times each
    random_places = {
        place
        for first, *others in zip(*readings, strict=True)
        for other in others
        for place in first.keys() | other.keys()
        if first.get(place) != other.get(place)
    }
    digest = sha256(str(size).encode())
    for leaves in readings[0]:
        for place in sorted(leaves.keys() - random_places):
            digest.update(f"{place}\0".encode() + leaves[place])
    return digest.hexdigest()[:16]


class ReadTwice(Dataset):
    """For each index of a set, whether its item is another one when it is read again with the same seeds."""

    def __init__(self, dataset: Any, seed: int) -> None:
        # a copy: a file that an item opens must not be open in workers that are forked later
        self._dataset, self._seed = copy(dataset), seed

    def __getitem__(self, index: int) -> bool:
        seeded, batch = SeededDataset(self._dataset, self._seed), find_batch_method(self._dataset)
        read = (lambda at: batch(torch.tensor([at]))) if batch else (lambda at: seeded[0, at])
        try:
            with preserve_rng_state():
                one, other = (dict(_leaves(_seeded(read, index, self._seed), "", exact=True)) for _ in range(2))
        except Exception:  # whatever it is, training meets it too and has a better message
            return False
        return one != other


def _make_item_reader(dataset: Any) -> Callable[[int], Any]:
    """What reads one item; as a batch of one, if the set is read in whole batches."""
    batch = find_batch_method(dataset)
    return (lambda index: batch(torch.tensor([index]))) if batch else dataset.__getitem__


def find_batch_method(dataset: Any) -> Callable[[Tensor], Any] | None:
    """The method `batch(indices)` of a set that is read in whole batches; None if it is read item by item."""
    batch = getattr(dataset, "batch", None)
    # Hugging Face's sets have a batch(batch_size), which makes another set
    is_ours = callable(batch) and "batch_size" not in signature(batch).parameters
    return batch if is_ours else None


def _read_leaves(read: Callable[[int], Any], index: int, seed: int) -> dict[str, bytes]:
    return dict(_leaves(_seeded(read, index, seed), ""))  # what is random in an item differs between seeds, and shows


def _seeded(read: Callable[[int], Any], index: int, seed: int) -> Any:
    seed_all(mix_seeds(seed, index))
    return read(index)


def _leaves(item: Any, place: str, exact: bool = False) -> Iterator[tuple[str, bytes]]:
    """Every value of an item by its place there, as bytes; what has no values that one can see is left out."""
    if isinstance(item, (bytes, str, int, type(None))):
        yield place, repr(item).encode()
    elif isinstance(item, Mapping):
        yield from (leaf for key in item for leaf in _leaves(item[key], f"{place}.{key}", exact))
    elif isinstance(item, (list, tuple)):
        yield from (leaf for key, value in enumerate(item) for leaf in _leaves(value, f"{place}.{key}", exact))
    elif is_dataclass(item) and not isinstance(item, type):
        names = [field.name for field in fields(item)]
        yield from (leaf for name in names for leaf in _leaves(getattr(item, name), f"{place}.{name}", exact))
    elif isinstance(item, (float, Tensor)) or hasattr(item, "__array__") or hasattr(item, "__array_interface__"):
        yield place, _array_bytes(item, exact)  # an image of PIL is decoded here


def _array_bytes(item: Any, exact: bool) -> bytes:
    """The kind, the shape and the values of an array; of floating-point numbers, if not exact, their mean alone."""
    if isinstance(item, Tensor):
        item = item.detach().cpu()
        item = item.float() if item.is_floating_point() else item  # numpy has no bfloat16
    values = numpy.ascontiguousarray(item)
    if values.dtype.hasobject:
        content = b""  # addresses, which are different in each process
    elif values.dtype.kind in "fc" and not exact:
        content = f"{numpy.abs(values).mean(dtype=numpy.float64):.4g}".encode() if values.size else b""
    else:
        content = values.tobytes()
    return f"{values.dtype.kind}{values.shape}".encode() + content


class Data:
    """A training set and an evaluation set, and how their batches are made. Only `train` is required.

    Data sets are map-style: `len(dataset)`, and `dataset[i]` returns (input, target). If one also has
    `batch(indices) -> (inputs, targets)`, whole batches are read at once instead of item by item; so are the rows of a
    `TensorDataset` with the default `collate`. If it has `item(index, epoch)`, that is called instead of `dataset[i]`.
    """

    # mix(inputs, targets, other_inputs, other_targets, random) → (inputs, targets): combines each augmented training
    # sample with its partner, the sample half a global batch later (mixup). A method, or None: no partners.
    mix: Callable[[Any, Any, Any, Any, Random], tuple[Any, Any]] | None = None
    largest_epoch: int = 0  # the epoch whose samples are largest, for plans of memory; with `item` they may grow
    class_names: Sequence[str] = ()  # names of the classes, in the order of their numbers; empty: unknown

    def train(self) -> Dataset:
        """The training set."""
        raise NotImplementedError(f"{type(self).__name__} must give its training set: def train(self)")

    def evaluation(self) -> Dataset | None:
        """The evaluation set; None: nothing is evaluated."""
        return None

    def plain_train(self) -> Dataset:
        """The training set for `job.split=train`: each sample once, without random changes; default: `train`."""
        return self.train()

    def inputs(self, where: str) -> Dataset:
        """New samples for `job=predict job.inputs=WHERE`, prepared as the evaluation set is; Refusal: there are none.

        Items are (input, 0), or (anything of its shape, 1) where it cannot be read. The set also has `name(i)`, and
        `error(i)`: a sentence that says what is wrong with that one. Default: Refusal.
        """
        raise Refusal(
            f"job.inputs={where}: {type(self).__name__} does not say how new inputs are read: def inputs(self, where)."
            " job.split=evaluation and train are the sets of the data itself"
        )

    def collate(self, items: list[Any]) -> Any:
        """Make one batch of the items of a data set."""
        return default_collate(items)

    def augment(self, inputs: Any, targets: Any, random: Random, training: bool) -> tuple[Any, Any]:
        """Change a whole batch on its device; numbers of `random` depend only on (seed, epoch, sample index)."""
        return inputs, targets

    def preparation(self) -> Preparation | None:
        """What an evaluation does with a sample, as a module that an exported program can contain (`job.prepared`).

        Default: None, this data cannot say it. Who overrides `augment` or `collate` overrides this as well.
        """
        return None

    def as_pictures(self, inputs: Any) -> Tensor | None:
        """The inputs of a batch as pictures to look at: (B, C, H, W), 0 black to 1 white; None: they are no images.

        The default takes a tensor of that shape, and scales it from its smallest to its largest value.
        """
        if not isinstance(inputs, Tensor) or inputs.dim() != 4 or not inputs.numel():
            return None
        low, high = inputs.min(), inputs.max()  # of the whole batch, so that images stay comparable
        return (inputs - low) / (high - low).clamp_min(1e-12)

    def as_words(self, targets: Any) -> list[str]:
        """A short text for each target or prediction, to show below its picture; an empty list: none.

        The default is for one number for each sample, (B,): the number, or the class name if there are `class_names`.
        """
        if not isinstance(targets, Tensor) or targets.dim() != 1:
            return []
        if targets.is_floating_point():
            return [f"{number:.4g}" for number in targets.tolist()]
        names = dict(enumerate(self.class_names))
        return [names.get(number, str(number)) for number in targets.tolist()]

    def fingerprint(self, dataset: Any) -> str:
        """A text that tells one of the two sets from another: a run that resumes with other samples is refused.

        It must be the same in every process, and cheap. Empty: only the number of samples is compared. The default asks
        the set's own `fingerprint()` if it has one, else it takes the length and some items, without what is random.
        """
        method = getattr(dataset, "fingerprint", None)
        return str(method()) if callable(method) else fingerprint_items(dataset)

    def notes(self) -> list[str]:
        """Sentences about this data, printed at the start of a run, after both sets have been read."""
        return []

    def replaced(self) -> list[str]:
        """Names of the samples that could not be read and were replaced; printed at the end of a run."""
        return []

    def order(self, epoch: int, generator: torch.Generator) -> Tensor:
        """The epoch's global indices (weighted sampling, a curriculum); default: a permutation of the training set.

        The generator is seeded from (seed, epoch), equal on every rank. The order may repeat samples and have any
        length, the same in every epoch. It follows from both arguments alone, or it is refused.
        """
        # (N,); an equal generator on every rank gives an equal order, and nothing need be sent
        return torch.randperm(len(self.train()), generator=generator)  # type: ignore[arg-type]


@dataclass(frozen=True)
class Preparation:
    """A module that prepares raw inputs as an evaluation prepares its samples; an exported program contains it.

    `torch.export` must be able to follow the module, for any number of samples.
    """

    module: nn.Module  # raw inputs → inputs of the network
    example: Any  # raw inputs of two samples
    raw: str  # what raw inputs are, for people: "uint8 (B, 3, H, W)"
    ready: str  # what the module makes of them, for who prepares by himself
    facts: Mapping[str, Any] = field(default_factory=dict)  # mean, std, image_size, as JSON takes them
