"""Tensor parallelism by a plan: what the plan may ask for, and what tensor ranks hold copies of."""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    ParallelStyle,
    PrepareModuleInput,
    PrepareModuleInputOutput,
    PrepareModuleOutput,
    RowwiseParallel,
)

from trainer.learning.parallel_plan import Plan
from trainer.messages import Refusal
from trainer.parallel.buckets import make_buckets, pack, to_accumulator, unpack
from trainer.parallel.device_mesh import split_axes, to_local
from trainer.parallel.module_units import require_modules
from trainer.parallel.ranks import Ranks

PARAMETER_DRIFT = 1e-3  # of a parameter: more than a run's rounding adds up to
GRADIENT_DRIFT = 0.25  # of a gradient: further than rounding moves it, in bf16 too, unless it is made of nothing else
NOISE_FLOOR = 0.003  # of all these gradients: what is smaller may be made of rounding alone


class ReplicatedParameters:
    """The parameters that the plan has not split: a copy on each tensor rank, with a gradient of its own.

    Copies compute the same gradient, but not to the bit where a kernel adds in any order (atomics), and Adam makes
    whole steps of the smallest difference. So the first rank's holds: sent, each byte travels half as far as for a
    mean, and nothing is rounded once more.
    """

    def __init__(self, network: nn.Module, ranks: Ranks) -> None:
        self._parameters = {name: p for name, p in _replicated(network).items() if p.requires_grad}
        self._ranks = ranks
        # (parameters,): the largest distance of a gradient from the first rank's, in its own size, since the last check
        self._distances: Tensor | None = None

    @torch.no_grad()
    def broadcast_gradients(self) -> None:
        """Collective: gradients become the first rank's. How far they were from it is measured and kept."""
        if self._ranks.size == 1 or not self._parameters:
            return
        # all ranks send alike: zeros where one has no gradient
        gradients = [to_local(torch.zeros_like(p) if p.grad is None else p.grad) for p in self._parameters.values()]
        sizes: list[Tensor] = []
        distances: list[Tensor] = []
        for bucket in make_buckets(gradients):
            flat = pack(bucket)  # (numbers,)
            first = flat.clone()
            self._ranks.broadcast_(first)  # the tensor ranks; gradients of what they hold in common
            # measured before it is overwritten, or nobody would ever know
            sizes += torch._foreach_norm(unpack(first, bucket))
            distances += torch._foreach_norm(unpack(flat - first, bucket))
            for gradient, shared in zip(bucket, unpack(first, bucket), strict=True):
                gradient.copy_(shared)
        # kept on the device until the next check: a step does not wait
        size, distance = (torch.stack([n.to(sizes[0].device, torch.float32) for n in ns]) for ns in (sizes, distances))
        floor = (NOISE_FLOOR * size.norm()).clamp(min=torch.finfo(torch.float32).tiny)
        relative = (distance / size.maximum(floor)).nan_to_num(0.0, 0.0)  # an overflow is no disagreement
        self._distances = relative if self._distances is None else self._distances.maximum(relative)

    def check_gradients(self) -> None:
        """Collective: RuntimeError, naming parameters, where gradients since the last check were not the same ones."""
        if self._distances is None:
            return
        self._ranks.all_reduce_max_(self._distances).wait()  # the tensor ranks; a number for each parameter
        distances = zip(self._parameters, self._distances.tolist(), strict=True)
        _raise_if_different("gradients of ", [name for name, distance in distances if distance > GRADIENT_DRIFT])
        self._distances = None


@torch.no_grad()
def check_replicated_parameters(network: nn.Module, ranks: Ranks) -> None:
    """Collective: RuntimeError, naming them, where parameters outside the plan are not equal on all tensor ranks."""
    whole = {name: to_local(parameter) for name, parameter in _replicated(network).items()}
    if not whole or ranks.size == 1:
        return
    exact = [to_accumulator(p) for p in whole.values()]
    sums = torch.stack([torch.stack([p.sum(), p.square().sum()]) for p in exact])  # (parameters, 2)
    # (2, parameters, 2): the largest of the negative is the smallest, so one collective gives both
    bounds = torch.stack([sums, -sums])
    ranks.all_reduce_max_(bounds).wait()  # the tensor ranks; four numbers a parameter: largest and smallest
    # a sum of n numbers of this size is rounded to about as much: differences are measured in it
    squares = bounds[0, :, 1]
    counts = squares.new_tensor([parameter.numel() for parameter in whole.values()])
    scales = torch.stack([(counts * squares).sqrt(), squares], dim=1)
    unequal = (bounds.sum(0) > PARAMETER_DRIFT * scales).any(1).tolist()
    _raise_if_different("", [name for name, differs in zip(whole, unequal, strict=True) if differs])


@torch.no_grad()
def broadcast_buffers(network: nn.Module, ranks: Ranks) -> None:
    """Collective: whole buffers that a checkpoint stores (running statistics) become the first rank's everywhere."""
    stored = network.state_dict() if ranks.size > 1 else {}
    buffers = [b for name, b in network.named_buffers() if name in stored and not isinstance(b, DTensor)]
    for bucket in make_buckets(buffers):
        flat = pack(bucket)
        ranks.broadcast_(flat)  # the tensor ranks; all these buffers
        for buffer, first in zip(bucket, unpack(flat, bucket), strict=True):
            buffer.copy_(first)


def _raise_if_different(what: str, names: list[str]) -> None:
    if names:
        raise RuntimeError(
            f"{what}parameters outside the tensor plan differ between its ranks: {', '.join(names[:8])}; the plan"
            " splits what flows through them (put them in the plan), or the network computes otherwise on each rank"
        )


def _replicated(network: nn.Module) -> dict[str, nn.Parameter]:
    """The parameters of which every tensor rank holds the same; data ranks may hold shards of it."""
    return {name: parameter for name, parameter in network.named_parameters() if "tensor" not in split_axes(parameter)}


# styles that change how activations lie, and split no parameter
ACTIVATION_STYLES = (PrepareModuleInput, PrepareModuleOutput, PrepareModuleInputOutput)
WITHOUT_PLAN = "strategy=ddp and strategy=fsdp need no plan"


def refuse_plan(network: nn.Module, plan: Plan, degree: int) -> None:
    """Refuse a plan that is missing, names nothing, or splits what does not divide by the degree."""
    if not plan.tensor:
        raise Refusal(
            f"{type(network).__name__} has no tensor-parallel plan: neither its plan(self) -> Plan nor the task says"
            f" how layers are split; {WITHOUT_PLAN}"
        )
    # whole things first, as heads: sizes may divide where these do not
    for what, count in plan.divisible.items():
        if count % degree:
            raise Refusal(f"{count} {what} / {degree} tensor ranks is not whole; {_degrees(count)}; {WITHOUT_PLAN}")
    for key, style in plan.tensor.items():
        for name, module in require_modules(network, key, "the plan's", f"; {WITHOUT_PLAN}").items():
            _refuse_size(name, module, style, degree)
            if not isinstance(style, ACTIVATION_STYLES):
                _refuse_tied(name, module, network)


def _refuse_size(name: str, module: nn.Module, style: ParallelStyle, degree: int) -> None:
    """Refuse a layer whose split size is no multiple of the degree: it would fail in the middle of a forward."""
    if not isinstance(style, (ColwiseParallel, RowwiseParallel)):
        return
    column = isinstance(style, ColwiseParallel)
    if isinstance(module, nn.Linear):
        attribute = "out_features" if column else "in_features"
    elif isinstance(module, nn.Embedding):
        attribute = "embedding_dim" if column else "num_embeddings"
    else:
        kind = type(module).__name__
        raise Refusal(f"the plan splits {name}, a {kind}; only Linear and Embedding can be split; {WITHOUT_PLAN}")
    size = getattr(module, attribute)
    if size % degree:
        raise Refusal(
            f"{name}.{attribute} {size} / {degree} tensor ranks is not whole; {_degrees(size)}; {WITHOUT_PLAN}"
        )


def _refuse_tied(name: str, module: nn.Module, network: nn.Module) -> None:
    """Refuse to split a parameter that another module uses too: only one of the two would hold the shard."""
    split = {id(parameter) for parameter in module.parameters()}
    for other, parameter in network.named_parameters(remove_duplicate=False):
        if id(parameter) in split and not other.startswith(f"{name}."):
            raise Refusal(
                f"the plan splits {name}, whose parameter is tied to {other}; tied parameters cannot be split;"
                f" {WITHOUT_PLAN}"
            )


def _degrees(size: int) -> str:
    return "degrees that work: " + ", ".join(str(d) for d in range(1, min(size, 64) + 1) if size % d == 0)


def redistribute_gradients(parameters: Iterator[Tensor]) -> None:
    """Collective: gradients that are still terms of a sum become what their parameter is, whole or split.

    torch 2.11 clips such gradients wrongly and silently; afterwards every version is right.
    """
    for parameter in parameters:
        gradient = parameter.grad
        if not isinstance(parameter, DTensor) or not isinstance(gradient, DTensor):
            continue
        if gradient.placements != parameter.placements:
            parameter.grad = gradient.redistribute(placements=parameter.placements)  # the tensor ranks; one gradient
