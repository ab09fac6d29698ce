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
from trainer.parallel.gather import dealt
from trainer.parallel.pipeline.cut import cut_stages
from trainer.parallel.pipeline.handover import Handover, InOrder, in_order
from trainer.parallel.pipeline.held import Stages, buffers_kept
from trainer.parallel.pipeline.schedules import make_schedule
from trainer.parallel.pipeline.telling import Telling
from trainer.parallel.replicate import average_gradients
from trainer.parallel.shard import Sharding, not_spread, reshard, shard
from trainer.parallel.tensor import cut
from trainer.parallel.totals import wide
from trainer.parallel.units import matches, units
from trainer.strategies.pipelined import Pipelined
from trainer.strategies.placed import TaskNetwork, is_called
from trainer.strategies.tensor import PlacedTensor


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
        self._layout_of_stages = strategy.layout(strategy.world.size)
        ranks, last = strategy.pipeline, self._layout_of_stages.owner(self._layout_of_stages.count - 1)
        self._handover = Handover(ranks, self._layout_of_stages, strategy.device)
        self._telling = Telling(ranks, last, strategy.device)
        self._schedules: dict[Hashable, Any] = {}  # by the shapes and the number of a step's micro-batches
        self._spreads = strategy.degrees(strategy.world.size)["shard"] > 1  # a stage over several ranks
        super().__init__(strategy, task, network, example, mesh)

    # The network.

    def _lay_out(self, network: nn.Module) -> None:
        if not self._spreads:  # fully_shard takes weights whose rows lie in order
            super()._lay_out(network)

    def _units(self) -> list[str]:
        return units(self.network, self._plan) if self._spreads else super()._units()

    def _compiled(self, names: list[str]) -> list[str]:
        return names if self._spreads else super()._compiled(names)

    def _cut(self) -> None:
        whole, layout = self.network, self._layout_of_stages
        bodies = cut_stages(TaskNetwork(self.task, whole), self._plan.cuts, layout.count, self._cast(self.example))
        own = layout.held_by(self.strategy.pipeline.rank)
        self._stages = {number: Stage(number, bodies[number]) for number in own}
        self.network = Stages(self._pieces(), [name for name, _ in whole.named_modules()])
        if self._mesh:
            for body in self._pieces():
                fitting = {key: style for key, style in self._plan.tensor.items() if any(matches(body, key))}
                here = replace(self._plan, tensor=fitting)
                cut(body, self._mesh, here)
                self._masks.follow(body, here)

    def _pieces(self) -> list[nn.Module]:
        return [stage.body for stage in self._stages.values()]

    def _shard(self, names: list[str]) -> None:
        how = Sharding(self.strategy.reshard_after_forward, self.strategy.param_dtype)
        for stage in self._stages.values() if self._spreads else ():
            own = [name for name in names if is_called(stage.body, name)]
            shard(stage, stage.body, own, self.strategy.mesh, how)

    def _wrap(self, step: TaskNetwork) -> Callable[[Any, Any], Any]:
        self._copied = not_spread(self.network)
        return step  # which nobody calls: the schedule calls stages

    # The verbs of a step.

    def forward_backward(self, batches: list[Any], step: int) -> dict[str, Tensor]:
        """Run every micro-batch of one step through the pipeline; returns the same on all ranks of a pipeline.

        Afterwards `.grad` is the gradient of the global weighted mean, of the parameters that this rank holds.
        """
        self._mode(training=True)
        shares, pending = self._weigh(batches)
        schedule = self._schedule(batches)
        pending.wait()
        sums: dict[str, Tensor] = {}
        for stage in self._stages.values():
            stage.turn = self._learning(stage, batches, step, shares, sums)
        with self._computing():
            # which micro-batch it is each stage counts; torch wants something to cut into targets
            schedule.step(target=torch.arange(len(batches)), return_outputs=False)
        self.watch.lap("forward and backward")
        self._settle_gradients()
        return self._telling.tell("training", sums)

    @torch.no_grad()
    def evaluate(self, batch: Any, valid: int) -> dict[str, Tensor]:
        """Sums over a micro-batch, the same on all ranks of a pipeline; zeros where none is `valid`.

        They go through the stages together, one stage after the other; the stream has cut them as small as a step's.
        """
        self._mode(training=False)
        inputs, targets = batch.inputs, batch.targets
        for stage in self._stages.values():
            stage.turn = partial(self._output if self._is_last(stage) else self._hand_on, stage, inputs, targets)
        with self._computing(), dealt(batch.span), self._machine.autocast(self.strategy.device):
            output = self._handover.run(("evaluation", _shapes(inputs, targets)), self._stages)
            sums = self._sums(output, self._cast(targets), len(batch.indices)) if output is not None else {}
        self._release()
        sums = self._telling.tell("evaluation", sums)
        return sums if valid else {name: torch.zeros_like(value) for name, value in sums.items()}

    def _average(self) -> None:
        average_gradients(self._copied, self.strategy.data, self.strategy.bucket_mb * 2**20)

    def _norm(self, gradients: list[Tensor]) -> Tensor:
        square = super()._norm(gradients).to(self.strategy.device).square()
        self.strategy.pipeline.all_reduce_sum_(square).wait()  # the ranks of this pipeline; one number
        return square.sqrt()

    # What a stage does when it is called.

    def _learning(
        self, stage: Stage, batches: list[Any], step: int, shares: Callable[[int], Any], sums: dict[str, Tensor]
    ) -> Callable[..., Any]:
        """One step's turns of a stage: every schedule gives a stage its micro-batches in order."""
        order = iter(range(len(batches)))

        def turn(*received: Tensor) -> Any:
            index = next(order)
            batch = batches[index]
            numbers = (self._machine.seed, step, index, self.strategy.data_rank, stage.number)
            seed_torch(mix(*numbers), self.strategy.device)
            with dealt(batch.span):
                if not self._is_last(stage):
                    return self._hand_on(stage, batch.inputs, batch.targets, *received)
                parts = self._losses(partial(self._call, stage, received), batch.inputs, batch.targets)
            share = shares(index)
            for name, part in parts.items():
                kept = wide(part.detach()) * share
                sums[name] = sums[name] + kept if name in sums else kept
            # the gradients of the data ranks are averaged: undo it here
            scaled = self.scaler.scale(parts["loss"] * (share * self.strategy.data_size))
            return scaled.to(self._machine.parameter_dtype)  # what the schedule was told to expect

        return turn

    def _hand_on(self, stage: Stage, inputs: Any, targets: Any, *received: Tensor) -> tuple[Any, ...]:
        """What a stage before the last gives to the next."""
        with self._machine.autocast(self.strategy.device):
            return in_order(self._call(stage, received, self._cast(inputs), self._cast(targets)))

    def _output(self, stage: Stage, inputs: Any, targets: Any, *received: Tensor) -> Any:
        return self._whole(self._call(stage, received, self._cast(inputs), self._cast(targets)))

    def _call(self, stage: Stage, received: tuple[Tensor, ...], inputs: Any, targets: Any) -> Any:
        if self.strategy.param_dtype:  # what is no argument of the stage fully_shard does not cast
            inputs, targets = floats_as((inputs, targets), torch.bfloat16)
        return stage.body(inputs, targets, *self._cast(tuple(InOrder.apply(value) for value in received)))

    def _is_last(self, stage: Stage) -> bool:
        return stage.number == self._layout_of_stages.count - 1

    # The schedule.

    def _schedule(self, batches: list[Any]) -> Any:
        """The schedule for micro-batches of these shapes. Collective where it is new on some data rank."""
        shapes = {_shapes(batch.inputs, batch.targets) for batch in batches}
        if len(shapes) > 1:
            raise RuntimeError("the micro-batches of a step differ in shape; those of a pipeline must be alike")
        key = ("training", *shapes)
        new = torch.tensor([(key, len(batches)) not in self._schedules], dtype=torch.uint8)
        if self._spreads or self.strategy.sync_bn:  # then a forward is collective over the data ranks
            self.strategy.data.all_reduce_max_(new).wait()  # one byte: is it new to any of them?
        if new:
            self._try(key, batches[0])
            self._schedules[key, len(batches)] = self._made(key, len(batches))
        return self._schedules[key, len(batches)]

    def _try(self, key: Hashable, batch: Any) -> None:
        """Collective over the pipeline: one forward that leaves no trace, to see which shapes are handed on."""
        for stage in self._stages.values():
            stage.turn = partial(self._hand_on, stage, batch.inputs, batch.targets)
        calls = {n: (lambda *_: ()) if self._is_last(stage) else stage for n, stage in self._stages.items()}
        with torch.no_grad(), self._computing(), dealt(batch.span), buffers_kept(self.network):
            self._handover.run(key, calls)
        self._release()

    def _made(self, key: Hashable, micro_batches: int) -> Any:
        from torch.distributed.pipelining import PipelineStage  # here, because the import takes seconds

        count, loss = self._layout_of_stages.count, torch.empty((), dtype=self._machine.parameter_dtype, device="meta")
        stages = [
            PipelineStage(
                stage,
                number,
                count,
                self.strategy.device,
                input_args=self._learnable(key, number),
                output_args=loss if self._is_last(stage) else self._learnable(key, number + 1),
                group=self.strategy.pipeline.group,
            )
            for number, stage in self._stages.items()
        ]
        return make_schedule(self.strategy.schedule, stages, micro_batches)

    def _learnable(self, key: Hashable, number: int) -> tuple[Tensor, ...]:
        """What a stage receives, as tensors that a gradient comes back for."""
        received = self._handover.received(key, number)
        for value in received:
            if not value.is_floating_point():
                raise RuntimeError(
                    f"stage {number} would receive {value.dtype} of shape {tuple(value.shape)}, through which no"
                    " gradient can come back: cut elsewhere, in the plan's cuts"
                )
        return tuple(value.requires_grad_() for value in received)

    def _release(self) -> None:
        """A forward without a backward leaves parameters gathered."""
        for stage in self._stages.values():
            reshard(stage)


def _shapes(inputs: Any, targets: Any) -> Hashable:
    return tuple((tuple(tensor.shape), str(tensor.dtype)) for tensor in tensors((inputs, targets)))
