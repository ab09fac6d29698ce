"""One checkpoint is written, at once or beside the next steps: a draft, its files, the manifest, the name.

What happens on the way costs this one alone.

Who writes, and when, others know; all of it is collective over the ranks that are given.
"""

from __future__ import annotations

import errno
import os
import secrets
import shutil
import threading
from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass
from datetime import timedelta
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from trainer.launch.devices import available_host_memory, uses_pinned_memory
from trainer.launch.safe_files import make_folder
from trainer.launch.typed_values import refuse_unreadable
from trainer.parallel.device_mesh import to_local
from trainer.parallel.ranks import Ranks, all_or_none, gather_exceptions
from trainer.parallel.tensor_statistics import find_not_finite
from trainer.records.checkpoint.manifest import (
    MANIFEST_FILE,
    STATE_FILE,
    Manifest,
    encode_json,
    encode_manifest,
    file_sha256,
)
from trainer.records.checkpoint.save_plan import FailedSave, SavePlan
from trainer.records.checkpoint.store import DRAFT, move_into_place
from trainer.records.disk import Disk


class NonFiniteState(Exception):
    """What was to be saved is not finite: `tensors` names some of it, the same on every rank."""

    def __init__(self, step: int, tensors: list[str]) -> None:
        super().__init__(f"what was to be saved of step {step} is not finite: {', '.join(tensors)}")
        self.step, self.tensors = step, tensors


@dataclass(frozen=True)
class CheckpointContents:
    """What one checkpoint is to hold. Nothing changes it while it is written."""

    step: int
    tensors: Mapping[str, Tensor]  # what this rank writes: whole tensors and shards
    plan: SavePlan  # where these belong, and what the others write
    state: dict[str, Any]  # as JSON takes it
    metrics: dict[str, float]
    finite: Collection[str]  # the names of tensors that must be finite


def write_checkpoint(
    folder: Path, ranks: Ranks, contents: CheckpointContents, facts: Mapping[str, Any], disk: Disk
) -> None:
    """Collective: write a checkpoint; it has its name once it is whole.

    FailedSave on all ranks or none; NonFiniteState on all, before a byte is written, where numbers are not finite.
    """
    step, needed = contents.step, contents.plan.nbytes + 2**20  # headers and JSON
    # a name that does not count: a crash from here to the commit leaves the older checkpoints as they were; and one
    # that the main rank draws for all, as ranks of a dead attempt may still be writing to theirs
    draft = folder / f"{DRAFT}step-{step}-{ranks.broadcast_value(secrets.token_hex(4))}"
    try:
        # ranks wait for each other after each phase: one that fails stops all before the next
        _refuse_nonfinite(ranks, contents)
        all_or_none(ranks, partial(_make_draft, ranks, draft, needed, disk), FailedSave)
        all_or_none(ranks, partial(_write_files, ranks, draft, contents, disk), FailedSave)
        # the manifest last, then the name: who sees the name sees a checkpoint that is whole and on the disk
        files = _hash_files(ranks, draft, disk)
        manifest = Manifest(checkpoint_path(folder, step), step, dict(facts), contents.metrics, files)
        all_or_none(ranks, partial(_commit, ranks, draft, manifest, disk), FailedSave)
    except FailedSave as error:
        free = disk.free(folder) if folder.is_dir() else 0
        raise FailedSave(
            f"the checkpoint of step {step} could not be written to {folder}: {error}. It needs about "
            f"{needed:,} bytes, {free:,} are free there; the older checkpoints are intact"
        ) from error
    finally:
        if ranks.is_main:  # after a failed save; a finished draft has moved to its name
            shutil.rmtree(draft, ignore_errors=True)


def checkpoint_path(folder: Path, step: int) -> Path:
    """The final name of a checkpoint; the digits are for people."""
    return folder / f"step-{step:08d}"


def _refuse_nonfinite(ranks: Ranks, contents: CheckpointContents) -> None:
    """Collective: NonFiniteState where a number of what is to be written is not finite."""
    checked = {name: tensor for name, tensor in contents.tensors.items() if name in contents.finite}
    # all ranks; as a rule no names
    broken = gather_exceptions(ranks, all_or_none(ranks, lambda: find_not_finite(checked)[:1], FailedSave))
    if broken:
        names_by_rank = [f"{name} on rank {rank}" for rank, names in enumerate(broken) for name in names]
        raise NonFiniteState(contents.step, names_by_rank)


def _make_draft(ranks: Ranks, draft: Path, needed: int, disk: Disk) -> None:
    """Main rank: an empty draft, where there is space for what is coming."""
    if ranks.is_main:
        make_folder(draft.parent)
        # before a byte is written: filling the disk up would hurt others, too
        if disk.free(draft.parent) < needed:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        draft.mkdir()


def _write_files(ranks: Ranks, draft: Path, contents: CheckpointContents, disk: Disk) -> None:
    """This rank's tensors, and on the main rank what JSON takes."""
    # here: what this imports takes longer than first steps
    from trainer.records.checkpoint.tensor_files import write_tensors

    if contents.tensors:
        write_tensors(draft, contents.tensors, contents.plan, ranks.rank, disk)
    if ranks.is_main:
        refuse_unreadable(state := encode_json(contents.state), STATE_FILE)
        disk.write(draft / STATE_FILE, state)


def _hash_files(ranks: Ranks, draft: Path, disk: Disk) -> dict[str, dict[str, Any]]:
    """Collective: what really lies there, brought to the disk and hashed; shared out, for reading it takes time.

    The main rank, which writes the manifest, gets it.
    """
    # the main rank looks for all: a thousand ranks that list one folder keep its server busy
    listed = all_or_none(ranks, lambda: sorted(os.listdir(draft)) if ranks.is_main else [], FailedSave)
    names = ranks.broadcast_value(listed)  # all ranks
    mine = names[ranks.rank :: ranks.size]
    hashed = all_or_none(ranks, lambda: {name: _sync_and_hash(draft / name, disk) for name in mine}, FailedSave)
    by_rank = ranks.gather_values(hashed)  # all ranks; sizes and hashes to the main one
    return {name: entry for entries in by_rank for name, entry in entries.items()}


def _sync_and_hash(path: Path, disk: Disk) -> dict[str, Any]:
    """What is to be known of a file, once it is on the disk."""
    disk.sync(path)
    return {"size": path.stat().st_size, "sha256": file_sha256(path)}


def _commit(ranks: Ranks, draft: Path, manifest: Manifest, disk: Disk) -> None:
    """Main rank: manifest, then the name, each on the disk before the next."""
    if ranks.is_main:
        disk.write(draft / MANIFEST_FILE, encode_manifest(manifest))
        disk.sync(draft / MANIFEST_FILE)
        disk.sync(draft)
        move_into_place(draft, manifest.path, disk)


_MAX_SHARE = 0.5  # of the memory that a host has to spare: neighbouring ranks need some, and so does what is to come
CLOSE_TIMEOUT = (
    5.0  # seconds that a save under way still gets after an error; a rank that is gone may hold it up for ever
)


class SyncSaver:
    """The loop waits until a checkpoint is written. `ranks` agree about it."""

    def __init__(self, ranks: Ranks) -> None:
        self.ranks = ranks
        self._error: BaseException | None = None

    @torch.no_grad()
    def snapshot(self, tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """What this rank holds of each tensor, as it stays while it is written: here the tensors themselves."""
        return {name: to_local(tensor) for name, tensor in tensors.items()}

    def start(self, work: Callable[[], None]) -> bool:
        """Collective: begin; is it over, on every rank?"""
        self._do(work)
        return True

    def _do(self, work: Callable[[], None]) -> None:
        try:
            work()
        except BaseException as error:
            self._error = error  # `wait` raises it

    def failed(self) -> bool:
        """Is it over, and did it fail? Never waits; other ranks may not know yet."""
        return self._error is not None

    def wait(self) -> None:
        """Wait until it is over; its error, once."""
        error, self._error = self._error, None
        if error is not None:
            raise error

    def close(self) -> None:
        """After an error elsewhere: what is under way gets a little time, for nothing is wrong with it."""


class AsyncSaver(SyncSaver):
    """A thread writes a copy in the host's memory, if there is room for one. One at a time; the memory is kept.

    What it does holds Python's lock nowhere for long: writing, hashing and waiting let go of it.
    """

    def __init__(self, ranks: Ranks, timeout: timedelta) -> None:
        """Collective. timeout: for which one rank's thread waits for the others'."""
        super().__init__(ranks.duplicate(timeout))
        self._buffers: dict[str, Tensor] = {}
        self._copied_event: torch.Event | None = None  # when the device has copied all
        self._device: torch.device | None = None  # that copies; None: nothing need be waited for
        self._has_memory = True  # has the host memory for a copy
        self._thread = threading.Thread()

    def snapshot(self, tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """Copies in the host's memory. From an accelerator they arrive while the host goes on; the thread waits."""
        local = super().snapshot(tensors)
        devices = [tensor.device for tensor in local.values() if uses_pinned_memory(tensor.device)]
        self._device = devices[0] if devices else None
        # what is kept of other tensors goes first; where there is no room for a copy the loop waits instead
        self._buffers = {name: self._buffers[name] for name, tensor in local.items() if self._has_buffer(name, tensor)}
        needed = sum(tensor.nbytes for name, tensor in local.items() if name not in self._buffers)
        self._has_memory = needed < _MAX_SHARE * available_host_memory()
        if not self._has_memory:
            self._buffers, self._copied_event = {}, None
            return local
        self._buffers = {name: self._buffer_for(name, tensor) for name, tensor in local.items()}
        for name, tensor in local.items():
            self._buffers[name].copy_(tensor.detach(), non_blocking=uses_pinned_memory(tensor.device))
        # later steps of the stream come after the copies, so they may change what was copied
        self._copied_event = torch.accelerator.current_stream(devices[0]).record_event() if devices else None
        return dict(self._buffers)

    def _has_buffer(self, name: str, tensor: Tensor) -> bool:
        buffer = self._buffers.get(name)
        return buffer is not None and (buffer.shape, buffer.dtype) == (tensor.shape, tensor.dtype)

    def _buffer_for(self, name: str, tensor: Tensor) -> Tensor:
        """Memory for a copy, in the tensor's own order: a copy into another one takes several times as long."""
        if name in self._buffers:
            return self._buffers[name]
        # pinned from the start: `pin_memory()` would copy what nobody has written yet, and need the room twice
        return torch.empty_like(tensor, device="cpu", requires_grad=False, pin_memory=uses_pinned_memory(tensor.device))

    def start(self, work: Callable[[], None]) -> bool:
        """Begin; nobody waits. Nothing else may be under way."""
        ready, device = self._copied_event, self._device

        def later() -> None:
            if device is not None:
                torch.accelerator.set_device_index(device)  # each thread begins with device 0, which is another rank's
            if ready is not None:
                ready.synchronize()  # the copies are there
            work()

        self._thread = threading.Thread(target=self._do, args=(later,), name="saving", daemon=True)
        self._thread.start()
        if not self._has_memory:
            self._thread.join()  # it reads what the next step would change
        return False

    def failed(self) -> bool:
        """The same; what is under way has not failed yet."""
        return not self._thread.is_alive() and super().failed()

    def wait(self) -> None:
        """The same."""
        if self._thread.ident is not None:
            self._thread.join()
        super().wait()

    def close(self) -> None:
        """The same; longer than that it may take, but is not waited for."""
        if self._thread.ident is not None:
            self._thread.join(CLOSE_TIMEOUT)
