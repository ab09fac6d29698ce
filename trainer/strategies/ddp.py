"""DistributedDataParallel: a full copy of the network in each process; gradients are averaged."""

from __future__ import annotations

from contextlib import nullcontext
from dataclasses import dataclass
from inspect import signature
from typing import Any, ClassVar, Literal

import torch
from torch import nn
from torch.distributed.algorithms.ddp_comm_hooks.default_hooks import bf16_compress_hook, fp16_compress_hook
from torch.nn.parallel import DistributedDataParallel
from typing_extensions import override

from trainer.learning.freezing import preserve_untrained
from trainer.learning.optimizer import find_sparse_embeddings
from trainer.learning.task import Task
from trainer.messages import FatalRunError, Refusal, format_names
from trainer.parallel.compile import without_compile
from trainer.strategies.loss import LOST_GRADIENTS, FlatOutput, Forward, refuse_replaced_parameters, unflatten_output
from trainer.strategies.multi_process import Joined
from trainer.strategies.parallel_model import ParallelModel
from trainer.strategies.replica_check import NoReplicaCheck, make_replica_check

# Running statistics are averaged before they are used (ParallelModel.settle). So DDP must not overwrite them with those
# of rank 0 in every forward. torch 2.15 has a new name for this argument and deprecates the old one.
_RENAMED = "forward_sync_buffers" in signature(DistributedDataParallel.__init__).parameters
BUFFERS_STAY: dict[str, Any] = {"forward_sync_buffers" if _RENAMED else "broadcast_buffers": False}
COMPRESSION = {"fp16": fp16_compress_hook, "bf16": bf16_compress_hook}


@dataclass
class DDP(Joined):
    """A copy of the network on every process; gradients are averaged during the backward of the last micro-batch."""

    narrowing: ClassVar[tuple[str, ...]] = ("compress",)
    bucket_mb: int = 25  # MiB of gradients in one all-reduce; larger: fewer and later
    static_graph: bool = False  # the same parameters are used in the same way in every step
    find_unused_parameters: bool = False  # some parameters get no gradient in some steps; costs a walk of the graph
    compress: Literal["fp16", "bf16"] | None = None  # the precision in which gradients travel; None: their own

    @override
    def check(self, task: Task, network: nn.Module, world_size: int) -> None:
        """Refuse sparse gradients that NCCL would have to send, as only gloo can, and those that tying makes dense."""
        super().check(task, network, world_size)
        if self.machine.on_gpu and self.machine.backend != "gloo":
            self.refuse_sparse(network)
        sparse = {module: name for name, module in find_sparse_embeddings(network).items()}
        tied = {embedding.weight: name for embedding, name in sparse.items()}
        for holder, module in network.named_modules():
            for key, parameter in module.named_parameters(holder, recurse=False):
                if parameter in tied and module not in sparse:
                    raise Refusal(
                        f"strategy=ddp: the embedding {tied[parameter]} makes sparse gradients, and its weight is also"
                        f" {key}, which makes dense ones; build the embedding with sparse=False"
                    )

    @override
    def copies(self, network: nn.Module) -> NoReplicaCheck:
        return make_replica_check(self, network)

    @override
    def build(self, task: Task, network: nn.Module, example: Any) -> ParallelModel:
        return DDPModel(self, task, network, example)


class DDPModel(ParallelModel):
    strategy: DDP

    @override
    def wrap(self) -> Forward:
        strategy = self.strategy
        if not torch.is_grad_enabled():  # for evaluations alone
            return super().wrap()
        self._trained = {name: x for name, x in self.network.named_parameters() if x.requires_grad}  # as DDP has them
        if not self._trained:
            raise Refusal("strategy=ddp: the network has no trainable parameter, so no gradient to average")
        # DDP would fail only in the second step, and name no parameters
        unused: list[str] = []
        if not (strategy.find_unused_parameters or strategy.static_graph):
            with refuse_replaced_parameters(self.network, strategy.world):
                unused = self._trial_backward(self.step_module)
        if unused:
            raise Refusal(
                f"these parameters get no gradient: {format_names(unused, 8)}; {LOST_GRADIENTS}; if not,"
                " strategy.find_unused_parameters=true"
            )
        self._replica = DistributedDataParallel(
            FlatOutput(self.step_module),
            process_group=strategy.world.group,
            bucket_cap_mb=strategy.bucket_mb,
            init_sync=False,  # ParallelModel has sent rank 0's tensors already
            gradient_as_bucket_view=True,
            static_graph=strategy.static_graph,
            find_unused_parameters=strategy.find_unused_parameters,
            **BUFFERS_STAY,
        )
        if hook := strategy.world.bucket_hook(COMPRESSION.get(strategy.compress or "")):
            self._replica.register_comm_hook(strategy.world.group, hook)
        # DDP reorders its buckets after the first backward, which changes the order in which gloo adds, and so the last
        # bits: without this trial a resumed run would differ from one without a stop. A static graph also needs its
        # first backward to be synchronised.
        synchronised, alone = unflatten_output(self._replica), super().wrap()

        def forward(*args: Any) -> Any:
            # without a backward nothing is sent, and DDP's records of each forward take longer than a small network
            return (synchronised if torch.is_grad_enabled() else alone)(*args)

        self._trial_backward(forward)
        return forward

    @override
    def grad_sync_context(self, last: bool) -> Any:
        return nullcontext() if last else self._replica.no_sync()

    @override
    def finish_gradients(self) -> None:
        # DDP itself would fail in the next forward, after a step with gradients that were not averaged
        unused = [] if self.strategy.find_unused_parameters or self.strategy.static_graph else self._without_gradient()
        if unused:
            raise FatalRunError(
                f"these parameters get no gradient from the samples of rank {self.strategy.world.rank}:"
                f" {format_names(unused, 8)}; set strategy.find_unused_parameters=true"
            )

    def _without_gradient(self) -> list[str]:
        """Names of trainable parameters that have no gradient."""
        return [name for name, parameter in self._trained.items() if parameter.grad is None]

    def _trial_backward(self, forward: Forward) -> list[str]:
        """Collective if `forward` is: a backward without effects. Returns the parameters that get no gradient."""
        self.set_mode(training=True)
        device = self.strategy.device
        rng_state = torch.random.fork_rng([device] if device.type != "cpu" else [], device_type=device.type)
        with preserve_untrained(self.network), rng_state, self.compute_context(), without_compile():
            self.losses(forward, *self.example)["loss"].backward()
        unused = self._without_gradient()
        self.network.zero_grad(set_to_none=True)
        return unused
