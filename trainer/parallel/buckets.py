"""Sums and means over ranks of many tensors, which travel in buckets: a message for each tensor would cost more."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from trainer.launch.devices import accumulation_dtype, uses_pinned_memory
from trainer.parallel.device_mesh import to_local
from trainer.parallel.ranks import Ranks, Waitable

BUCKET_BYTES = 25 * 2**20  # bytes that travel as one, where nobody has said
Sums = Mapping[str, Tensor | float]  # numbers that the host knows need no device


def make_buckets(tensors: Sequence[Tensor], most_bytes: int = BUCKET_BYTES) -> list[list[Tensor]]:
    """The tensors in their order, in buckets of one type on one device, of up to so many bytes each."""
    full: list[list[Tensor]] = []
    size, kind = 0, None  # of the bucket that is being filled
    for tensor in tensors:
        if kind != (tensor.dtype, tensor.device) or size + tensor.nbytes > most_bytes:
            full.append([])
            size, kind = 0, (tensor.dtype, tensor.device)
        full[-1].append(tensor)
        size += tensor.nbytes
    return full


def pack(tensors: Sequence[Tensor]) -> Tensor:
    """All of these as one flat tensor, (numbers,)."""
    return torch.cat([tensor.reshape(-1) for tensor in tensors])


def unpack(flat: Tensor, like: Sequence[Tensor]) -> list[Tensor]:
    """Views of a flat tensor, in the shapes of what was packed into it."""
    pieces = flat.split([tensor.numel() for tensor in like])
    return [piece.view(tensor.shape) for piece, tensor in zip(pieces, like, strict=True)]


def average_gradients(parameters: list[nn.Parameter], ranks: Ranks, bucket_bytes: int = BUCKET_BYTES) -> None:
    """Collective: every parameter's gradient becomes its mean over the ranks that hold the same shard of it.

    Once a step, whatever the number of micro-batches. A gradient that only some ranks have counts as zero on others.
    """
    trainable = [parameter for parameter in parameters if parameter.requires_grad]
    if ranks.size == 1 or not trainable:
        return
    # these ranks; a byte a parameter: did any of them use it?
    present = ranks.max_values([parameter.grad is not None for parameter in trainable])
    used = [parameter for parameter, some in zip(trainable, present, strict=True) if some]
    # of what any rank has used all must send something, and of what none has used nobody
    for parameter in used:
        if parameter.grad is None:
            parameter.grad = torch.zeros_like(parameter)
    average_tensors([to_local(parameter.grad) for parameter in used if parameter.grad is not None], ranks, bucket_bytes)


def average_tensors(tensors: list[Tensor], ranks: Ranks, bucket_bytes: int = BUCKET_BYTES) -> None:
    """Collective: every tensor becomes its mean over the ranks, in place. All buckets are under way at once.

    tensors: what this rank holds, the same shapes in the same order on all of these ranks.
    """
    if ranks.size == 1:
        return
    # the given ranks; every tensor travels once
    sent = [
        (bucket, flat, ranks.all_reduce_sum_(flat))
        for bucket in make_buckets(tensors, bucket_bytes)
        for flat in [pack(bucket)]
    ]
    for bucket, flat, work in sent:
        work.wait()
        for tensor, mean in zip(bucket, unpack(flat.div_(ranks.size), bucket), strict=True):
            tensor.copy_(mean)


def all_reduce_sums(sums: Sums, ranks: Ranks, device: torch.device) -> dict[str, Any]:
    """Collective: the sums of all these ranks, on this device; whole numbers as int64, others in the widest type."""
    if ranks.size == 1:
        return {**sums}  # as they are
    local = {name: to_accumulator(value).detach().to(device) for name, value in sums.items()}
    names = sorted(
        local, key=lambda name: local[name].is_floating_point()
    )  # whole numbers first: two types, two buckets
    totals: list[Tensor] = []
    for bucket in make_buckets([local[name] for name in names]):
        flat = pack(bucket)
        ranks.all_reduce_sum_(flat).wait()  # the given ranks; 8 bytes a number
        totals += unpack(flat, bucket)
    return dict(zip(names, totals, strict=True))


class PendingSums:
    """Sums on their way: added up over ranks, copied to the CPU, and only waited for when they are read.

    Whole numbers travel as int64 and wrap (digests), all others in the widest type of where they are; what lies on the
    CPU travels from there.
    """

    def __init__(
        self, sums: Sums, ranks: Ranks, device: torch.device, alike: Mapping[str, Tensor] | None = None
    ) -> None:
        """`alike`: numbers that are equal on all ranks already, to be read at the same time."""
        pinned = uses_pinned_memory(device)  # without it a copy to the CPU is done when the call returns
        self._alike = {name: value.to("cpu", non_blocking=pinned) for name, value in (alike or {}).items()}
        # one message for each type and device, in an order that is the same on every rank
        local = {name: to_accumulator(value).detach() for name, value in sums.items()}
        self._names = sorted(local, key=lambda name: (local[name].is_floating_point(), local[name].device.type, name))
        self._under_way: list[tuple[list[Tensor], Tensor, Waitable]] = []
        for bucket in make_buckets([local[name] for name in self._names]):
            flat = pack(bucket)
            work = ranks.all_reduce_sum_(flat)  # the given ranks; 8 bytes a number
            if flat.device.type != "cpu":
                work.wait()  # of a GPU only the stream waits, so that the copy comes after the sum
            self._under_way.append((bucket, flat.to("cpu", non_blocking=pinned), work))
        self._ready = torch.accelerator.current_stream(device).record_event() if pinned else None

    def read(self) -> dict[str, Tensor]:
        """The totals, as CPU tensors of the shapes that were given, int64 or float64."""
        if self._ready is not None:
            self._ready.synchronize()
        totals: list[Tensor] = []
        for bucket, flat, work in self._under_way:
            work.wait()
            totals += unpack(to_accumulator(flat), bucket)
        return self._alike | dict(zip(self._names, totals, strict=True))


def to_accumulator(value: Tensor | float) -> Tensor:
    """A number in the type in which numbers are added up: int64 if it is whole, else the widest where it is."""
    if not isinstance(value, Tensor):
        return torch.tensor(value, dtype=torch.float64 if isinstance(value, float) else torch.int64)
    kind = accumulation_dtype(value.device) if value.dtype.is_floating_point else torch.int64
    return value if value.dtype == kind else value.to(kind)


def to_summand(value: Tensor | float) -> Tensor | float:
    """A number as it is added up: as `to_accumulator` has it, but on a CPU, where nobody waits, one of Python's."""
    # a fake tensor has no value
    number: Any = value.tolist() if type(value) is Tensor and value.is_cpu and not value.dim() else None
    return to_accumulator(value) if number is None else number
