"""The samples of an index, read: from files in place, or block by block through the cache, a block ahead."""

from __future__ import annotations

import os
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path
from zlib import crc32

import numpy
import torch
from torch import Tensor

from recipes.shards.cache import BlockCache
from recipes.shards.index import ShardIndex
from recipes.shards.remote import DamagedShard, Remote
from recipes.shards.scan import open_parquet, read_pictures
from trainer.messages import BadData, first_line

_AHEAD = 4  # blocks that a process fetches ahead at the same time


class BlockReader:
    """Reads samples by their number in the index."""

    def __init__(self, index: ShardIndex, remote: Remote, cache: Path, limit: int) -> None:
        """limit: bytes of the cache."""
        self._index, self._remote = index, remote
        self._cache = BlockCache(cache / index.digest, limit)
        self._sizes = index.block_sizes()
        # (K,): which block is likely to be read after each, the same memory in every worker process; -1: unknown
        self.following = torch.full((len(self._sizes),), -1).share_memory_()
        self._threads: tuple[int, ThreadPoolExecutor] | None = None  # of the process that has this id

    def read(self, block: int, sample: int) -> bytes:
        """The bytes of a sample. DamagedShard where its block, ValueError where it alone is not what was indexed."""
        start, size, crc = (int(self._index.samples[name][sample]) for name in ("start", "size", "crc"))
        if self._in_place(block):
            content = self._fetch_range(block, start, size)
        else:
            content = self._through_cache(block, start, size)
            self._fetch_ahead(int(self.following[block]))
        if crc32(content) != crc:
            self._cache.remove(block)  # the disk of the cache may be what is damaged
            content = content if self._in_place(block) else self._through_cache(block, start, size)
        if crc32(content) != crc:
            raise ValueError("its bytes are not those that were indexed: damaged, or written anew since")
        return content

    def _in_place(self, block: int) -> bool:
        """Is it read where it lies? A row group of Parquet must be decoded first."""
        return self._remote.is_local and int(self._index.blocks["group"][block]) < 0

    def _through_cache(self, block: int, start: int, size: int) -> bytes:
        # between two lines another process may remove it again, if the cache is very small
        while (content := self._cache.read(block, start, size)) is None:
            self._fill(block, wait=True)
        return content

    def _fill(self, block: int, wait: bool) -> None:
        self._cache.fill(block, int(self._sizes[block]), lambda: self._fetch(block), wait)

    def _fetch(self, block: int) -> bytes:
        """All bytes of a block. DamagedShard where they cannot be had."""
        group, size = int(self._index.blocks["group"][block]), int(self._sizes[block])
        if group < 0:
            return self._fetch_range(block, 0, size)
        name = self._name(block)
        with self._explained(name):
            content = self._remote.insist(name, lambda: self._read_row_group(name, group))
        if len(content) != size:
            raise DamagedShard(f"{self._remote.root}/{name} is not what was indexed: it has been written anew since")
        return content

    def _read_row_group(self, name: str, group: int) -> bytes:
        import pyarrow

        try:
            with open_parquet(self._remote, name) as file:
                return b"".join(read_pictures(file, group, self._index.columns[0]))
        except (pyarrow.ArrowInvalid, IndexError) as error:  # no second attempt: the bytes came, and are no Parquet
            raise DamagedShard(f"{self._remote.root}/{name} is damaged: {error}") from error

    def _fetch_range(self, block: int, start: int, size: int) -> bytes:
        """Some bytes of a block of a tar."""
        name, start = self._name(block), int(self._index.blocks["start"][block]) + start
        with self._explained(name):
            content = self._remote.read(name, start, start + size)
        if len(content) != size:
            raise DamagedShard(f"{self._remote.root}/{name} is damaged: it is shorter than when it was indexed")
        return content

    @contextmanager
    def _explained(self, name: str) -> Iterator[None]:
        """DamagedShard where a shard is missing, BadData where it may not be read."""
        try:
            yield
        except FileNotFoundError as error:
            raise DamagedShard(f"{self._remote.root}/{name} is missing") from error
        except PermissionError as error:
            raise BadData(f"{self._remote.root}/{name} may not be read: {first_line(error)}") from error

    def _name(self, block: int) -> str:
        return self._index.names[int(self._index.blocks["shard"][block])]

    def _fetch_ahead(self, block: int) -> None:
        """Begin to read a block that will be needed, if nobody has."""
        if block < 0 or self._cache.holds(block):
            return
        # threads do not survive a fork: a worker process has its own
        if self._threads is None or self._threads[0] != os.getpid():
            self._threads, self._asked = (os.getpid(), ThreadPoolExecutor(_AHEAD)), set[int]()
        if block not in self._asked:
            self._asked.add(block)
            self._threads[1].submit(self._fill_quietly, block)

    def _fill_quietly(self, block: int) -> None:
        try:
            self._fill(block, wait=False)
        except (OSError, BadData, DamagedShard):
            pass  # who needs the block meets the same, and says so
        finally:
            self._asked.discard(block)


def block_of_samples(index: ShardIndex) -> Tensor:
    """The block of each sample: (N,)."""
    rows = torch.from_numpy(numpy.ascontiguousarray(index.blocks["rows"]))
    return torch.arange(len(rows)).repeat_interleave(rows)
