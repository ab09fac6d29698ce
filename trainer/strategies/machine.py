"""`Machine`: device, precision, seed and timeouts, which every strategy gets beside its own configuration."""

from __future__ import annotations

import os
import socket
import warnings
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass, field
from datetime import timedelta
from functools import cached_property
from typing import Any, Literal

import torch
from torch import nn

from trainer.launch.devices import accelerator_type, accumulation_dtype, device_identity, is_bf16_supported
from trainer.launch.rendezvous import Launch
from trainer.launch.store_collectives import machine_id, run_on_all_ranks
from trainer.messages import Refusal, format_count
from trainer.parallel.compile import CompileSettings
from trainer.parallel.float8_linear import Float8, refuse_float8
from trainer.parallel.process_group import backend_of, refuse_backend

_AUTOCAST = {"bf16": torch.bfloat16, "fp16": torch.float16}
NOTHING: AbstractContextManager[None] = nullcontext()  # one for all: a step enters several


@dataclass(frozen=True)
class Machine:
    """Where a run computes, in which precision, from which seed, and which of the launched processes this is."""

    launch: Launch = field(default_factory=Launch)
    device: str = "auto"  # auto: the accelerator that torch finds, else cpu; or cpu, cuda, xpu, mps
    precision: str = "auto"  # auto, fp32, bf16, fp16, fp64
    tf32: bool = False  # CUDA GPUs multiply what is fp32 with 10 bits instead of 23, also in convolutions
    float8: Float8 = False  # linear layers inside units multiply in float8, with one scale for so many numbers
    channels_last: bool = True  # images and the weights of convolutions lie so in memory
    seed: int = 0
    compile: CompileSettings | None = None  # None: nothing is compiled
    dropout: Literal["sample", "native"] | None = None  # whose random numbers a forward has; None: the strategy says
    backend: str | None = None  # of torch.distributed; None: the device's own, NCCL on CUDA, gloo on CPUs
    interface: str | None = None  # network interface that gloo and NCCL use; None: they choose
    timeout: timedelta = timedelta(minutes=30)  # of joining, and of every collective up to the first step
    step_timeout: timedelta = timedelta(minutes=10)  # of every collective after it
    compare_copies: bool = True  # must ranks that hold copies of a tensor hold the same bits?

    def check(self) -> None:
        """Refuse a device, a precision or a network interface that is not there, before any process group."""
        interfaces = [name for _, name in socket.if_nameindex()]
        if self.interface is not None and self.interface not in interfaces:
            raise Refusal(
                f"distributed.interface={self.interface}: {socket.gethostname()} has no such network interface; it has "
                + ", ".join(interfaces)
            )
        accelerator = accelerator_type()
        if self.device not in ("auto", "cpu", accelerator):
            seen = f"only {accelerator}" if accelerator else "no GPU"
            raise Refusal(
                f"device={self.device}: torch sees {seen} on this machine; use device={accelerator or 'cpu'} (or auto)"
            )
        if self.backend is not None or self.launch.world_size > 1:
            refuse_backend(self.kind, self.backend)
        self._refuse_precision()
        if self.float8:
            refuse_float8(self.float8, self.kind, self.resolved_precision)

    def refuse_shared_devices(self) -> None:
        """Collective: refuse, on all ranks, two processes with the same device, if each must have its own.

        A process may see all devices of its machine, or only one (`--gpus-per-task=1`). So they compare through the
        store.
        """
        # a condition that has the same value on all ranks, on different machines, too
        if self.launch.world_size > 1 and self.device != "cpu" and self.backend != "gloo":
            run_on_all_ranks(self.launch, "devices", self._claim_exclusively)

    def _claim_exclusively(self) -> None:
        store = self.launch.store()
        if store is None or self.shares_devices:
            return
        key = f"device-of-{machine_id()}-{device_identity(self.torch_device)}"
        if (holder := store.compare_set(key, "", str(self.launch.rank)).decode()) != str(self.launch.rank):
            processes, count = self.launch.local_world_size, torch.accelerator.device_count()
            trial = (
                "; to share a GPU for a trial of ddp, zero1, fsdp: distributed.backend=gloo"
                if self.kind == "cuda"
                else ""
            )
            raise Refusal(
                f"{processes} processes on this machine, but {format_count(count, 'GPU')}, and rank {self.launch.rank}"
                f" has that of rank {holder}: one process a GPU; start with --nproc-per-node {count}, or use"
                f" device=cpu{trial}"
            )

    def refuse_network(self, network: nn.Module) -> None:
        """Refuse a network that cannot compute in this precision."""
        if self.resolved_precision == "fp64" and (why := why_not_float64(network)):
            raise Refusal(f"precision=fp64: {why}; use precision=fp32")

    def _refuse_precision(self) -> None:
        """Refuse what the device cannot compute in."""
        precision = self.resolved_precision
        if precision == "bf16" and self.on_gpu and is_bf16_supported(self.kind, emulated=True) is False:
            raise Refusal("precision=bf16: this GPU has no bfloat16; use precision=fp16 or fp32")
        if precision == "fp64" and accumulation_dtype(self.torch_device) != torch.float64:
            raise Refusal(f"precision=fp64: {self.kind} has no float64; use device=cpu, or precision=fp32")

    @property
    def kind(self) -> str:
        """The kind of device that this run computes on: cpu, cuda, xpu, mps."""
        return "cpu" if self.device == "cpu" else accelerator_type() or "cpu"

    @property
    def on_gpu(self) -> bool:
        """Does this run compute on an accelerator?"""
        return self.kind != "cpu"

    @property
    def shares_devices(self) -> bool:
        """May processes of this run compute on the same device? On CPUs, and where tensors travel by gloo."""
        return not self.on_gpu or backend_of(self.kind, self.backend) == "gloo"

    @property
    def torch_device(self) -> torch.device:
        """The device of this process: by its local rank; over gloo processes may share one."""
        if not self.on_gpu:
            return torch.device("cpu")
        return torch.device(self.kind, self.launch.local_rank % torch.accelerator.device_count())

    def claim_device(self) -> torch.device:
        """Make the device of this process the current one and return it; set the network interface for the groups."""
        if self.interface is not None:
            os.environ["GLOO_SOCKET_IFNAME"] = self.interface
            os.environ["NCCL_SOCKET_IFNAME"] = f"={self.interface}"  # without the sign eth1 would mean eth10, too
        with warnings.catch_warnings():
            # torch 2.9 and some after it recommend names that break `cudnn.flags` (#179445)
            warnings.simplefilter("ignore", UserWarning)
            torch.backends.cudnn.allow_tf32 = self.tf32  # torch's default is true, which is no fp32
            torch.backends.cuda.matmul.allow_tf32 = self.tf32
        device = self.torch_device
        if self.on_gpu:
            torch.accelerator.set_device_index(device)  # so that nothing is allocated on GPU 0 by accident
        return device

    @cached_property  # every micro-batch asks
    def resolved_precision(self) -> str:
        """The precision; `auto` is bf16 if the GPU has it, else fp32."""
        if self.precision != "auto":
            return self.precision
        return "bf16" if self.on_gpu and is_bf16_supported(self.kind, emulated=False) else "fp32"

    @property
    def parameter_dtype(self) -> torch.dtype:
        """The type of weights: fp64 for proofs, else fp32 (bf16 and fp16 are autocast only)."""
        return torch.float64 if self.resolved_precision == "fp64" else torch.float32

    def autocast(self, device: torch.device) -> AbstractContextManager[Any]:
        """The context of a forward in the resolved precision; in fp64 new tensors (noise, a time) have it, too."""
        precision = self.resolved_precision
        if precision in _AUTOCAST:
            return torch.autocast(device.type, _AUTOCAST[precision])
        return default_dtype(torch.float64) if precision == "fp64" else NOTHING


@contextmanager
def default_dtype(dtype: torch.dtype) -> Iterator[None]:
    """Inside, new tensors (`torch.randn`, `torch.zeros`) have this type; torch's default is float32."""
    before = torch.get_default_dtype()
    torch.set_default_dtype(dtype)
    try:
        yield
    finally:
        torch.set_default_dtype(before)


def why_not_float64(network: nn.Module) -> str:
    """Why a network cannot compute in fp64; "" if it can."""
    named = (*network.named_parameters(), *network.named_buffers())
    name = next((name for name, tensor in named if tensor.is_complex()), "")
    return name and f"{name} is complex, and no file of a checkpoint keeps complex numbers of 128 bits"
