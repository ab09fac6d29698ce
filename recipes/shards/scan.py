"""Reads a shard once and says where its samples lie: a WebDataset tar, or a Parquet file."""

from __future__ import annotations

import json
import tarfile
from collections.abc import Sequence
from typing import Any
from zlib import crc32

import numpy

from recipes.shards.index import Arrays
from recipes.shards.remote import Remote
from recipes.vision.decode import ENDINGS
from trainer.messages import Refusal, escape_line, first_line

SHARD_ENDINGS = (".tar", ".parquet")
_READ_AHEAD = 8 * 2**20  # bytes of a shard that are requested at once


def list_shards(remote: Remote) -> list[str]:
    """The shards below the root, in subfolders too, sorted. Refusal where there are none."""
    files, root = remote.files()
    root = root.rstrip("/")
    try:
        paths = remote.insist("", lambda: files.find(root))
    except (FileNotFoundError, NotADirectoryError, PermissionError) as error:
        raise Refusal(f"{remote.root} cannot be listed: {first_line(error)}") from error
    names = sorted(path.removeprefix(root).lstrip("/") for path in paths if path.endswith(SHARD_ENDINGS))
    if not names:
        raise Refusal(f"{remote.root} has no shards: expected files ending in {' or '.join(SHARD_ENDINGS)}")
    return names


def identify(remote: Remote, name: str) -> str:
    """What tells a shard from another one of its name: its size, and its ETag or the time of its last change."""
    files, root = remote.files()
    facts = remote.insist(name, lambda: files.info(f"{root}/{name}"))
    return f"{name} {facts.get('size')} {facts.get('ETag') or facts.get('mtime')}"


def scan(remote: Remote, name: str, image: str, label: str) -> tuple[Arrays, list[str]]:
    """The samples of a shard, and what their labels are called; no names where they are numbers.

    Arrays are (n,): group: row group of Parquet, -1 in a tar; start: of a tar's bytes, or of a row group's pictures one
    behind the other; size; crc; label. Refusal where the shard cannot be read, or holds no such samples.
    """
    read = _scan_tar if name.endswith(".tar") else _scan_parquet
    try:
        rows, labels, names = remote.insist(name, lambda: read(remote, name, image, label))
    except (FileNotFoundError, PermissionError) as error:
        raise Refusal(f"{remote.root}/{escape_line(name)} cannot be read: {first_line(error)}") from error
    if not rows:
        raise Refusal(f"{remote.root}/{escape_line(name)} holds no sample")
    # (4, n); safetensors writes the memory of an array as it lies, also of one that is a view with strides
    columns = numpy.ascontiguousarray(numpy.array(rows, dtype=numpy.int64).T)
    numbers, names = _number_labels(labels, names)
    arrays = dict(zip(("group", "start", "size", "crc"), columns, strict=True))
    return {**arrays, "label": numbers}, names


def _number_labels(labels: Sequence[Any], names: list[str]) -> tuple[Any, list[str]]:
    """Labels as numbers (n,), and the names that they stand for; words are numbered in their order."""
    try:
        return numpy.array([int(label) for label in labels], dtype=numpy.int64), names
    except ValueError:
        words, numbers = numpy.unique([str(label) for label in labels], return_inverse=True)
        return numbers.astype(numpy.int64), words.tolist()


def _scan_tar(remote: Remote, name: str, _image: str, label: str) -> tuple[list[tuple[int, ...]], list[str], list[str]]:
    """Files of one name up to the first dot are a sample: KEY.jpg and KEY.cls."""
    files, root = remote.files()
    pictures: dict[str, tuple[int, ...]] = {}
    labels: dict[str, str] = {}
    try:
        with files.open(f"{root}/{name}", "rb", block_size=_READ_AHEAD) as file, tarfile.open(fileobj=file) as tar:
            for member in tar:
                folder, _, last = member.name.rpartition("/")
                stem, _, ending = last.partition(".")
                key = f"{folder}/{stem}"
                if not member.isfile() or last.startswith("."):
                    continue
                if f".{ending.lower().rpartition('.')[2]}" in ENDINGS:
                    content = tar.extractfile(member).read()  # type: ignore[union-attr]
                    pictures[key] = (-1, member.offset_data, member.size, crc32(content))
                elif ending == label:
                    labels[key] = tar.extractfile(member).read().decode().strip()  # type: ignore[union-attr]
    except (tarfile.TarError, UnicodeDecodeError) as error:
        raise Refusal(f"{remote.root}/{escape_line(name)} is damaged: {first_line(error)}") from error
    if unlabelled := sorted(pictures.keys() - labels.keys()):
        raise Refusal(
            f"{remote.root}/{escape_line(name)}: {escape_line(unlabelled[0].lstrip('/'))} has a picture and no .{label}"
            " with its class; --label ENDING names another file"
        )
    return list(pictures.values()), [labels[key] for key in pictures], []


def _scan_parquet(
    remote: Remote, name: str, image: str, label: str
) -> tuple[list[tuple[int, ...]], list[Any], list[str]]:
    """Pictures are bytes, or a struct with `bytes`, as Hugging Face's data sets have them."""
    import pyarrow

    label = "label" if label == "cls" else label
    rows: list[tuple[int, ...]] = []
    labels: list[Any] = []
    try:
        with open_parquet(remote, name) as file:
            schema = file.schema_arrow
            if missing := [column for column in (image, label) if column not in schema.names]:
                raise Refusal(
                    f"{remote.root}/{escape_line(name)} has no column {missing[0]}; it has {', '.join(schema.names)}:"
                    " --image NAME, --label NAME"
                )
            for group in range(file.num_row_groups):
                start = 0
                for content in read_pictures(file, group, image):
                    rows.append((group, start, len(content), crc32(content)))
                    start += len(content)
                labels += file.read_row_group(group, columns=[label]).column(0).to_pylist()
    except pyarrow.ArrowInvalid as error:
        raise Refusal(f"{remote.root}/{escape_line(name)} is damaged: {first_line(error)}") from error
    return rows, labels, _named_by_hugging_face(schema.metadata or {}, label)


def open_parquet(remote: Remote, name: str) -> Any:
    """A Parquet file. Refusal without pyarrow."""
    try:
        from pyarrow.parquet import ParquetFile
    except ImportError as error:
        raise Refusal("shards of Parquet need the package pyarrow: pip install -e '.[parquet]'") from error
    files, root = remote.files()
    return ParquetFile(files.open(f"{root}/{name}", "rb"), pre_buffer=True)


def read_pictures(file: Any, group: int, image: str) -> list[bytes]:
    """The compressed pictures of a row group, in order."""
    values = file.read_row_group(group, columns=[image]).column(0).to_pylist()
    return [(value["bytes"] if isinstance(value, dict) else value) or b"" for value in values]


def _named_by_hugging_face(metadata: dict[bytes, bytes], label: str) -> list[str]:
    """The class names that the package `datasets` writes into a Parquet file; none where it did not write it."""
    features = json.loads(metadata.get(b"huggingface", b"{}")).get("info", {}).get("features", {})
    return list(features.get(label, {}).get("names") or ())
