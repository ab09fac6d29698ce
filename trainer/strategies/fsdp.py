"""FSDP2: parameters, gradients and optimizer state are sharded over the data ranks (ZeRO-2 and ZeRO-3)."""

from __future__ import annotations

from contextlib import ExitStack
from dataclasses import dataclass
from typing import Any, ClassVar, Literal

import torch
from torch import Tensor, nn
from typing_extensions import override

from trainer.learning.task import Task
from trainer.messages import Refusal, format_names
from trainer.parallel.expert_parallel import ExpertRanks
from trainer.parallel.fully_shard import (
    DifferentCalls,
    SameCallsCheck,
    Sharding,
    apply_fully_shard,
    reshard,
)
from trainer.parallel.module_units import find_units
from trainer.parallel.unused_parameters import UnusedParameters, always_called_units, find_always_used
from trainer.strategies.loss import FlatOutput, Forward, TaskNetwork, unflatten_output
from trainer.strategies.multi_process import Meshed
from trainer.strategies.parallel_model import ParallelModel
from trainer.strategies.sharded_model import ContextParallelModel


@dataclass
class FSDP(Meshed):
    """Each rank holds a shard of every parameter; a unit is gathered when it computes, and released.

    Degrees multiply to the processes: `replicate` copies (HSDP), each spread over `shard` × `context` ranks, of which
    those along `context` share samples by sequence, and split over `tensor` ranks by the plan before that.
    """

    axis: ClassVar[str] = "shard"
    narrowing: ClassVar[tuple[str, ...]] = ("param_dtype",)
    replicate: int = 1  # copies of the network; they average gradients
    shard: int | None = None  # ranks that one copy is spread over; None: what the others leave
    context: int = 1  # ranks that share samples by sequence, by the plan; parameters are spread over them, too
    tensor: int = 1  # ranks that a layer is split over, by the plan; keep them on one machine
    expert: int = 1  # of replicate × shard × context ranks so many share the experts of each block, by the plan
    reshard_after_forward: bool = True  # true: gathered anew for the backward (ZeRO-3); false: kept until then (ZeRO-2)
    sync_micro_batches: bool = False  # gradients travel after each micro-batch: more traffic, no whole gradient is kept
    param_dtype: Literal["bf16"] | None = None  # what parameters are gathered in; masters stay fp32. None: as they are
    cpu_offload: bool = False  # shards and optimizer state lie in the host's memory; the optimizer runs there
    prefetch: int = 1  # units gathered before they are needed

    @property
    @override
    def name(self) -> str:
        words = {"hsdp" if self.replicate > 1 else "fsdp": 2, "cp": self.context, "tp": self.tensor, "ep": self.expert}
        return "_".join(word for word, degree in words.items() if degree > 1)

    @override
    def check(self, task: Task, network: nn.Module, world_size: int) -> None:
        """Refuse also units that are not there, and experts that cannot be spread."""
        super().check(task, network, world_size)
        plan = task.plan(network)
        find_units(network, plan)
        if self.expert < 1:
            raise Refusal(f"strategy.expert={self.expert}: a degree is 1 (nothing) or more")
        if self.expert > 1:
            ExpertRanks.refuse(network, plan, self.expert, world_size // self.tensor)

    @override
    def notes(self, network: nn.Module) -> list[str]:
        mesh, *others = super().notes(network)
        return [f"{mesh}; experts over {self.expert} data ranks", *others] if self.expert > 1 else [mesh, *others]

    @override
    def refuse_compile(self) -> None:
        super().refuse_compile()
        if self.machine.compile is not None and self.machine.compile.scope == "network":
            raise Refusal(
                f"strategy={self.name} compile.scope=network: each unit is gathered before it runs, so no graph can"
                " span two of them; use compile.scope=units, or leave it out"
            )
        if self.machine.compile is not None and self.expert > 1:
            mode, recomputed = self.machine.compile.mode, self.activation_checkpointing
            wrong = {
                f"compile.mode={mode}": mode != "default",
                "compile.fullgraph=true": self.machine.compile.fullgraph,
                f"strategy.activation_checkpointing={recomputed}": recomputed != "none",
            }
            for words in (key for key, is_so in wrong.items() if is_so):
                raise Refusal(
                    f"strategy.expert={self.expert} {words}: the graph of a unit ends where its tokens travel to their"
                    " experts, and goes on behind that; compile.mode=default works, with fullgraph and"
                    " activation_checkpointing left out"
                )

    @override
    def build(self, task: Task, network: nn.Module, example: Any) -> ParallelModel:
        return FSDPModel(self, task, network, example)


class FSDPModel(ContextParallelModel):
    strategy: FSDP

    @override
    def unit_names(self) -> list[str]:
        # each unit is gathered before it runs, so no compiled graph can span two of them
        self._use = find_always_used(TaskNetwork(self.task, self.network), self.example, self.strategy.world)
        units = find_units(self.network, self.plan)
        if through := [name for name in units if name in self._use.differentiated]:
            self._notes += [
                f"the forward takes gradients through {format_names(through, 5)}, so this is gathered with what is"
                " around it, for the whole forward and backward; strategy=zero1 sends less"
            ]
        return always_called_units(self.network, units, self._use)

    @override
    def shard(self, names: list[str]) -> None:
        # the root is the whole step: a task may use the network in any way, because all is gathered when it runs
        strategy = self.strategy
        how = Sharding(strategy.reshard_after_forward, strategy.param_dtype, strategy.cpu_offload, strategy.prefetch)
        self._flat_step = FlatOutput(self.step_module)
        self._root, self._units = apply_fully_shard(self._flat_step, self.network, names, strategy.mesh, how)
        self._unused = UnusedParameters(strategy.loss_group)
        self._unused.watch(self._flat_step, self.network, names, self._use)
        self._calls = SameCallsCheck(self._flat_step, self.network, names, strategy.loss_group, self.machine.timeout)
        self._load_values(torch.device("cpu") if strategy.cpu_offload else strategy.device)

    @override
    def wrap(self) -> Forward:
        whole = unflatten_output(self._flat_step)

        def forward(*args: Any) -> Any:
            try:
                return whole(*args)
            except RuntimeError as error:
                if "mixed torch.Tensor and DTensor" in str(error):
                    error.add_note(
                        "A weight is used outside of the unit that holds it, where it is not gathered. Name units in"
                        " the network's plan, Plan(shard=(…)), each of which holds all that uses a weight of it."
                        " Where the forward takes a gradient (torch.autograd.grad), use strategy=zero1."
                    )
                raise

        return forward

    @override
    def grad_sync_context(self, last: bool) -> Any:
        self._root.set_requires_gradient_sync(last or self.strategy.sync_micro_batches)
        return super().grad_sync_context(last)

    @override
    def finish_gradients(self) -> None:
        self._unused.drop_gradients()
        super().finish_gradients()

    @override
    def evaluate(self, batch: Any, valid: int) -> dict[str, Tensor | float]:
        try:
            return super().evaluate(batch, valid)
        except DifferentCalls:  # on all ranks
            self._calls.repeats = True
            reshard(self._flat_step)
            return super().evaluate(batch, valid)

    @override
    def evaluate_batch(self, batch: Any, inputs: Any, targets: Any) -> dict[str, Tensor | float]:
        if self._calls.repeats and not self._calls.ignores_evaluations:
            self._calls.ignores_evaluations = True
            self._notes.append(
                "evaluations call units several times, or ranks call different ones: so the whole network is gathered"
                " for each batch of an evaluation; strategy=zero1 gathers nothing"
            )
        with ExitStack() as stack:
            for unit in self._units if self._calls.ignores_evaluations else ():
                stack.enter_context(unit.gathered(self.strategy.reshard_after_forward))
            sums = super().evaluate_batch(batch, inputs, targets)
        reshard(self._flat_step)  # a forward without a backward leaves parameters gathered
        return sums
