"""The index of a set in shards: where each sample lies, and its label. `scripts/index_shards.py` writes it once."""

from __future__ import annotations

import json
import os
from dataclasses import dataclass, field
from hashlib import sha256
from pathlib import Path
from typing import Any

import numpy
from numpy.typing import NDArray
from safetensors.numpy import load_file, save

from recipes.shards.remote import DamagedShard, Remote
from trainer.messages import BadData, Refusal, expand_home, first_line

FOLDER = "shards_index"  # below the root of the shards
_SUMMARY = "index.json"  # small: every process reads it
_FORMAT = 1

Arrays = dict[str, NDArray[Any]]


@dataclass(frozen=True)
class ShardIndex:
    """Blocks are what is read at once: neighbouring samples of a tar, or a row group of Parquet."""

    digest: str  # of everything in it: another set has another one
    names: list[str]  # (S,): of the shards, below the root
    class_names: list[str]  # empty where labels are numbers
    num_classes: int
    columns: list[str]  # of Parquet: of the image and of the label
    # (K,) blocks: shard, rows: number of samples, group: row group in Parquet and -1 in a tar, start: of a tar's bytes
    blocks: Arrays = field(repr=False)
    # (N,) samples, in the order of the shards: start: from the block's beginning, size, crc: CRC-32, label
    samples: Arrays = field(repr=False)

    def block_sizes(self) -> NDArray[numpy.int64]:
        """How many bytes each block has: (K,)."""
        last = numpy.cumsum(self.blocks["rows"]) - 1
        return self.samples["start"][last] + self.samples["size"][last]


def index_place(root: str, place: str | None, cache: Path) -> list[str]:
    """Where the index of these shards may lie: at `place`, else below the root, else in this machine's cache.

    The last one is for roots that cannot be written, as of https://.
    """
    if place is not None:
        return [(place if "://" in place else str(expand_home(place))).rstrip("/")]
    return [f"{root.rstrip('/')}/{FOLDER}", str(cache / "shards" / sha256(root.rstrip("/").encode()).hexdigest()[:16])]


def write_index(place: str, summary: dict[str, Any], arrays: Arrays) -> str:
    """Write an index; the summary last, so that what is half written is never read. Returns its digest."""
    content = save(arrays)
    digest = sha256(content + json.dumps(summary, sort_keys=True).encode()).hexdigest()[:16]
    remote = Remote(place)
    remote.write(f"{digest}.safetensors", content)
    text = json.dumps({"format": _FORMAT, "digest": digest, **summary}, indent=1) + "\n"
    remote.write(_SUMMARY, text.encode())
    return digest


def read_summary(root: str, places: list[str]) -> tuple[str, dict[str, Any]]:
    """The place of an index and its summary. Refusal where there is none."""
    for place in places:
        try:
            summary = json.loads(Remote(place).read(_SUMMARY))
        except FileNotFoundError:
            continue
        except (PermissionError, ValueError, BadData, DamagedShard) as error:
            raise Refusal(f"the index {place}/{_SUMMARY} cannot be read: {first_line(error)}") from error
        if summary.get("format") != _FORMAT:
            raise Refusal(f"the index {place} has another format: python scripts/index_shards.py {root} makes it anew")
        return place, summary
    raise Refusal(
        f"data.root: {root} has no index of its shards (looked for {' and '.join(places)}):"
        f" python scripts/index_shards.py {root}"
    )


def read_index(place: str, summary: dict[str, Any], cache: Path) -> ShardIndex:
    """The index itself. Its arrays are pages of a file in the cache, which all processes of a machine share."""
    digest = summary["digest"]
    kept = cache / f"index-{digest}.safetensors"
    if not kept.exists():
        content = Remote(place).read(f"{digest}.safetensors")
        cache.mkdir(parents=True, exist_ok=True)
        draft = kept.with_suffix(f".{os.getpid()}")
        draft.write_bytes(content)
        draft.rename(kept)
    arrays = load_file(kept)
    parts: dict[str, Arrays] = {"block": {}, "sample": {}}
    for name, array in arrays.items():
        part, _, column = name.partition(".")
        parts[part][column] = array
    return ShardIndex(
        digest,
        summary["shards"],
        summary["class_names"],
        summary["num_classes"],
        summary["columns"],
        parts["block"],
        parts["sample"],
    )


def make_blocks(shards: list[Arrays], block_bytes: int) -> tuple[Arrays, Arrays]:
    """The blocks (K,) and samples (N,) of an index, from what `scan` says of each shard.

    A block of a tar has samples of about `block_bytes`; a row group of Parquet is one block.
    """
    blocks: list[Arrays] = []
    for number, shard in enumerate(shards):
        # where a block begins: (n,) which block a sample's first byte, or its row group, falls into
        cell = numpy.where(shard["group"] < 0, shard["start"] // block_bytes, shard["group"])
        first = numpy.flatnonzero(numpy.diff(cell, prepend=-1))  # (k,)
        rows = numpy.diff(first, append=len(cell))
        in_tar = shard["group"][first] < 0
        start = numpy.where(in_tar, shard["start"][first], 0)  # bytes of a row group are counted from 0 already
        shard["start"] = shard["start"] - numpy.repeat(start, rows)
        blocks.append(
            {"shard": numpy.full(len(first), number), "rows": rows, "group": shard["group"][first], "start": start}
        )
    kinds = {"size": numpy.int32, "crc": numpy.uint32, "label": numpy.int32}
    samples = {
        name: numpy.concatenate([shard[name] for shard in shards]).astype(kinds.get(name, numpy.int64))
        for name in ("start", "size", "crc", "label")
    }
    return {name: numpy.concatenate([part[name] for part in blocks]) for name in blocks[0]}, samples
