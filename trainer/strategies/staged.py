"""The stages of a network that one rank holds, with the verbs of a step."""

from __future__ import annotations

from collections.abc import Callable, Hashable
from dataclasses import replace
from functools import partial
from typing import Any

import torch
from torch import Tensor, fx, nn
from torch.distributed.device_mesh import DeviceMesh

from trainer.data.seeds import mix, seed_torch
from trainer.data.tree import floats_as, tensors
from trainer.learning.task import Task
from trainer.parallel.buckets import average_gradients
from trainer.parallel.gather import dealt
from trainer.parallel.pipeline.cut import cut_stages
from trainer.parallel.pipeline.handover import Handover, InOrder, broadcast_sums, in_order
from trainer.parallel.pipeline.held import Stages, buffers_kept
from trainer.parallel.pipeline.schedules import make_schedule
from trainer.parallel.shard import Sharding, not_spread, reshard, shard
from trainer.parallel.units import called, matches, units
from trainer.strategies.loss import add_share, evaluation_sums, weigh
from trainer.strategies.pipelined import Pipelined
from trainer.strategies.placed import TaskNetwork
from trainer.strategies.placed_tensor import PlacedTensor


class Stage(nn.Module):
    """One stage as a schedule calls it: with what the stage before handed on. What a call does is said for each use."""

    turn: Callable[..., Any]

    def __init__(self, number: int, body: fx.GraphModule) -> None:
        super().__init__()
        self.number, self.body = number, body

    def forward(self, *received: Tensor) -> Any:
        """What the stage hands on; of the last one the loss, or the output where nothing is learned."""
        return self.turn(*received)


class PlacedStages(PlacedTensor):
    """Some stages of a network. `network` holds those of this rank, under the whole network's names."""

    strategy: Pipelined

    def __init__(
        self, strategy: Pipelined, task: Task, network: nn.Module, example: Any, mesh: DeviceMesh | None
    ) -> None:
        self._layout = strategy.layout(strategy.world.size)
        self._last = self._layout.count - 1  # the number of the stage that knows losses
        self._handover = Handover(strategy.pipeline, self._layout, strategy.device)
        self._sums_like: dict[str, dict[str, Tensor]] = {"training": {}, "evaluation": {}}  # what has travelled before
        self._schedules: dict[Hashable, Any] = {}  # by the shapes and the number of a step's micro-batches
        self._spreads = strategy.degrees(strategy.world.size)["shard"] > 1  # a stage over several ranks
        super().__init__(strategy, task, network, example, mesh)

    # The network.

    def _units(self) -> list[str]:
        return units(self.network, self._plan) if self._spreads else super()._units()

    def _cut(self) -> list[nn.Module]:
        whole, rank = self.network, self.strategy.pipeline.rank
        example = self._form.cast(self.example)
        bodies = cut_stages(TaskNetwork(self.task, whole), self._plan.cuts, self._layout.count, example)
        self._stages = {number: Stage(number, bodies[number]) for number in self._layout.held_by(rank)}
        own: list[nn.Module] = [stage.body for stage in self._stages.values()]
        self.network = Stages(own, [name for name, _ in whole.named_modules()])
        for body in own:  # of the plan, what lies in this stage: a key that fits nothing would be refused
            fitting = {key: style for key, style in self._plan.tensor.items() if any(matches(body, key))}
            self._split(body, replace(self._plan, tensor=fitting))
        return own

    def _shard(self, names: list[str]) -> None:
        how = Sharding(self.strategy.reshard_after_forward, self.strategy.param_dtype)
        for stage in self._stages.values() if self._spreads else ():
            shard(stage, stage.body, called(stage.body, names), self.strategy.mesh, how)
        self._fill(self.strategy.device)
        self._copied = not_spread(self.network)

    # The verbs of a step.

    def forward_backward(self, batches: list[Any], step: int) -> dict[str, Tensor]:
        """Run every micro-batch of one step through the pipeline; returns the same on all ranks of a pipeline.

        Afterwards `.grad` is the gradient of the global weighted mean, of the parameters that this rank holds.
        """
        self._mode(training=True)
        share_of, pending = weigh(self.task, batches, self.strategy.data, self.strategy.device)
        # torch's schedules must know beforehand which shapes travel
        schedule = self._schedule(batches)
        pending.wait()
        sums: dict[str, Tensor] = {}
        # what a stage does in this step when the schedule calls it; only the last one's calls fill the sums
        for stage in self._stages.values():
            stage.turn = self._learning(stage, batches, step, share_of, sums)
        with self._computing():
            # which micro-batch it is each stage counts; torch wants something to cut into targets
            schedule.step(target=torch.arange(len(batches)), return_outputs=False)
        self.watch.lap("forward and backward")
        self._settle_gradients()
        # so that nobody above knows of stages
        return self._told("training", sums)

    @torch.no_grad()
    def evaluate(self, batch: Any, valid: int) -> dict[str, Tensor]:
        """Sums over a micro-batch, the same on all ranks of a pipeline; zeros where none is `valid`."""
        self._mode(training=False)
        self._take_turns(batch)
        with self._computing(), dealt(batch.span), self._machine.autocast(self.strategy.device):
            output, _ = self._handover.run(self._stages)
            sums: dict[str, Tensor] = {}
            if self._last in self._stages:
                sums = evaluation_sums(self.task, output, self._form.cast(batch.targets), len(batch.indices))
        self._release()
        sums = self._told("evaluation", sums)
        return sums if valid else {name: torch.zeros_like(value) for name, value in sums.items()}

    def _told(self, occasion: str, sums: dict[str, Tensor]) -> dict[str, Tensor]:
        """Collective over the pipeline: what the rank of the last stage has added up."""
        source, ranks = self._layout.owner(self._last), self.strategy.pipeline
        return broadcast_sums(sums, self._sums_like[occasion], source, ranks, self.strategy.device)

    def _average(self) -> None:
        average_gradients(self._copied, self.strategy.data, self.strategy.bucket_mb * 2**20)

    def _norm(self, gradients: list[Tensor]) -> Tensor:
        square = super()._norm(gradients).to(self.strategy.device).square()
        self.strategy.pipeline.all_reduce_sum_(square).wait()  # the ranks of this pipeline; one number
        return square.sqrt()

    # What a stage does when it is called.

    def _learning(
        self, stage: Stage, batches: list[Any], step: int, share_of: Callable[[int], Any], sums: dict[str, Tensor]
    ) -> Callable[..., Any]:
        """One step's turns of a stage: every schedule gives a stage its micro-batches in order."""
        order = iter(range(len(batches)))

        def turn(*received: Tensor) -> Any:
            index = next(order)
            batch = batches[index]
            numbers = (self._machine.seed, step, index, self.strategy.data_rank, stage.number)
            seed_torch(mix(*numbers), self.strategy.device)
            with dealt(batch.span):
                if stage.number != self._last:
                    return self._hand_on(stage, batch.inputs, batch.targets, *received)
                losses = self._losses(partial(self._call, stage, received), batch.inputs, batch.targets)
            share = share_of(index)
            add_share(sums, losses, share)
            # the gradients of the data ranks are averaged: undo it here
            scaled = self.scaler.scale(losses["loss"] * (share * self.strategy.data_size))
            return scaled.to(self._machine.parameter_dtype)  # what the schedule was told to expect

        return turn

    def _take_turns(self, batch: Any) -> None:
        """Each stage is to be called once, and nothing to be learned."""
        for stage in self._stages.values():
            turn = self._output if stage.number == self._last else self._hand_on
            stage.turn = partial(turn, stage, batch.inputs, batch.targets)

    def _hand_on(self, stage: Stage, inputs: Any, targets: Any, *received: Tensor) -> tuple[Any, ...]:
        """What a stage before the last gives to the next."""
        with self._machine.autocast(self.strategy.device):
            return in_order(self._call(stage, received, self._form.cast(inputs), self._form.cast(targets)))

    def _output(self, stage: Stage, inputs: Any, targets: Any, *received: Tensor) -> Any:
        with self._machine.autocast(self.strategy.device):
            return self._whole(self._call(stage, received, self._form.cast(inputs), self._form.cast(targets)))

    def _call(self, stage: Stage, received: tuple[Tensor, ...], inputs: Any, targets: Any) -> Any:
        if self.strategy.param_dtype:  # what is no argument of the stage fully_shard does not cast
            inputs, targets = floats_as((inputs, targets), torch.bfloat16)
        return stage.body(inputs, targets, *self._form.cast(tuple(InOrder.apply(value) for value in received)))

    # The schedule.

    def _schedule(self, batches: list[Any]) -> Any:
        """The schedule for micro-batches of these shapes. Collective where it is new on some data rank."""
        shapes = {_shapes(batch.inputs, batch.targets) for batch in batches}
        if len(shapes) > 1:
            raise RuntimeError("the micro-batches of a step differ in shape; those of a pipeline must be alike")
        key = (*shapes, len(batches))
        new = torch.tensor([key not in self._schedules], dtype=torch.uint8)
        if self._spreads or self.strategy.sync_bn:  # then a forward is collective over the data ranks
            self.strategy.data.all_reduce_max_(new).wait()  # the data ranks; one byte: is it new to any of them?
        if new:
            self._schedules[key] = self._made(self._tried(batches[0]), len(batches))
        return self._schedules[key]

    def _tried(self, batch: Any) -> dict[int, tuple[Tensor, ...]]:
        """Collective over the pipeline: one forward that leaves no trace, to see which shapes are handed on."""
        self._take_turns(batch)  # the last stage too, though it hands on nothing: some schedules gather it ahead
        with torch.no_grad(), self._computing(), dealt(batch.span), buffers_kept(self.network):
            _, handed = self._handover.run(self._stages)
        self._release()
        return handed

    def _made(self, handed: dict[int, tuple[Tensor, ...]], micro_batches: int) -> Any:
        from torch.distributed.pipelining import PipelineStage  # here, because the import takes seconds

        loss = torch.empty((), dtype=self._machine.parameter_dtype, device="meta")
        stages = [
            PipelineStage(
                stage,
                number,
                self._layout.count,
                self.strategy.device,
                input_args=_learnable(number, handed[number]),
                output_args=loss if number == self._last else _learnable(number + 1, handed[number + 1]),
                group=self.strategy.pipeline.group,
            )
            for number, stage in self._stages.items()
        ]
        return make_schedule(self.strategy.schedule, stages, micro_batches)

    def _release(self) -> None:
        """A forward without a backward leaves parameters gathered."""
        for stage in self._stages.values():
            reshard(stage)


def _learnable(number: int, received: tuple[Tensor, ...]) -> tuple[Tensor, ...]:
    """What a stage receives, as tensors that a gradient comes back for."""
    for value in received:
        if not value.is_floating_point():
            raise RuntimeError(
                f"stage {number} would receive {value.dtype} of shape {tuple(value.shape)}, through which no"
                " gradient can come back: cut elsewhere, in the plan's cuts"
            )
    return tuple(torch.empty_like(value, requires_grad=True) for value in received)


def _shapes(inputs: Any, targets: Any) -> Hashable:
    return tuple((tuple(tensor.shape), str(tensor.dtype)) for tensor in tensors((inputs, targets)))
