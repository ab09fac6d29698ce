"""Tensors to safetensors files and back, through torch.distributed.checkpoint: whole ones and sharded ones alike."""

import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from io import BytesIO
from pathlib import Path

import torch
import torch.distributed.checkpoint as dcp
from torch import Tensor
from torch.distributed.checkpoint import DefaultSavePlanner, HuggingFaceStorageReader, HuggingFaceStorageWriter
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.planner import WriteItem

from trainer.records.safetensors_header import TensorFact

# Names in a checkpoint that are not the network's: they lie in a file of their own.
APART = ("optimizer/", "scaler/")


class _InRows(DefaultSavePlanner):
    """Tensors as safetensors takes them: rows in order (channels_last is not), no two on one memory.

    Only what this rank writes is copied for that, and not before it is written.
    """

    def __init__(self) -> None:
        super().__init__()
        self._given: set[tuple[torch.device, int]] = set()  # where memory begins that another name has brought already

    def resolve_data(self, write_item: WriteItem) -> Tensor | BytesIO:
        """What is written for one item of the plan: a tensor, or this rank's part of one."""
        tensor = super().resolve_data(write_item)
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
    parts = {name: 2 if name.startswith(APART) else 1 for name in names}
    writer = HuggingFaceStorageWriter(str(folder), fqn_to_index_mapping=parts, save_distributed=True)
    with _plainly():
        dcp.save(dict(tensors), storage_writer=writer, planner=_InRows(), no_dist=alone)


def read_into(tensors: dict[str, Tensor], folder: Path) -> None:
    """Fill tensors in place from a verified folder. No communication: each rank reads what it holds."""
    with _plainly():
        dcp.load(dict(tensors), storage_reader=HuggingFaceStorageReader(str(folder)), no_dist=True)


def misfits(stored: dict[str, TensorFact], wanted: dict[str, Tensor], asked: set[str]) -> list[str]:
    """What keeps a checkpoint from filling these tensors, a line each.

    asked: the names that any rank wants; of the network's own names in the checkpoint none may be left.
    """
    lines = [f"{name}: missing in the checkpoint" for name in wanted if name not in stored]
    lines += [f"{name}: only in the checkpoint" for name in stored if name not in asked and not name.startswith(APART)]
    for name in wanted.keys() & stored.keys():
        tensor, fact = wanted[name], stored[name]
        if tuple(tensor.shape) != fact.shape:
            lines.append(f"{name}: {list(fact.shape)} in the checkpoint, {list(tensor.shape)} here")
        elif tensor.dtype.is_floating_point != fact.dtype.is_floating_point:
            lines.append(f"{name}: {fact.dtype} in the checkpoint, {tensor.dtype} here")
    return sorted(lines)


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
