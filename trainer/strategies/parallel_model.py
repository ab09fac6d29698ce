"""`ParallelModel`: one network on this rank, with the methods of a step. This base class is for one device."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from trainer.learning.optimizer import Groups, Make
from trainer.learning.parallel_plan import Plan
from trainer.learning.task import Task
from trainer.learning.weight_switch import NoWeightSwitch
from trainer.parallel.activation_checkpointing import apply_activation_checkpointing
from trainer.parallel.activation_offload import make_offload
from trainer.parallel.batch_gather import set_gather_ranks, set_gather_span
from trainer.parallel.batch_norm import average_statistics, synchronise_batch_norms
from trainer.parallel.compile import make_compiler, without_compile
from trainer.parallel.context_parallel import Pieces
from trainer.parallel.gradient_clipping import clip_gradients_, global_norm
from trainer.parallel.module_units import find_units, present_units
from trainer.parallel.optimizer_state import (
    empty_optimizer_state,
    optimizer_tensors,
    refuse_checkpoint_shapes,
    restore_optimizer,
)
from trainer.parallel.ranks import Ranks, gather_exceptions
from trainer.parallel.rng.native_rng import TorchRNG
from trainer.parallel.rng.sample_rng import make_rng
from trainer.parallel.step_counters import StepCounters
from trainer.strategies.ema import MovingAverage, NoMovingAverage
from trainer.strategies.loss import (
    Forward,
    MemoryFormat,
    TaskNetwork,
    accumulate_losses,
    backward,
    check_first_gradients,
    evaluation_sums,
    explain_no_gradient,
    loss_shares,
    name_losses,
    refuse_extra_state,
    refuse_replaced_parameters,
    scale_loss,
    to_precision,
    zero_sums,
)
from trainer.strategies.loss_scaler import NoScaler, Scaler, StepSkipper
from trainer.strategies.machine import NOTHING, Machine
from trainer.strategies.mean_check import MeanCheckingTask
from trainer.strategies.rank_context import RankContext
from trainer.strategies.step_timing import NoUtilization


class ParallelModel:
    """The network on this rank, and the parts of a training step; `network` keeps its module and parameter names."""

    network: nn.Module  # the trained network, or the part of it that this rank holds
    plan: Plan  # of the whole network
    shapes: dict[str, torch.Size]  # of the whole network's tensors
    step_module: nn.Module  # task and network as one module, for DDP or FSDP to wrap
    forward: Forward  # what `wrap` has returned: (inputs, targets) → the network's output
    rng: TorchRNG  # whose random numbers a forward has
    memory_format: MemoryFormat  # `cast` gives a batch the type and layout of the weights
    machine: Machine  # the strategy's
    before_first_step: bool  # has no step been done?
    interleaves = False  # are several micro-batches of a step under way at once?

    def __init__(self, strategy: RankContext, task: Task, network: nn.Module, example: Any) -> None:
        self.strategy, self.task, self.example = strategy, task, example
        self.machine, self.before_first_step = strategy.machine, True
        self.watch, self.average = strategy.watch, NoMovingAverage()
        self.work = NoUtilization()  # until the operations of a step were counted
        half = self.machine.resolved_precision == "fp16"
        self.switch = NoWeightSwitch()  # until there is an optimizer
        self._notes: list[str] = []  # that nobody has heard yet
        self.shares: list[Any] = []  # of each micro-batch in the last step
        self.scaler = Scaler(strategy.device, strategy.loss_group.size) if half else NoScaler()
        # first the types of parameters and layers, which all that follows depends on
        network = to_precision(network, task, self.machine)
        if strategy.sync_bn:
            network = synchronise_batch_norms(network, strategy.loss_group, strategy.device)
        refuse_extra_state(network)
        self.rng = make_rng(strategy.dropout, self.machine.seed, strategy.device)
        self.compiler = make_compiler(self.machine.compile, self.rng)
        # facts of the whole network, while this rank has all its names and shapes
        self.shapes = {name: value.shape for name, value in network.state_dict().items()}
        self.plan = task.plan(network)
        self.rng.watch(network, self.plan)
        self.counters = StepCounters(network, self.plan)
        self.memory_format = MemoryFormat(network, self.machine.parameter_dtype, self.machine.channels_last)
        # on the device with its values; or on the meta device, if no rank need hold all of it
        self.network = self.materialize(network)
        names = self.unit_names()
        # before sharding over data ranks: recomputing wraps split layers, and a compiled graph contains both
        offload = make_offload(strategy.host_copies(strategy.device) if strategy.activation_offload else None)
        for piece in self.parallelize():
            units = present_units(piece, names)
            apply_activation_checkpointing(piece, units, strategy.activation_checkpointing)
            self.compiler.compile_units(piece, units, strategy.activation_checkpointing != "none")
            offload.apply(piece, units)  # around both: a unit that is recomputed keeps its inputs
        # parameters become what the optimizer gets (perhaps shards), and then the step is wrapped
        self.step_module = TaskNetwork(task, self.network)
        self.shard(names)
        self.forward = self.wrap()

    # what a strategy overrides: for the network, then for a step, in the order of time

    def materialize(self, network: nn.Module) -> nn.Module:
        """Collective: the network on this rank's device, with the values of rank 0."""
        network = network.to(self.strategy.device)
        self.memory_format.convert_weights(network)
        for tensor in (*network.parameters(), *network.buffers()):
            self.strategy.world.broadcast_(tensor.detach())  # all ranks; each tensor, from rank 0
        return network

    def unit_names(self) -> list[str]:
        """The subtrees that are recomputed, offloaded, compiled, sharded as units; none: the whole is compiled."""
        if not self.strategy.uses_units and not self.compiler.wants_units(self.plan):
            return []
        return find_units(self.network, self.plan)

    def parallelize(self) -> list[nn.Module]:
        """Change the network in place: split layers, keep some stages. Returns what is called as a whole."""
        return [self.network]

    def shard(self, names: list[str]) -> None:
        """Collective: shard parameters over the data ranks, by these units. All have values afterwards."""

    def wrap(self) -> Forward:
        """What a forward calls: the task over the network, or a wrapper around them."""
        return partial(self.task.forward, self.network)

    def compute_context(self) -> Any:
        """A context for a forward and its backward."""
        return set_gather_ranks(self.strategy.data_group)

    def grad_sync_context(self, last: bool) -> Any:
        """A context for a micro-batch, inside `compute_context`. Gradients are sent only if it is the last one."""
        return NOTHING

    def gather_output(self, output: Any) -> Any:
        """An output or a loss as whole tensors, if ranks hold shards of it."""
        return output

    def finish_gradients(self) -> None:
        """Collective, after the last micro-batch: make `.grad` the gradient of the global mean."""

    def grad_norm(self, gradients: list[Tensor]) -> Tensor:
        """Collective: the norm of the whole network's gradient."""
        return global_norm(gradients)

    def stretches(self, tokens: int) -> tuple[Ranks, Pieces]:
        """The ranks that share sequences of so many tokens with this one, and the pieces that this rank computes."""
        return Ranks(), Pieces((0,), 1)

    def heard(self) -> list[str]:
        """Sentences for the user about the steps since the last call."""
        notes, self._notes = self._notes, []
        return [*notes, *self.rng.pop_notes(), *self.compiler.pop_notes()]

    # the methods of a step

    def forward_backward(self, batches: list[Any], step: int) -> dict[str, Tensor]:
        """Run every micro-batch of one step; afterwards `.grad` is the gradient of the global weighted mean.

        Returns this rank's part of the loss and its terms, on the device: the sum over data ranks is the global mean.
        """
        self.switch.use(training=True)
        self.set_mode(training=True)
        self.counters.begin(self.network)
        self.scaler.begin()
        # weighted: a mean of the means of micro-batches would be wrong if these have different weights
        self.shares = []
        share_of = loss_shares(self.task, batches, self.strategy.loss_group, self.strategy.device)
        first = refuse_replaced_parameters(self.network, self.strategy.world) if self.before_first_step else NOTHING
        with first, self._watching_losses(len(batches)):
            sums = self.run_micro_batches(batches, step, share_of)
        self.watch.end_forward_backward()
        self.finish_gradients()
        self.scaler.observe_loss(sums["loss"])
        return sums

    @contextmanager
    def _watching_losses(self, micro_batches: int) -> Iterator[None]:
        """Collective at its end, in a first step: is the loss the mean that a divided batch needs?"""
        if not self.before_first_step or micro_batches * self.strategy.loss_group.size == 1:
            yield
            return
        task, self.task = self.task, (checking := MeanCheckingTask(self.task, self.network))
        try:
            yield
        finally:
            self.task = task
        with self.machine.autocast(self.strategy.device):
            # all ranks; as a rule nothing
            self._notes += gather_exceptions(self.strategy.world, checking.problem())[:1]

    def run_micro_batches(self, batches: list[Any], step: int, share_of: Callable[[int], Any]) -> dict[str, Tensor]:
        """Forward and backward of every micro-batch; returns this rank's part of the losses of the step."""
        sums: dict[str, Tensor] = {}
        for index, batch in enumerate(batches):
            # random numbers depend on these numbers alone, so that a resumed run has the same ones
            self.rng.begin_forward(batch.indices, step, index, self.strategy.loss_group.rank)
            self.compiler.begin_forward(self.network)
            # gradients are sent once, in the backward of the last micro-batch
            last = index == len(batches) - 1
            with self.rng, self.compute_context(), self.grad_sync_context(last), set_gather_span(batch.span):
                backward(self.share_of_loss(self.forward, batch, partial(share_of, index), sums))
        return sums

    def share_of_loss(self, forward: Forward, batch: Any, share: Callable[[], Any], sums: dict[str, Tensor]) -> Tensor:
        """The forward of a micro-batch; adds its losses to `sums`, and returns what `backward` is called on."""
        losses = self.losses(forward, batch.inputs, batch.targets)
        fraction = share()  # after the forward: meanwhile the weights of all ranks have arrived
        self.shares.append(fraction)
        accumulate_losses(sums, losses, fraction)
        # DDP and FSDP divide the sum of gradients by the number of data ranks: the factor undoes it
        return self.scaler.scale(scale_loss(losses["loss"], fraction * self.strategy.loss_group.size))

    def losses(self, forward: Forward, inputs: Any, targets: Any) -> dict[str, Tensor]:
        """The loss of a micro-batch in the precision of the run, with its terms if it has any."""
        with self.machine.autocast(self.strategy.device):
            inputs, targets = self.memory_format.cast((inputs, targets))
            loss = self.gather_output(self.rng.call_outside(self.task.loss, forward(inputs, targets), targets))
        return name_losses(loss)

    def set_mode(self, training: bool) -> None:
        """Put the network into the mode of training, or of an evaluation."""
        if self.network.training != training:  # a walk through all modules
            self.network.train(training)

    def optimizer_step(self, optimizer: torch.optim.Optimizer, max_norm: float | None) -> Tensor | None:
        """Collective: unscale, clip to the true global norm (inf: not at all), step, zero. None: no norm."""
        parameters = [parameter for group in optimizer.param_groups for parameter in group["params"]]
        if self.before_first_step:
            self._notes += check_first_gradients(self.task, self.network, self.shapes, self.strategy.world)
        norm = None
        if max_norm is not None or self.scaler.needs_norm:
            # first, so that the norm is that of the true gradients; an overflow shows in it on every rank
            self.scaler.unscale_(parameters)
            gradients = [p.grad for p in parameters if p.grad is not None]
            norm = self.grad_norm(gradients)
            if max_norm is not None and max_norm != float("inf"):
                clip_gradients_(gradients, norm, max_norm)
        if self.scaler.allows_step(optimizer, norm):
            optimizer.step()
        for parameter in parameters:
            parameter.grad = None  # as zero_grad(), without its records for the profiler
        # the first step compiles and allocates: only after it a slow collective is a hanging one
        self.before_first_step = False
        self.strategy.use_step_timeout()
        return norm

    def evaluate(self, batch: Any, valid: int) -> dict[str, Tensor | float]:
        """Sums over a micro-batch: loss times weight, weight, samples, the task's metrics; zeros if none is valid."""
        self.set_mode(training=False)
        self.watch.phases_done += 1  # for the watchdog: an evaluation may take hours
        trial = without_compile() if self.before_first_step else NOTHING  # its batch may have another size
        self.rng.begin_evaluation(batch.indices)
        self.compiler.begin_forward(self.network)
        autocast = self.machine.autocast(self.strategy.device)
        with trial, self.rng, self.compute_context(), set_gather_span(batch.span), autocast, explain_no_gradient():
            inputs, targets = self.memory_format.cast((batch.inputs, batch.targets))
            sums = self.evaluate_batch(batch, inputs, targets)
        return sums if valid else zero_sums(sums)

    def evaluate_batch(self, batch: Any, inputs: Any, targets: Any) -> dict[str, Tensor | float]:
        """The sums over a batch, after `cast`, whether it counts or not: ranks may need each other to compute."""
        output = self.gather_output(self.forward(inputs, targets))
        return evaluation_sums(self.task, self.rng.call_outside, output, targets, batch.indices.numel())

    def after_step(self, step: int) -> None:
        """Collective where a plan has counters: add them up. Let the task change the network; move the average."""
        self.counters.end([self.network], self.strategy.device, self.strategy.counting_groups)
        if getattr(self.task.after_step, "__func__", None) is not Task.after_step:  # most change nothing
            with torch.no_grad():
                self.task.after_step(self.network, step)
        self.average.update(step, self.scaler.skipped)

    def settle(self) -> None:
        """Collective, before evaluating or saving: BatchNorm's running statistics become the data ranks' mean."""
        # one rank may be busy for long, while the others wait: a long timeout until the next step
        self.strategy.use_long_timeout()
        self.switch.use(training=False)
        self.average.synchronize_statistics(partial(average_statistics, self.network, self.strategy.loss_group))

    def unsettle(self) -> None:
        """Collective, after an evaluation or a save: back to what the next step needs."""

    def deliver_weights(self) -> None:
        """Collective: send the weights that this rank's optimizer has changed to ranks that have copies."""

    # optimizer and state

    def optimizer(self, make: Make, groups: Groups) -> torch.optim.Optimizer:
        """Build the optimizer over what this rank owns."""
        return make(groups)

    def keep_average(self, decay: float | None, every: int) -> None:
        """Keep a moving average of the weights from now on, updated at every so many steps; None: none."""
        self.average = NoMovingAverage() if decay is None else MovingAverage(self.network, decay, every)

    def skip_broken_steps(self) -> None:
        """From now on a step that is not finite on any rank changes nothing (loop.on_nonfinite=skip)."""
        self.scaler = StepSkipper(self.scaler, self.network, self.strategy.world, self.strategy.device)

    def state(self, optimizer: torch.optim.Optimizer) -> dict[str, Tensor]:
        """The tensors for a checkpoint: a flat dict under the names of the network, with DTensors for shards."""
        weights = {**self.network.state_dict(), **self.average.state(), **self.scaler.state()}
        return weights | optimizer_tensors(self.network, optimizer)

    def empty_state(self, optimizer: torch.optim.Optimizer, stored: Mapping[str, Any]) -> dict[str, Tensor]:
        """Tensors to read a checkpoint into, placed as this rank needs them; `stored`: name → what has shape and dtype.

        Refusal where the checkpoint's names or shapes are not this network's.
        """
        space = self.empty_weights(stored)
        space |= {name: torch.empty_like(value) for name, value in self.scaler.state().items() if name in stored}
        return space | empty_optimizer_state(self.network, optimizer, stored, self.shapes)

    def empty_weights(self, stored: Mapping[str, Any]) -> dict[str, Tensor]:
        """The same for the network and its average alone."""
        refuse_checkpoint_shapes(self.shapes, stored)
        weights = self.network.state_dict()
        return {name: torch.empty_like(value) for name, value in weights.items()} | self.average.empty(stored)

    def load_state(self, optimizer: torch.optim.Optimizer, state: Mapping[str, Tensor]) -> None:
        """Take over a state, whichever strategy wrote it."""
        self.load_weights(state)
        restore_optimizer(self.network, optimizer, state)
        self.switch.loaded()
        self.scaler.load(state)

    def load_weights(self, state: Mapping[str, Tensor]) -> None:
        """Take over the network's values and their average; what is not there it has already."""
        weights = self.network.state_dict()  # it also has the versions of modules, which some modules ask for
        weights.update({name: state[name] for name in weights if name in state})
        self.network.load_state_dict(weights)
        self.average.load(state)
