"""One process, several GPUs: `nn.DataParallel`."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Literal

import torch
from torch import nn
from typing_extensions import override

from trainer.data.nested_tensors import has_rows, replace_tensors, tensors
from trainer.data.rng import seed_more_gpus
from trainer.learning.task import Task
from trainer.messages import Refusal, format_count
from trainer.strategies.base import Strategy
from trainer.strategies.loss import Forward
from trainer.strategies.parallel_model import ParallelModel


@dataclass
class DP(Strategy):
    """One process drives every visible GPU: micro-batches are dealt out, outputs come back to the first, with the loss.

    The network is copied to every GPU in every forward; `ddp` is faster. On fewer than two GPUs it is `single`.
    """

    @override
    def check(self, task: Task, network: nn.Module, world_size: int) -> None:
        """Refuse what replicas in threads cannot do."""
        if self.machine.compile and len(self.devices()) > 1:
            raise Refusal(
                f"strategy=dp compile.mode={self.machine.compile.mode}: a compiled network is bound to the first GPU,"
                " and its replicas on the others would compute with what lies there; use compile.mode=null, or"
                " strategy=ddp"
            )
        if self.machine.dropout == "sample" and len(self.devices()) > 1:
            raise Refusal(
                "strategy=dp loop.dropout=sample: replicas run in threads, where nobody knows their samples; use"
                " loop.dropout=native, or strategy=ddp"
            )
        if self.activation_offload and len(self.devices()) > 1:
            raise Refusal(
                "strategy=dp strategy.activation_offload=true: replicas run in threads, where units have no order;"
                " use strategy=ddp, or activation_checkpointing=units"
            )
        if task.plan(network).counters and len(self.devices()) > 1:
            raise Refusal(
                "strategy=dp: the plan has counters, and replicas would count in copies that are dropped; use"
                " strategy=ddp"
            )
        # torch's SyncBatchNorm wants a process for each GPU
        if self.sync_bn:
            raise Refusal(
                "strategy=dp cannot synchronise BatchNorm over its replicas; use strategy=ddp strategy.sync_bn=true"
            )

    @property
    @override
    def dropout(self) -> Literal["sample", "native"]:
        """On several GPUs torch's random numbers: replicas run in threads, where nobody knows their samples."""
        return "native" if len(self.devices()) > 1 else super().dropout

    @override
    def notes(self, network: nn.Module) -> list[str]:
        """Say on how many GPUs it really runs."""
        count = len(self.devices())
        line = f"dp: each micro-batch is divided over {count} GPUs"
        if count < 2:
            line = f"dp: {format_count(count, 'CUDA GPU')} visible; trains on {self.device} like strategy=single"
        return [line, *super().notes(network)]

    @property
    @override
    def devices_used(self) -> float:
        """One process drives all of them."""
        return max(1, len(self.devices()))

    def devices(self) -> list[int]:
        """The GPUs among which a micro-batch is dealt: torch's DataParallel copies between those of CUDA alone."""
        return list(range(torch.accelerator.device_count())) if self.machine.kind == "cuda" else []

    def replicas(self, whole: nn.Module) -> Forward:
        """Task and network as `Replicas`, if there are several GPUs."""
        return Replicas(whole, device_ids=self.devices()) if len(self.devices()) > 1 else whole

    @override
    def build(self, task: Task, network: nn.Module, example: Any) -> ParallelModel:
        return DPModel(self, task, network, example)


class Replicas(nn.DataParallel):
    """torch's DataParallel for trees of every kind: by itself it takes only dicts, lists and tuples."""

    @override
    def scatter(self, inputs: Any, kwargs: Any, device_ids: Any) -> Any:
        """For each replica its rows of every tensor. torch would give every replica all rows of a dataclass."""
        size = next(tensors(inputs)).shape[:1]
        if not all(has_rows(tree, *size or (0,)) for tree in inputs):
            raise Refusal(
                "strategy=dp divides each micro-batch into rows of its tensors, (B, …), and here not every tensor has"
                " a row for each sample; strategy=ddp reads each part from its own items"
            )
        parts, words = super().scatter((list(tensors(inputs)),), kwargs, device_ids)
        return [replace_tensors(inputs, part) for (part,) in parts], words

    @override
    def gather(self, outputs: Any, output_device: Any) -> Any:
        """The output of all rows on one device, of the kind that a replica gives."""
        return replace_tensors(outputs[0], super().gather([list(tensors(output)) for output in outputs], output_device))


class DPModel(ParallelModel):
    strategy: DP

    @override
    def wrap(self) -> Forward:
        replicas, others = self.strategy.replicas(self.step_module), self.strategy.devices()[1:]

        def forward(*args: Any) -> Any:
            seed_more_gpus(others)  # the generator of the first GPU is seeded for every micro-batch already
            return replicas(*args)

        return forward
