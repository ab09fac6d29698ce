"""What a strategy is told about the machine, beside its own configuration."""

from __future__ import annotations

import os
import socket
import warnings
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field
from datetime import timedelta
from functools import cached_property
from typing import Any

import torch

from trainer.launch.launch import Launch
from trainer.refusal import Refusal

_AUTOCAST = {"bf16": torch.bfloat16, "fp16": torch.float16}


@dataclass(frozen=True)
class Machine:
    """Where a run computes, in which precision, from which seed, and which of the launched processes this is."""

    launch: Launch = field(default_factory=Launch)
    device: str = "auto"  # auto, cpu, cuda
    precision: str = "auto"  # auto, fp32, bf16, fp16, fp64
    tf32: bool = False  # GPUs multiply what is fp32 with 10 bits instead of 23, also in convolutions
    seed: int = 0
    compile: bool = False
    backend: str | None = None  # of torch.distributed; None: NCCL on GPUs, gloo on CPUs
    interface: str | None = None  # network interface that gloo and NCCL use; None: they choose
    timeout: timedelta = timedelta(minutes=30)  # of joining, and of every collective up to the first step
    step_timeout: timedelta = timedelta(minutes=10)  # of every collective after it

    def check(self) -> None:
        """Refuse a device or a network interface that is not there, before any process group."""
        there = [name for _, name in socket.if_nameindex()]
        if self.interface is not None and self.interface not in there:
            raise Refusal(
                f"distributed.interface={self.interface}: {socket.gethostname()} has no such network interface; it has "
                + ", ".join(there)
            )
        if self.device == "cuda" and not torch.cuda.is_available():
            raise Refusal("device=cuda: torch sees no GPU on this machine; use device=cpu (or auto)")
        if self.backend == "nccl" and not self.on_gpu:
            raise Refusal("distributed.backend=nccl is for GPUs, and this run computes on the CPU; use gloo (or null)")
        if self.on_gpu and self.backend != "gloo" and self.launch.local_world_size > torch.cuda.device_count():
            raise Refusal(
                f"{self.launch.local_world_size} processes on this machine, but {torch.cuda.device_count()} GPU(s): one"
                f" process a GPU; start with --nproc-per-node {torch.cuda.device_count()}, or use device=cpu; to"
                " share a GPU for a trial: distributed.backend=gloo"
            )
        if self.resolved_precision == "bf16" and self.on_gpu and not torch.cuda.is_bf16_supported():
            raise Refusal("precision=bf16: this GPU has no bfloat16; use precision=fp16 or fp32")

    @property
    def on_gpu(self) -> bool:
        """Does this run compute on GPUs?"""
        return self.device != "cpu" and torch.cuda.is_available()

    def claim_device(self) -> torch.device:
        """The device of this process, made the current one; and the network interface, for the group to come."""
        if self.interface is not None:
            os.environ["GLOO_SOCKET_IFNAME"] = self.interface
            os.environ["NCCL_SOCKET_IFNAME"] = f"={self.interface}"  # without the sign eth1 would mean eth10, too
        with warnings.catch_warnings():
            # torch 2.9 and some after it recommend names that break `cudnn.flags` (#179445)
            warnings.simplefilter("ignore", UserWarning)
            torch.backends.cudnn.allow_tf32 = self.tf32  # torch's default is true: an fp32 that is none
            torch.backends.cuda.matmul.allow_tf32 = self.tf32
        if not self.on_gpu:
            return torch.device("cpu")
        device = torch.device("cuda", self.launch.local_rank % torch.cuda.device_count())  # gloo lets them share
        torch.cuda.set_device(device)  # so that nothing lands on GPU 0 by accident
        return device

    @cached_property  # every micro-batch asks
    def resolved_precision(self) -> str:
        """The precision that `auto` stands for: bf16 where the GPU has it, else fp32."""
        if self.precision != "auto":
            return self.precision
        return "bf16" if self.on_gpu and torch.cuda.is_bf16_supported(including_emulation=False) else "fp32"

    @property
    def parameter_dtype(self) -> torch.dtype:
        """What weights are held in: fp64 for proofs, else fp32 (bf16 and fp16 are for the arithmetic only)."""
        return torch.float64 if self.resolved_precision == "fp64" else torch.float32

    def autocast(self, device: torch.device) -> AbstractContextManager[Any]:
        """The context of a forward pass in the resolved precision."""
        dtype = _AUTOCAST.get(self.resolved_precision)
        return torch.autocast(device.type, dtype) if dtype else nullcontext()
