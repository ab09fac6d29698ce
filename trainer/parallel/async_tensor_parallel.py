"""Asynchronous tensor parallelism: a compiled graph takes matrix products apart, and sends a piece beside the next.

torch has no public switch for it. These names were seen in torch 2.15, and torchtitan has used them with older ones.
"""

from __future__ import annotations

import warnings

from torch.distributed import ProcessGroup

from trainer.launch.devices import unreachable_device
from trainer.messages import Refusal


def refuse_async_tensor_parallel(tensor_ranks: int, local_ranks: int, kind: str, is_compiled: bool) -> None:
    """Refuse it where there is nothing to overlap, or nothing that could do it."""
    key = "strategy.async_tp=true"
    if tensor_ranks < 2:
        raise Refusal(f"{key}: there is one tensor rank, which sends nothing; use strategy.tensor=2, or async_tp=false")
    if kind != "cuda":
        raise Refusal(f"{key}: it is for CUDA GPUs that read each other's memory (NVLink), not for {kind}; use false")
    if not is_compiled:
        raise Refusal(
            f"{key}: torch's compiler takes the matrix products apart; use compile.mode=default, or async_tp=false"
        )
    if tensor_ranks > local_ranks:
        raise Refusal(
            f"{key}: {tensor_ranks} tensor ranks read each other's memory, and a machine has {local_ranks} processes;"
            f" use strategy.tensor={local_ranks} or less, or async_tp=false"
        )
    if (apart := unreachable_device(kind)) is not None:
        raise Refusal(f"{key}: GPU 0 cannot read the memory of GPU {apart}; use async_tp=false")


def share_memory(group: ProcessGroup) -> None:
    """Collective over the tensor ranks, in older versions of torch: they may read each other's memory."""
    from torch.distributed import _symmetric_memory

    if not _symmetric_memory.is_symm_mem_enabled_for_group(group.group_name):
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", FutureWarning)  # of versions that need no call
            _symmetric_memory.enable_symm_mem_for_group(group.group_name)
