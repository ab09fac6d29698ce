"""Tensors to safetensors files and back, through torch.distributed.checkpoint: whole ones and sharded ones alike."""

import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from io import BytesIO
from pathlib import Path
from typing import Any

import torch
import torch.distributed.checkpoint as dcp
from torch import Tensor
from torch.distributed.checkpoint import DefaultSavePlanner, HuggingFaceStorageReader, HuggingFaceStorageWriter
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.planner import WriteItem

from trainer.parallel.state import APART
from trainer.records.manifest import CorruptCheckpoint


class _InRows(DefaultSavePlanner):
    """Tensors as safetensors takes them: rows in order (channels_last is not), no two on one memory.

    Only what this rank writes is copied for that, and not before it is written.
    """

    def __init__(self) -> None:
        super().__init__()
        self._given: set[tuple[torch.device, int]] = set()  # where memory begins that another name has brought already

    def resolve_data(self, write_item: WriteItem) -> Tensor | BytesIO:
        """What is written for one item of the plan: a tensor, or this rank's shard of one."""
        tensor = super().resolve_data(write_item)  # the shape of this rank's shard
        if not isinstance(tensor, Tensor):
            return tensor
        where = (tensor.device, tensor.data_ptr())
        if not tensor.is_contiguous() or (tensor.numel() and where in self._given):
            return tensor.clone(memory_format=torch.contiguous_format)
        self._given.add(where)
        return tensor


def write_tensors(folder: Path, tensors: dict[str, Tensor], names: list[str], alone: bool) -> None:
    """Write tensors into a folder. Collective, unless one process writes everything `alone`.

    names: of the tensors of all ranks. What several ranks hold whole is written once.
    """
    # the network has a file of its own, so that any program that reads safetensors can load it
    file_of = {name: 2 if name.startswith(APART) else 1 for name in names}
    writer = HuggingFaceStorageWriter(str(folder), fqn_to_index_mapping=file_of, save_distributed=True)
    with _plainly():
        dcp.save(dict(tensors), storage_writer=writer, planner=_InRows(), no_dist=alone)


def stored(folder: Path) -> dict[str, Tensor]:
    """What tensors the files of a folder make up together, on meta; their headers tell, nothing else is read.

    CorruptCheckpoint where a header does not agree with its file, or where shards are missing.
    """
    try:
        facts: dict[str, Any] = HuggingFaceStorageReader(str(folder)).read_metadata().state_dict_metadata
    except Exception as error:  # whatever a damaged header makes of torch's reader
        raise CorruptCheckpoint(f"{folder}: {str(error)[:300]}") from None
    for name, fact in facts.items():
        # torch takes the last end of the shards for the whole tensor, and would leave what lacks in between as it was
        held = sum(chunk.sizes.numel() for chunk in fact.chunks)
        if held != fact.size.numel():
            raise CorruptCheckpoint(f"{folder}: {name}: {held} of its {fact.size.numel()} elements are there")
    return {name: torch.empty(fact.size, dtype=fact.properties.dtype, device="meta") for name, fact in facts.items()}


def read_into(tensors: dict[str, Tensor], folder: Path) -> None:
    """Fill tensors in place from a verified folder. No communication: each rank reads what it holds."""
    # torch compares names and shapes before it reads, and takes of each file what this rank's shards overlap
    with _plainly():
        dcp.load(dict(tensors), storage_reader=HuggingFaceStorageReader(str(folder)), no_dist=True)


@contextmanager
def _plainly() -> Iterator[None]:
    """An error as it was where it happened: torch hands it to all ranks in a parcel."""
    with torch.no_grad(), warnings.catch_warnings():
        # torch remarks that it works without a process group, which is what was asked for
        warnings.filterwarnings("ignore", message="torch.distributed is disabled, unavailable or uninitialized")
        try:
            yield
        except CheckpointException as parcel:
            raise next(iter(parcel.failures.values()))[0] from parcel
