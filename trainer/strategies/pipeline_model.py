"""`ParallelModel` for pipelines: the stages of a network that this rank holds, with the methods of a step."""

from __future__ import annotations

from collections.abc import Callable, Hashable
from dataclasses import replace
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from typing_extensions import override

from trainer.data.nested_tensors import cast_floats, tensors
from trainer.learning.freezing import preserve_untrained
from trainer.learning.task import Task
from trainer.parallel.batch_gather import set_gather_span
from trainer.parallel.buckets import Sums
from trainer.parallel.context_parallel import count_tokens
from trainer.parallel.fully_shard import SameCallsCheck, Sharding, apply_fully_shard, reshard
from trainer.parallel.module_units import find_units, matching_modules, present_units
from trainer.parallel.pipeline.cut import cut_stages
from trainer.parallel.pipeline.schedule import (
    ContiguousGradient,
    StageChain,
    StageLayout,
    broadcast_sums,
    contiguous_copies,
    make_pipeline_schedule,
)
from trainer.parallel.pipeline.stages import RankStages
from trainer.parallel.process_group import as_group
from trainer.parallel.unused_parameters import UnusedParameters, always_called_units, find_always_used
from trainer.strategies.loss import TaskNetwork, evaluation_sums
from trainer.strategies.multi_process import Meshed
from trainer.strategies.sharded_model import ShardedModel


class Stage(nn.Module):
    """One stage as a schedule calls it, with the tensors from the stage before. `compute` is set for each step."""

    compute: Callable[..., Any]

    def __init__(self, number: int, body: nn.Module) -> None:
        super().__init__()
        self.number, self.body = number, body

    @override
    def forward(self, *received: Tensor) -> Any:
        """The tensors for the next stage; of the last stage the loss, or in an evaluation the output."""
        return self.compute(received)


class PipelineModel(ShardedModel):
    """Some stages of a network. `network` holds those of this rank, under the whole network's names."""

    interleaves = True

    def __init__(
        self,
        strategy: Meshed,
        task: Task,
        network: nn.Module,
        example: Any,
        layout: StageLayout,
        schedule: str,
        sharding: Sharding,
    ) -> None:
        self._layout, self._schedule_name, self._sharding = layout, schedule, sharding
        self._last = layout.count - 1  # the number of the stage that knows losses
        self._pipeline = as_group(strategy.mesh.get_group("pipe"))  # in the order of their first stages
        self._handover = StageChain(self._pipeline, layout, strategy.device)
        self._schedules: dict[Hashable, Any] = {}  # by the shapes and the number of a step's micro-batches
        self._sums_like: dict[str, dict[str, Tensor]] = {"training": {}, "evaluation": {}}  # what has travelled before
        self._is_spread = "shard" in (strategy.mesh.mesh_dim_names or ())  # is a stage spread over several ranks?
        super().__init__(strategy, task, network, example)

    # the network

    @override
    def unit_names(self) -> list[str]:
        if not self._is_spread:
            return super().unit_names()
        self._use = find_always_used(TaskNetwork(self.task, self.network), self.example, self.strategy.world)
        return always_called_units(self.network, find_units(self.network, self.plan), self._use)

    @override
    def parallelize(self) -> list[nn.Module]:
        whole, rank = self.network, self._pipeline.rank
        example = self.memory_format.cast(self.example)
        # every rank cuts the whole network, which has no values yet, and keeps its stages
        step, held = TaskNetwork(self.task, whole), self._layout.stages_of(rank)
        bodies = cut_stages(
            step, self.plan.cuts, self._layout.count, example, held, may_draw=self.strategy.dropout == "sample"
        )
        self._stages = {number: Stage(number, body) for number, body in bodies.items()}
        local: list[nn.Module] = [stage.body for stage in self._stages.values()]
        self.network = RankStages(local, [name for name, _ in whole.named_modules()])
        for body in local:  # torch refuses keys of the plan that match nothing in this stage
            fitting = {key: style for key, style in self.plan.tensor.items() if any(matching_modules(body, key))}
            self._split(body, replace(self.plan, tensor=fitting))
        return local

    @override
    def shard(self, names: list[str]) -> None:
        ranks = self.strategy.loss_group
        self._unused = UnusedParameters(ranks)
        for stage in self._stages.values() if self._is_spread else ():
            units = present_units(stage.body, names)
            apply_fully_shard(stage, stage.body, units, self.strategy.mesh, self._sharding)
            self._unused.watch(stage, stage.body, units, self._use)
            SameCallsCheck(stage, stage.body, units, ranks, self.machine.timeout)
        self._load_values(self.strategy.device)

    # the methods of a step

    @override
    def run_micro_batches(self, batches: list[Any], step: int, share_of: Callable[[int], Any]) -> dict[str, Tensor]:
        """Every micro-batch through the pipeline. Returns the same on all its ranks: callers know no stages."""
        # torch's schedules must know beforehand which shapes are sent
        schedule = self._get_schedule(batches)
        sums: dict[str, Tensor] = {}
        # what a stage computes when the schedule calls it; only the last stage fills the sums
        for stage in self._stages.values():
            stage.compute = self._make_compute(stage, batches, step, share_of, sums)
        with self.rng, self.compute_context():
            # each stage counts its micro-batches; torch needs something to chunk as targets
            schedule.step(target=torch.arange(len(batches)), return_outputs=False)
        return self._broadcast_sums("training", sums)

    @override
    def evaluate_batch(self, batch: Any, inputs: Any, targets: Any) -> dict[str, Tensor | float]:
        output, _ = self._forward_stages(inputs, targets, batch.indices)
        sums: dict[str, Tensor | float] = {}
        if self._last in self._stages:
            sums = evaluation_sums(
                self.task, self.rng.call_outside, self.gather_output(output), targets, len(batch.indices)
            )
        return {**self._broadcast_sums("evaluation", sums)}

    def _forward_stages(self, inputs: Any, targets: Any, indices: Tensor) -> tuple[Any, dict[int, tuple[Tensor, ...]]]:
        """Collective over the pipeline: a forward alone; the output, where the last stage is, and what went in."""
        for stage in self._stages.values():
            stage.compute = partial(self._evaluate_stage, stage, indices, inputs=inputs, targets=targets)
        output, handed = self._handover.run(self._stages)
        for stage in self._stages.values():
            reshard(stage)  # a forward without a backward leaves parameters gathered
        return output, handed

    def _broadcast_sums(self, occasion: str, sums: Sums) -> dict[str, Tensor]:
        """Collective over the pipeline: what the rank of the last stage has added up."""
        source = self._layout.owner(self._last)
        return broadcast_sums(sums, self._sums_like[occasion], source, self._pipeline, self.strategy.device)

    @override
    def finish_gradients(self) -> None:
        self._unused.drop_gradients()
        super().finish_gradients()

    @override
    def grad_norm(self, gradients: list[Tensor]) -> Tensor:
        # of a frozen stage a zero, in the type of the others' norms
        square = super().grad_norm(gradients).to(self.strategy.device, self.machine.parameter_dtype).square()
        return self._pipeline.sum_in_order(square).sqrt()  # the ranks of this pipeline; other copies add the same

    # what a stage computes when it is called

    def _make_compute(
        self, stage: Stage, batches: list[Any], step: int, share_of: Callable[[int], Any], sums: dict[str, Tensor]
    ) -> Callable[..., Any]:
        """One step's turns of a stage: every schedule gives a stage its micro-batches in order."""
        order = iter(range(len(batches)))

        def compute(received: tuple[Tensor, ...]) -> Any:
            index = next(order)
            batch, place = batches[index], self.strategy
            # as on one device, but different random numbers for each stage
            self.rng.begin_forward(batch.indices, step, index, place.data_group.rank, stage.number)
            with set_gather_span(batch.span):
                if stage.number != self._last:
                    return self._run_stage(stage, received, batch.inputs, batch.targets)
                loss = self.share_of_loss(
                    partial(self._run_stage, stage, received), batch, partial(share_of, index), sums
                )
            return loss.to(self.machine.parameter_dtype)  # the type that the schedule expects

        return compute

    def _evaluate_stage(
        self, stage: Stage, indices: Tensor, received: tuple[Tensor, ...], inputs: Any, targets: Any
    ) -> Any:
        """The same in an evaluation: the random numbers do not depend on the other stages of this rank."""
        self.rng.begin_evaluation(indices)
        return self._run_stage(stage, received, inputs, targets)

    def _run_stage(self, stage: Stage, received: tuple[Tensor, ...], inputs: Any, targets: Any) -> Any:
        """The forward of a stage: the output of the network, or tensors for the next stage."""
        with self.machine.autocast(self.strategy.device):
            inputs, targets = self.memory_format.cast((inputs, targets))
            if self._sharding.param_dtype:  # what is no argument of the stage fully_shard does not cast
                inputs, targets = cast_floats((inputs, targets), torch.bfloat16)
            self.rng.set_tokens(count_tokens(inputs))
            came = self.memory_format.cast(tuple(ContiguousGradient.apply(value) for value in received))
            output = stage.body(inputs, targets, *came)
            return output if stage.number == self._last else contiguous_copies(output)

    # the schedule

    def _get_schedule(self, batches: list[Any]) -> Any:
        """Collective: the schedule for micro-batches of these shapes."""
        trees = [tensors((batch.inputs, batch.targets)) for batch in batches]
        shapes = {tuple((tuple(tensor.shape), tensor.dtype) for tensor in tree) for tree in trees}
        if len(shapes) > 1:
            raise RuntimeError(
                "the micro-batches of a step differ in shape, and those of a pipeline must be alike; pad them to one"
                " length, or use strategy=ddp or fsdp"
            )
        key = (*shapes, len(batches))
        # a forward may be collective over the data ranks: it gathers a stage, or a task's `gather` rows
        # the data ranks; one byte: is it new to any of them?
        if any(self.strategy.data_group.max_values([key not in self._schedules])):
            # one forward without effects, to see which shapes are sent; some schedules gather them ahead
            with (
                torch.no_grad(),
                self.compute_context(),
                set_gather_span(batches[0].span),
                preserve_untrained(self.network),
            ):
                _, handed = self._forward_stages(batches[0].inputs, batches[0].targets, batches[0].indices)
            self._schedules[key] = self._build_schedule(handed, len(batches))
        return self._schedules[key]

    def _build_schedule(self, handed: dict[int, tuple[Tensor, ...]], micro_batches: int) -> Any:
        from torch.distributed.pipelining import PipelineStage  # here, because the import takes seconds

        loss = torch.empty((), dtype=self.machine.parameter_dtype, device="meta")
        stages = [
            PipelineStage(
                stage,
                number,
                self._layout.count,
                self.strategy.device,
                input_args=_receive_buffers(handed[number]),
                output_args=loss if number == self._last else _receive_buffers(handed[number + 1]),
                group=self._pipeline.group,
            )
            for number, stage in self._stages.items()
        ]
        return make_pipeline_schedule(self._schedule_name, stages, micro_batches)


def _receive_buffers(received: tuple[Tensor, ...]) -> tuple[Tensor, ...]:
    """Empty tensors like those that a stage receives, which a gradient comes back for."""
    return tuple(torch.empty_like(value, requires_grad=True) for value in received)
