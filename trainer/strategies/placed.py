"""One network in its place, with the verbs of a step. The base does all of it for one device."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from contextlib import nullcontext
from typing import Any

import torch
from torch import Tensor, nn

from trainer.data.seeds import mix, seed_torch
from trainer.data.tree import changed, floats_as
from trainer.learning.task import Task
from trainer.parallel.batch_norm import average_statistics, synchronised
from trainer.parallel.clip import clip_, global_norm
from trainer.parallel.compiling import compile_network, uncompiled
from trainer.parallel.gather import dealt, gathering_over
from trainer.parallel.ranks import Done, Waitable
from trainer.parallel.recompute import recompute
from trainer.parallel.state import fits, optimizer_tensors, restore_optimizer, space_for_optimizer
from trainer.parallel.totals import wide
from trainer.parallel.units import units
from trainer.refusal import Refusal
from trainer.strategies.place import Place
from trainer.strategies.scaler import NoScaler, Scaler
from trainer.strategies.stopwatch import Stopwatch


class TaskNetwork(nn.Module):
    """A network and how its task calls it, as one module: what a wrapper like DDP must wrap."""

    def __init__(self, task: Task, network: nn.Module) -> None:
        super().__init__()
        self.network = network
        self._task = task

    def forward(self, inputs: Any, targets: Any) -> Any:
        """The task's forward over the network."""
        return self._task.forward(self.network, inputs, targets)


class Placed:
    """One network in its place, with the verbs of a step. `network` keeps its own module and parameter names."""

    def __init__(self, strategy: Place, task: Task, network: nn.Module, example: Any) -> None:
        self.strategy, self.task, self.example = strategy, task, example
        self._machine = strategy.machine
        self._young = True  # no step has been done
        self.watch = Stopwatch()
        self._hurried = False  # may a collective take no longer than those of a step?
        self.scaler = Scaler(strategy.device) if self._machine.resolved_precision == "fp16" else NoScaler()
        network = network.to(self._machine.parameter_dtype) if self._machine.resolved_precision == "fp64" else network
        network = synchronised(network, strategy.data, strategy.device) if strategy.sync_bn else network
        refuse_extra_state(network)
        self._shapes = {name: value.shape for name, value in network.state_dict().items()}  # of the whole network
        self._plan = task.plan(network)
        self._layout = torch.channels_last if has_convolutions(network) else torch.preserve_format
        self.network = self._arrived(network)
        parts = self._units()
        self._cut()
        self._prepare_units(parts)
        self._plain = TaskNetwork(task, self.network)
        self._shard(parts)
        self._give_values()
        self._forward: Callable[[Any, Any], Any] = self._wrap(self._plain)

    def _arrived(self, network: nn.Module) -> nn.Module:
        """Collective: the network on this rank's device, with its values, the same everywhere."""
        network = network.to(self.strategy.device)
        self._lay_out(network)
        for tensor in (*network.parameters(), *network.buffers()):
            self.strategy.world.broadcast_(tensor.detach())  # all ranks; one initialisation for all
        return network

    def _lay_out(self, network: nn.Module) -> None:
        """Bring the weights of convolutions into the memory layout that their inputs have."""
        for parameter in network.parameters():
            if parameter.dim() == 4 and self._layout is torch.channels_last:
                parameter.data = parameter.data.contiguous(memory_format=self._layout)

    def _units(self) -> list[str]:
        """The subtrees that are recomputed, compiled and sharded as one."""
        if self.strategy.activation_checkpointing == "none" and not (self._machine.compile and self._plan.shard):
            return []
        return units(self.network, self._plan)

    def _prepare_units(self, names: list[str]) -> None:
        """What happens inside one rank, after the cut by tensors and before data ranks come in: recompute, compile."""
        for piece in self._pieces():
            own = [name for name in names if is_called(piece, name)]
            if self.strategy.activation_checkpointing != "none":
                recompute(piece, own, self.strategy.activation_checkpointing)
            if self._machine.compile:
                compile_network(piece, self._compiled(own))

    def _compiled(self, names: list[str]) -> list[str]:
        """The subtrees that are compiled by themselves; none: the whole network is, where the plan is silent."""
        return names if self._plan.shard else []

    # What a strategy says differently.

    def _cut(self) -> None:
        """Edit the network in place: its parameters become what this rank holds."""

    def _pieces(self) -> list[nn.Module]:
        """What is called as a whole: the network, or the stages of it that this rank holds."""
        return [self.network]

    def _shard(self, names: list[str]) -> None:
        """Collective: spread parameters over the data ranks, these subtrees together."""

    def _give_values(self) -> None:
        """Collective: the values of a network that was cut and spread without them."""

    def _wrap(self, step: TaskNetwork) -> Callable[[Any, Any], Any]:
        """What a training forward must call: the step itself, or something around it."""
        return step

    def _sync(self, last: bool) -> Any:
        """The context of one micro-batch: do gradients travel in it?"""
        return self._computing()

    def _computing(self) -> Any:
        """The context of one micro-batch's forward, and backward."""
        return gathering_over(self.strategy.data)

    def _settle_gradients(self) -> None:
        """Collective: after the last micro-batch; afterwards `.grad` is the gradient of the global mean."""

    def _norm(self, gradients: list[Tensor]) -> Tensor:
        """Collective: the norm of the whole network's gradient."""
        return global_norm(gradients)

    def _whole(self, output: Any) -> Any:
        """An output or a loss with nothing of it left on other ranks."""
        return output

    # The verbs of a step.

    def forward_backward(self, batches: list[Any], step: int) -> dict[str, Tensor]:
        """Run every micro-batch of one step; afterwards `.grad` is the gradient of the global weighted mean.

        Returns this rank's part of the loss (and of each of its parts): summed over the data ranks it is the mean over
        the global batch. The numbers stay on the device.
        """
        self._mode(training=True)
        shares, pending = self._weigh(batches)
        sums: dict[str, Tensor] = {}
        for index, batch in enumerate(batches):
            seed_torch(mix(self._machine.seed, step, index, self.strategy.data_rank), self.strategy.device)
            with self._sync(last=index == len(batches) - 1), dealt(batch.span):
                parts = self._losses(self._forward, batch.inputs, batch.targets)
                pending.wait()
                share = shares(index)
                # DDP and its like divide the summed gradients by the number of data ranks: undo it here
                scaled = self.scaler.scale(times(parts["loss"], share * self.strategy.data_size))
                scaled.backward()
            for name, part in parts.items():
                kept = times(wide(part.detach()), share)  # a loss in bf16 has 8 bits, too few for a sum
                sums[name] = sums[name] + kept if name in sums else kept
        self.watch.lap("forward and backward")
        self._settle_gradients()
        return sums

    def optimizer_step(self, optimizer: torch.optim.Optimizer, max_norm: float | None) -> Tensor | None:
        """Collective: unscale, clip to the true global norm, step, zero. Returns that norm; max_norm None: no norm.

        An infinite max_norm measures the norm and clips nothing.
        """
        parameters = [p for group in optimizer.param_groups for p in group["params"] if p.grad is not None]
        norm = None
        if max_norm is not None or self.scaler.needs_norm:
            self.scaler.unscale_(parameters)
            gradients = [p.grad for p in parameters if p.grad is not None]
            norm = self._norm(gradients)
            if max_norm is not None and max_norm != float("inf"):
                clip_(gradients, norm, max_norm)
        if self.scaler.allows_step(optimizer, norm):
            optimizer.step()
        for parameter in parameters:
            parameter.grad = None  # all that zero_grad() does, without its profiler's records
        if not self._hurried:
            self._young, self._hurried = False, True
            self.strategy.hurry()
        return norm

    @torch.no_grad()
    def evaluate(self, batch: Any, valid: int) -> dict[str, Tensor]:
        """Sums over a micro-batch: loss times weight, weight, samples, and the task's metrics.

        valid: how many of its samples count, all or none. Of none the sums are zeros of the same shapes.
        """
        self._mode(training=False)
        rehearsing = uncompiled() if self._young else nullcontext()  # its batch may be of another size
        with rehearsing, self._computing(), dealt(batch.span), self._machine.autocast(self.strategy.device):
            inputs, targets = self._cast(batch.inputs), self._cast(batch.targets)
            sums = self._sums(self._whole(self._evaluation_forward(inputs, targets)), targets, len(batch.indices))
        return sums if valid else {name: torch.zeros_like(value) for name, value in sums.items()}

    def after_step(self, step: int) -> None:
        """Let the task change the network in place after an optimizer step."""
        if type(self.task).after_step is not Task.after_step:
            with torch.no_grad():
                self.task.after_step(self.network, step)

    def settle(self) -> None:
        """Collective, before evaluating or saving: BatchNorm's running statistics become the data ranks' mean."""
        # a rank may be busy for long there, while the others wait: there is time again until a step has been done
        self._hurried = False
        self.strategy.take_time()
        average_statistics(self.network, self.strategy.data)

    # Optimizer and state.

    def optimizer(
        self, make: Callable[[list[dict[str, Any]]], torch.optim.Optimizer], groups: Iterable[dict[str, Any]]
    ) -> torch.optim.Optimizer:
        """Build the optimizer over what this rank owns."""
        return make(list(groups))

    def state(self, optimizer: torch.optim.Optimizer) -> dict[str, Tensor]:
        """What a checkpoint stores: flat, under the network's own names, DTensors where sharded."""
        model = {name: value for name, value in self.network.state_dict().items() if isinstance(value, Tensor)}
        return model | optimizer_tensors(self.network, optimizer) | self.scaler.state()

    def space(self, optimizer: torch.optim.Optimizer, stored: Mapping[str, Any]) -> dict[str, Tensor]:
        """Tensors to read a checkpoint into, placed as this rank needs them; `stored`: name → what has shape and dtype.

        ValueError where the checkpoint's names or shapes are not this network's.
        """
        own = {name: value for name, value in self.network.state_dict().items() if isinstance(value, Tensor)}
        fits(self._shapes, stored)
        model = {name: torch.empty_like(value) for name, value in own.items()}
        optimizer_space = space_for_optimizer(self.network, optimizer, stored, self._shapes)
        scaler = {name: torch.empty_like(value) for name, value in self.scaler.state().items() if name in stored}
        return model | optimizer_space | scaler

    def load_state(self, optimizer: torch.optim.Optimizer, state: Mapping[str, Tensor]) -> None:
        """Take over a state, whichever strategy wrote it."""
        model = {name: value for name, value in state.items() if not name.startswith(("optimizer/", "scaler/"))}
        self.network.load_state_dict(model)
        restore_optimizer(self.network, optimizer, state)
        self.scaler.load({name: value for name, value in state.items() if name.startswith("scaler/")})

    # Parts of the verbs.

    def _mode(self, training: bool) -> None:
        if self.network.training != training:
            self.network.train(training)

    def _evaluation_forward(self, inputs: Any, targets: Any) -> Any:
        return self._plain(inputs, targets)

    def _sums(self, output: Any, targets: Any, samples: int) -> dict[str, Tensor]:
        """What an evaluation adds up over these samples."""
        loss = total_loss(self.task.loss(output, targets))
        weight, count = (number_on(loss.device, number) for number in (self.task.weight(targets), samples))
        sums = self.task.metrics(output, targets) | {"loss": loss.double() * weight, "weight": weight, "samples": count}
        return {name: wide(value) for name, value in sums.items()}

    def _cast(self, tree: Any) -> Any:
        """A batch in the precision and memory layout of the network: images (B, C, H, W) with the channels last."""
        if self._machine.resolved_precision == "fp64":
            tree = floats_as(tree, torch.float64)
        if self._layout is torch.preserve_format:
            return tree
        return changed(tree, lambda x: x.contiguous(memory_format=self._layout) if x.dim() == 4 else x)

    def _losses(self, forward: Callable[[Any, Any], Any], inputs: Any, targets: Any) -> dict[str, Tensor]:
        with self._machine.autocast(self.strategy.device):
            inputs, targets = self._cast(inputs), self._cast(targets)
            loss = self._whole(self.task.loss(forward(inputs, targets), targets))
        return {**(loss if isinstance(loss, dict) else {}), "loss": total_loss(loss)}

    def _weigh(self, batches: list[Any]) -> tuple[Callable[[int], Any], Waitable]:
        """Each micro-batch's share of the step: its weight over the weight of all micro-batches of all data ranks."""
        weights = [self.task.weight(batch.targets) for batch in batches]
        if type(self.task).weight is Task.weight:  # samples: how many others have is known, nothing needs to travel
            total = sum(weights) * batches[0].total / sum(len(batch.indices) for batch in batches) or 1
            return lambda index: weights[index] / total, Done()
        local = torch.stack([torch.as_tensor(w, device=self.strategy.device) for w in weights]).to(torch.float64)
        summed = local.sum()
        pending = self.strategy.data.all_reduce_sum_(summed)  # data ranks; 8 bytes, while the first forward computes
        return lambda index: local[index] / (summed + (summed == 0)), pending  # of nothing every share is 0


def number_on(device: torch.device, number: Tensor | float) -> Tensor:
    """A number as a tensor of this device: filled in there, for a copy from the host would wait for the device."""
    return number.to(device, non_blocking=True) if isinstance(number, Tensor) else torch.full((), number, device=device)


def is_called(network: nn.Module, name: str) -> bool:
    """Does the network have a module of this name that computes? A stage has bare holders in place of some."""
    try:
        return type(network.get_submodule(name)) is not nn.Module
    except AttributeError:
        return False


def refuse_extra_state(network: nn.Module) -> None:
    """Refuse a network whose state is more than tensors: a checkpoint could not give it back."""
    extra = [name for name, value in network.state_dict().items() if not isinstance(value, Tensor)]
    if extra:
        raise Refusal(f"no checkpoint can keep what is no tensor in the network's state: {', '.join(extra[:5])}")


def has_convolutions(network: nn.Module) -> bool:
    """Does it convolve images? Then channels last is the faster layout, on GPUs and (by a fifth, measured) on CPUs."""
    return any(isinstance(module, nn.Conv2d) and max(module.kernel_size) > 1 for module in network.modules())


def times(x: Tensor, factor: float | Tensor) -> Tensor:
    """The product. A lone micro-batch is the whole step: by one nothing need be multiplied."""
    return x if isinstance(factor, float) and factor == 1 else x * factor


def total_loss(loss: Tensor | dict[str, Tensor]) -> Tensor:
    """The one number to minimise: a loss, or the sum of its parts."""
    return torch.stack(list(loss.values())).sum() if isinstance(loss, dict) else loss
