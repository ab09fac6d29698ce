"""Splitting a network's layers over tensor ranks by its plan: what is refused, and gradients afterwards."""

from __future__ import annotations

from collections.abc import Iterator

from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from torch.distributed.tensor.parallel import ColwiseParallel, ParallelStyle, RowwiseParallel

from trainer.learning.plan import Plan
from trainer.parallel.units import matched
from trainer.refusal import Refusal

ELSE = "strategy=ddp (or dp, single) needs no plan"


def refuse_plan(network: nn.Module, plan: Plan, degree: int) -> None:
    """Refuse a plan that is missing, names nothing, or splits what does not divide by the degree."""
    if not plan.tensor:
        raise Refusal(
            f"{type(network).__name__} has no tensor-parallel plan: give it a method plan(self) -> Plan, or let the"
            f" task say one; {ELSE}"
        )
    for what, count in plan.divisible.items():
        if count % degree:
            raise Refusal(f"{count} {what} / {degree} tensor ranks is not whole; {_degrees(count)}; {ELSE}")
    for key, style in plan.tensor.items():
        for name, module in matched(network, key, "the plan's", f"; {ELSE}").items():
            _refuse_size(name, module, style, degree)
            _refuse_tied(name, module, network)


def settle(parameters: Iterator[Tensor]) -> None:
    """Collective: gradients that are still parts of a sum become what their parameter is, whole or split.

    torch 2.11 clips such gradients wrongly and silently; afterwards every version is right.
    """
    for parameter in parameters:
        gradient = parameter.grad
        if not isinstance(parameter, DTensor) or not isinstance(gradient, DTensor):
            continue
        if gradient.placements != parameter.placements:
            parameter.grad = gradient.redistribute(placements=parameter.placements)  # the tensor ranks; one gradient


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
        raise Refusal(f"the plan splits {name}, a {kind}; only Linear and Embedding can be split; {ELSE}")
    size = getattr(module, attribute)
    if size % degree:
        raise Refusal(f"{name}.{attribute} {size} / {degree} tensor ranks is not whole; {_degrees(size)}; {ELSE}")


def _refuse_tied(name: str, module: nn.Module, network: nn.Module) -> None:
    """Refuse to split a parameter that another module uses too: only one of the two would hold the shard."""
    own = {id(parameter) for parameter in module.parameters()}
    for other, parameter in network.named_parameters(remove_duplicate=False):
        if id(parameter) in own and not other.startswith(f"{name}."):
            raise Refusal(
                f"the plan splits {name}, whose parameter is tied to {other}; tied parameters cannot be split; {ELSE}"
            )


def _degrees(size: int) -> str:
    return "degrees that work: " + ", ".join(str(d) for d in range(1, min(size, 64) + 1) if size % d == 0)
