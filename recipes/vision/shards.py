"""Pictures in shards, WebDataset's tars or Parquet, in a folder or below a URL: far more than a disk holds."""

from __future__ import annotations

import io
import math
import re
from functools import cached_property
from typing import Any, Literal

import numpy
import torch
from torch import Tensor

from recipes.shards.blocks import BlockReader, block_of_samples
from recipes.shards.index import ShardIndex, index_place, read_index, read_summary
from recipes.shards.lanes import count_lanes, following_blocks, in_lanes, shuffled
from recipes.shards.remote import DamagedShard, Remote
from recipes.vision.augment import Augment
from recipes.vision.cached import cache_folder
from recipes.vision.decode import Windows
from recipes.vision.decoded import DecodedPictures, LostPictures
from trainer.messages import Refusal, expand_home

_EVALUATION = {"val", "valid", "validation", "test"}  # words of a shard's path: val/000.tar, imagenet-val-000.tar


class Shards(DecodedPictures):
    """Pictures of shards that `scripts/index_shards.py` has indexed, in the order of recipes/shards/lanes.py.

    Shards with `val` or `test` in their path are the evaluation set, else `held_out` of the pictures.
    """

    def __init__(
        self,
        augment: Augment,
        window: Windows,
        root: str,
        image_size: int,
        index: str | None = None,
        cache: str | None = None,
        cache_gb: float = 20.0,
        lanes: int | None = None,
        attempts: int = 6,
        channels: Literal[1, 3] = 3,
        num_classes: int | None = None,
        held_out: float = 0.1,
        on_bad: Literal["raise", "skip"] = "raise",
        bad_budget: float = 0.05,
        eval_image_size: int | None = None,
        image_sizes: list[list[int]] | None = None,
    ) -> None:
        super().__init__(
            augment, window, image_size, eval_image_size, channels, on_bad, bad_budget, 1, 0.0, image_sizes
        )
        for name, value, least in (("lanes", lanes, 1), ("attempts", attempts, 1)):
            if value is not None and value < least:
                raise Refusal(f"data.{name} is {value}; it is {least} or more")
        if not 0 <= held_out <= 0.5:
            raise Refusal(f"data.held_out is {held_out}; it is a fraction of the images, from 0 to 0.5")
        self._root = root if "://" in root else str(expand_home(root).absolute())
        self._remote, self._lanes, self._held_out = Remote(self._root, attempts), lanes, held_out
        self._cache = cache_folder() / "shards" if cache is None else expand_home(cache)
        self._cache_gb = cache_gb
        self._place, self._summary = read_summary(root, index_place(self._root, index, cache_folder()))
        self.class_names = self._summary["class_names"]
        classes = self._summary["num_classes"]
        if num_classes is not None and num_classes < classes:
            raise Refusal(f"data.num_classes={num_classes}, but the shards of {root} have {classes} classes")
        self.num_classes = classes if num_classes is None else num_classes

    def evaluation(self) -> Any:
        """The pictures of the shards for evaluation, or those held out; None where there are none."""
        return super().evaluation() if False in self._splits else None

    def order(self, epoch: int, generator: torch.Generator) -> Tensor:
        """Blocks are shuffled, and the pictures of each; then they come in lanes."""
        return self._splits[True].order(generator)

    def notes(self) -> list[str]:
        """What there is, and in how many lanes it comes."""
        index, lanes = self._index, self._splits[True].lanes
        held_out = f"; no shard is called val, so data.held_out={self._held_out:g} of the pictures is for evaluation"
        return [
            f"{len(index.names):,} shards, {len(index.samples['label']):,} pictures in {len(index.blocks['rows']):,}"
            f" blocks; the order has {lanes} lanes{held_out if self._all_train else ''}"
        ]

    @cached_property
    def _index(self) -> ShardIndex:
        return read_index(self._place, self._summary, self._cache)

    @cached_property
    def _all_train(self) -> bool:
        return not any(_is_evaluation(name) for name in self._index.names)

    @cached_property
    def _splits(self) -> dict[bool, ShardPictures]:
        """The training set, and the evaluation set if there is one."""
        index = self._index
        blocks = block_of_samples(index)  # (N,)
        for_evaluation = torch.tensor([_is_evaluation(name) for name in index.names])
        shard = torch.from_numpy(numpy.ascontiguousarray(index.blocks["shard"]))
        held = for_evaluation[shard][blocks]  # (N,): is a sample for the evaluation?
        if self._all_train and self._held_out:
            every = round(1 / self._held_out)
            held = torch.arange(len(blocks)) % every == every - 1
        reader = self._make_reader(index, len(blocks))
        split: dict[bool, ShardPictures] = {}
        for training in (True, False):
            numbers = (held != training).nonzero().flatten()
            if len(numbers):
                split[training] = ShardPictures(index, reader, blocks, numbers, self._lanes, training)
        if True not in split:
            raise Refusal(f"data.root: all shards of {self._root} are called val or test; none is for training")
        self._refuse_small_cache(index, split[True].lanes)
        return split

    def _sources(self, training: bool) -> ShardPictures:
        return self._splits[training]

    def _make_reader(self, index: ShardIndex, size: int) -> BlockReader:
        return BlockReader(index, self._remote, self._cache, int(self._cache_gb * 1e9))

    def _refuse_small_cache(self, index: ShardIndex, lanes: int) -> None:
        """Refuse a cache that cannot hold a block of each lane, and the next one: all would be read again and again."""
        largest = int(index.block_sizes().max())
        wanted = 2 * lanes * largest / 1e9
        if self._cache_gb < wanted:
            raise Refusal(
                f"data.cache_gb={self._cache_gb:g} is too small: {lanes} lanes × 2 blocks of up to"
                f" {largest / 1e6:.3g} MB are {wanted:.2g} GB; data.cache_gb={_round_up(wanted):g} is"
                " enough, or fewer data.lanes"
            )


class ShardPictures:
    """The pictures of one split, still compressed, and their labels."""

    def __init__(
        self,
        index: ShardIndex,
        reader: BlockReader,
        blocks: Tensor,
        numbers: Tensor,
        lanes: int | None,
        training: bool,
    ) -> None:
        """blocks: of each sample of the index, (N,). numbers: which samples these are, ascending, (n,)."""
        self._index, self._reader = index, reader
        count = len(blocks[numbers].unique_consecutive())
        self.lanes = min(count_lanes(count) if lanes is None else lanes, len(numbers))
        # evaluations read in file order: the file order of this set is in lanes, so that ranks read different blocks
        self._numbers = numbers if training else in_lanes(numbers, self.lanes)
        self._blocks = blocks[self._numbers]  # (n,)
        self.labels = torch.from_numpy(index.samples["label"].astype(numpy.int64))[self._numbers]  # (n,)

    def order(self, generator: torch.Generator) -> Tensor:
        """An epoch's order of these pictures: (n,)."""
        order = shuffled(self._blocks.unique_consecutive(return_inverse=True)[1], self.lanes, generator)
        # for reading ahead only: workers that still read the last epoch may see it
        following = self._reader.following
        following.copy_(following_blocks(self._blocks[order], self.lanes, len(following)))
        return order

    def source(self, at: int) -> Any:
        """The picture's bytes. LostPictures where its shard is missing, or too short."""
        block = int(self._blocks[at])
        try:
            return io.BytesIO(self._reader.read(block, int(self._numbers[at])))
        except DamagedShard as error:
            raise LostPictures(str(error), (self._blocks == block).nonzero().flatten()) from error

    def name(self, at: int) -> str:
        """Which shard, and which picture of it, counted from 0."""
        shards = self._index.blocks["shard"]
        shard = int(shards[int(self._blocks[at])])
        first = int(self._index.blocks["rows"][: int(numpy.searchsorted(shards, shard))].sum())
        return f"{self._index.names[shard]}[{int(self._numbers[at]) - first}]"

    def fingerprint(self) -> str:
        """That of the index, and how many pictures of it these are, in how many lanes."""
        return f"{self._index.digest}-{len(self.labels)}-{self.lanes}"


def _is_evaluation(name: str) -> bool:
    return not _EVALUATION.isdisjoint(re.split(r"[^a-z]+", name.lower()))


def _round_up(gigabytes: float) -> float:
    """To two digits."""
    step = 10.0 ** (math.floor(math.log10(gigabytes)) - 1)
    return math.ceil(gigabytes / step) * step
