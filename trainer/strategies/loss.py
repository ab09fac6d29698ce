"""From a forward to the loss of a step: memory format, task and network as one module, weighted losses."""

from __future__ import annotations

import re
from collections.abc import Callable, Collection, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd.graph import _engine_run_backward
from torch.distributed.tensor import DTensor
from torch.nn.modules.module import register_module_parameter_registration_hook
from typing_extensions import override

import trainer
from trainer.data.nested_tensors import cast_floats, map_tensors, replace_tensors, tensors
from trainer.launch.devices import accumulation_dtype
from trainer.learning.task import Task, loss_weight, refuse_task_gradients, task_weights_with_gradient
from trainer.messages import Refusal, error_place, format_names
from trainer.parallel.buckets import to_accumulator, to_summand
from trainer.parallel.float8_linear import convert_to_float8
from trainer.parallel.ranks import Ranks, gather_exceptions
from trainer.strategies.machine import Machine, why_not_float64


class MemoryFormat:
    """The type and memory layout of batches and weights: fp64 for proofs, channels-last for images and convolutions.

    Channels last is the faster layout of convolutions, on GPUs and (by a fifth, measured) on CPUs.
    """

    def __init__(self, network: nn.Module, dtype: torch.dtype, channels_last: bool) -> None:
        self._double = dtype == torch.float64
        convolutions = (module for module in network.modules() if isinstance(module, nn.Conv2d))
        self._channels_last = channels_last and any(max(module.kernel_size) > 1 for module in convolutions)

    def convert_weights(self, network: nn.Module) -> None:
        """Bring the weights of convolutions into the layout of their inputs, in place."""
        for parameter in network.parameters():
            if self._channels_last and parameter.dim() == 4:  # of a convolution: (out, in, height, width)
                # as their gradients come: `contiguous` would leave the stride of a dimension of 1 as it is, and DDP
                # would warn of two layouts
                laid_out = torch.empty_like(parameter.data, memory_format=torch.channels_last)
                parameter.data = laid_out.copy_(parameter.data)

    def cast(self, tree: Any) -> Any:
        """A batch in this form: images (B, C, H, W) with the channels last."""
        tree = cast_floats(tree, torch.float64) if self._double else tree
        return map_tensors(tree, self._to_channels_last) if self._channels_last else tree

    def _to_channels_last(self, x: Tensor) -> Tensor:
        return x.contiguous(memory_format=torch.channels_last) if self._channels_last and x.dim() == 4 else x


def to_precision(network: nn.Module, task: Task, machine: Machine) -> nn.Module:
    """The network with the types of weights, and the linear layers, that the run computes in; in place.

    TypeError where it has complex numbers and is to compute in fp64: torch would drop their imaginary parts.
    """
    if machine.resolved_precision == "fp64":
        if why := why_not_float64(network):
            raise TypeError(why)
        return network.to(torch.float64)
    if machine.float8 and machine.resolved_precision == "bf16":
        convert_to_float8(network, task.plan(network), machine.float8)
    return network


# of a gradient that does not come: torch warns of it once, and says no name
LOST_GRADIENTS = (
    "if they are meant to learn, look for checkpoint(…, use_reentrant=True) behind a frozen layer"
    " (use_reentrant=False), detach() and no_grad()"
)


def check_first_gradients(task: Task, network: nn.Module, names: Collection[str], ranks: Ranks) -> list[str]:
    """Collective, before a first step: RuntimeError or Refusal if a step would not do with them what the loss says.

    names: of the whole network, of which this rank may hold a part. Returns a note on those without a gradient.
    """
    _check_gradient_layouts(network)
    of_ranks = gather_exceptions(ranks, task_weights_with_gradient(task, network))  # all ranks; as a rule nothing
    refuse_task_gradients(task, next(filter(None, of_ranks), []))
    # a rank may hold none of it, or give its gradient away: a 2 of anybody counts
    has = {name: 1 if x.grad is None else 2 for name, x in network.named_parameters() if x.requires_grad}
    largest = ranks.max_values([has.get(name, 0) for name in names])  # all ranks, once; a byte for each name
    lost = [name for name, number in zip(names, largest, strict=True) if number == 1]
    return [f"no gradient in the first step: {format_names(lost, 4)}; {LOST_GRADIENTS}"] if lost else []


@contextmanager
def refuse_replaced_parameters(network: nn.Module, ranks: Ranks) -> Iterator[None]:
    """Collective at its end: Refusal if a forward has put new parameters in the places of some.

    A shard would come back after the forward, without a word, and the optimizer steps the old ones.
    """
    places = {module: name for name, module in network.named_modules()}
    replaced: list[str] = []

    def note(module: nn.Module, name: str, parameter: Tensor | None) -> None:
        # who sets attributes in its own way is also given FSDP's shards in that way
        by_torch = module in places and type(module).__setattr__ is nn.Module.__setattr__
        if by_torch and getattr(module, name, parameter) is not parameter:
            replaced.append(f"{places[module]}.{name}".lstrip("."))

    handle = register_module_parameter_registration_hook(note)
    try:
        yield
    finally:
        handle.remove()
    if names := next(filter(None, gather_exceptions(ranks, replaced)), None):  # all ranks; as a rule nothing
        raise Refusal(
            f"the forward puts new parameters in the place of {format_names([*dict.fromkeys(names)], 8)}: no optimizer"
            " and no other rank knows of them. What a forward computes belongs into a buffer (register_buffer), from"
            " trainer.gather(x), the samples of all ranks (docs/one-curve.md)"
        )


def _check_gradient_layouts(network: nn.Module) -> None:
    """RuntimeError if a gradient has another memory layout than its parameter, as one made by hand may have.

    Fused optimizers read memory, not indices: they would learn something else without a word.
    """
    for name, parameter in network.named_parameters():
        gradient = parameter.grad
        if gradient is None or isinstance(gradient, DTensor) or gradient.layout != torch.strided:
            continue
        wanted = torch.empty_like(parameter, device="meta").stride()  # as autograd would have laid it out
        # of a dimension of size 1 the stride means nothing
        strides = zip(parameter.shape, wanted, gradient.stride(), strict=True)
        if any(size > 1 and stride != grad_stride for size, stride, grad_stride in strides):
            raise RuntimeError(
                f"the gradient of {name} has strides {gradient.stride()} instead of {wanted}; keep the parameter's: "
                "torch.empty_like(parameter).copy_(gradient)"
            )


def refuse_extra_state(network: nn.Module) -> None:
    """Refuse a network whose state is more than tensors: a checkpoint could not give it back."""
    extra = [name for name, value in network.state_dict().items() if not isinstance(value, Tensor)]
    if extra:
        raise Refusal(f"no checkpoint can keep what is no tensor in the network's state: {', '.join(extra[:5])}")


Forward = Callable[[Any, Any], Any]  # (inputs, targets) → the network's output


class TaskNetwork(nn.Module):
    """A network and how its task calls it, as one module: what a wrapper like DDP must wrap."""

    _task: Task

    def __init__(self, task: Task, network: nn.Module) -> None:
        super().__init__()
        self.network = network
        vars(self)["_task"] = task  # not registered, if it is a module: its parameters are not the network's

    @override
    def forward(self, inputs: Any, targets: Any) -> Any:
        """The task's forward over the network."""
        return self._task.forward(self.network, inputs, targets)


class _Unattached(torch.autograd.Function):
    """The same numbers, in the same memory, as no view of anything.

    FSDP hangs its hook on the tensors of an output, and what a task changes in place in a view (`scores[:, 0] += 1`)
    would lose it; torch warns of each such output.
    """

    @staticmethod
    @override
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return x.detach()

    @staticmethod
    @override
    def backward(ctx: Any, *gradients: Tensor) -> Tensor:
        return gradients[0]


class FlatOutput(nn.Module):
    """A step module whose output is a tensor, or a list of tensors and the tree that they belong to.

    DDP and FSDP wait for the backward of the tensors in an output. In a dataclass DDP with a static graph finds none,
    nor do older FSDPs, and would silently average nothing.
    """

    def __init__(self, step: nn.Module) -> None:
        super().__init__()
        self.step = step

    @override
    def forward(self, *args: Any) -> Tensor | tuple[list[Tensor], Any]:
        """A lone tensor as it is; else the tensors of the output, and the output with empty tensors in their places."""
        # no others: a task may ask for the gradient of one output by another, with which the forward has computed it
        output = map_tensors(
            self.step(*args), lambda x: _Unattached.apply(x) if x.requires_grad and x._is_view() else x
        )
        if isinstance(output, Tensor):
            return output
        return list(tensors(output)), map_tensors(output, lambda _: torch.empty(0, device="meta"))


def unflatten_output(flat: Forward) -> Forward:
    """The original forward of a wrapped `FlatOutput`."""

    def forward(*args: Any) -> Any:
        output = flat(*args)
        return output if isinstance(output, Tensor) else replace_tensors(output[1], output[0])

    return forward


# what a training line has beside a loss and its parts
_TAKEN = frozenset(["kind", "time", "step", "epoch", "lr", "samples", "tokens", "loss_mean", "loss_hex"])
_TAKEN |= {"sample_digest", "step_s", "samples_per_s", "tokens_per_s", "grad_norm"}


def total_loss(loss: Tensor | dict[str, Tensor]) -> Tensor:
    """The one number to minimise: a loss, or the sum of its parts. Refusal where it is none."""
    parts = loss if isinstance(loss, dict) else {}
    if "loss" in parts:
        raise Refusal(
            "Task.loss: a part may not be called loss. Parts are added up: a total among them would count twice."
            " Return the total alone, or its parts under other names"
        )
    if taken := sorted(_TAKEN.intersection(parts)):
        raise Refusal(f"Task.loss: a part may not be called {taken[0]}, as another number of a training line is")
    each: dict[str, Any] = {**parts} or {"": loss}
    for name, part in each.items():
        # a number alone: where an evaluation has no loss, as detection
        if part.dim() if isinstance(part, Tensor) else name or not isinstance(part, int | float):
            got = f"of shape {tuple(part.shape)}" if isinstance(part, Tensor) else f"of type {type(part).__name__}"
            where = f"its part {name}" if name else "what it returns"
            raise Refusal(f"Task.loss: {where} is {got}; it must be a tensor of one number, shape (), such as a mean")
    return torch.stack(list(parts.values())).sum() if parts else loss  # type: ignore[return-value]


def name_losses(loss: Tensor | dict[str, Tensor]) -> dict[str, Tensor]:
    """The loss to minimise, beside its parts if it has any."""
    return {**(loss if isinstance(loss, dict) else {}), "loss": total_loss(loss)}


def backward(loss: Tensor) -> None:
    """`loss.backward()`, without what torch asks of other arguments: a tenth of the backward of a small network."""
    if type(loss) is not Tensor or loss.dim() or loss.is_complex():
        loss.backward()
        return
    ones = torch.ones_like(loss)  # new in each step: a function's own backward may change what it gets
    _engine_run_backward((loss,), (ones,), False, False, (), allow_unreachable=True, accumulate_grad=True)


def loss_shares(task: Task, batches: list[Any], ranks: Ranks, device: torch.device) -> Callable[[int], Any]:
    """Collective: the share of a micro-batch in the step: its weight, relative to that of all data ranks."""
    if type(task).weight is Task.weight:  # samples: their number is known, and nothing is sent
        return lambda index: batches[index].indices.numel() / batches[index].total
    weights = [loss_weight(task, batch.targets, batch.indices.numel()) for batch in batches]
    local = torch.stack([_as_device_tensor(device, weight) for weight in weights])  # (micro-batches,)
    total_weight = local.sum()
    pending = ranks.all_reduce_sum_(total_weight)  # the data ranks; 8 bytes, while the first forward computes

    def share(index: int) -> Tensor:
        pending.wait()
        return local[index] / (total_weight + (total_weight == 0))  # if nothing has a weight, every share is 0

    return share


def scale_loss(x: Tensor, factor: float | Tensor) -> Tensor:
    """The product; without a kernel if the factor is the number 1, as for a lone micro-batch."""
    return x if _is_one(factor) else x * factor


def _is_one(factor: float | Tensor) -> bool:
    return isinstance(factor, float) and factor == 1


def accumulate_losses(sums: dict[str, Tensor], losses: dict[str, Tensor], share: float | Tensor) -> None:
    """Add a micro-batch's losses to those of the step, on the device."""
    for name, loss in losses.items():
        part = loss.detach()
        if not _is_one(share):
            part = to_accumulator(part) * share  # a loss in bf16 has 8 bits, too few for a product or a sum
        sums[name] = sums[name] + part if name in sums else part


def evaluation_sums(
    task: Task, call: Callable[..., Any], output: Any, targets: Any, samples: int
) -> dict[str, Tensor | float]:
    """The sums of an evaluation over these samples: loss times weight, weight, samples, and the task's metrics.

    call: calls the loss, which may use random numbers.
    """
    loss, weight = total_loss(call(task.loss, output, targets)), loss_weight(task, targets, samples)
    sums = {name: to_summand(x) for name, x in task.metrics(output, targets).items()}
    if isinstance(weight, Tensor):
        weight = _as_device_tensor(loss.device, weight)
        # the mean over nothing is NaN, and counts for nothing
        total: Tensor | float = torch.where(weight == 0, 0.0, to_summand(loss) * weight)
    else:
        total = to_summand(loss) * weight if weight else 0.0
    # a number that the host knows stays there: it costs no kernel
    sums |= {"loss": total, "weight": weight, "samples": samples}
    return sums


@contextmanager
def explain_no_gradient() -> Iterator[None]:
    """Refusal where an evaluation fails because its forward, or the task, takes a gradient."""
    try:
        yield
    except RuntimeError as error:
        if torch.is_grad_enabled() or not re.search("does(n't| not) require grad", str(error)):
            raise
        raise Refusal(
            f"evaluations run without gradients, and one is taken {error_place(error, torch, trainer)} ({error}). Write"
            " around all code that it goes through: with torch.enable_grad(): (docs/extending.md)"
        ) from error


def zero_sums(sums: dict[str, Tensor | float]) -> dict[str, Tensor | float]:
    """Zeros with the same names and shapes, for a rank whose samples do not count."""
    return {name: torch.zeros_like(to_accumulator(value)) for name, value in sums.items()}


def _as_device_tensor(device: torch.device, number: Tensor | float) -> Tensor:
    """A number as a 0-d tensor of this device, filled there: a copy from the host would wait for the device."""
    if isinstance(number, Tensor) and number.device == device:
        return number.to(accumulation_dtype(device))
    # the host knows its own numbers
    return torch.full((), float(number), dtype=accumulation_dtype(device), device=device)
