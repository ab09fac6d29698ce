"""Cutting a network's tensors over the ranks of one mesh axis, by its plan."""

from __future__ import annotations

from collections.abc import Iterator

from torch import Tensor, nn
from torch.distributed.tensor import DeviceMesh, DTensor
from torch.distributed.tensor.parallel import ColwiseParallel, ParallelStyle, RowwiseParallel, parallelize_module

from trainer.learning.plan import Plan
from trainer.parallel.units import matches
from trainer.refusal import Refusal, nearest

ELSE = "strategy=ddp (or dp, single) needs no plan"


def refuse_plan(network: nn.Module, plan: Plan, degree: int) -> None:
    """Refuse a plan that is missing, names nothing, or cuts what does not divide by the degree."""
    if not plan.tensor:
        raise Refusal(
            f"{type(network).__name__} has no tensor-parallel plan: give it a method plan(self) -> Plan, or let the"
            f" task say one; {ELSE}"
        )
    for what, count in plan.divisible.items():
        if count % degree:
            raise Refusal(f"{count} {what} / {degree} tensor ranks is not whole; {_degrees(count)}; {ELSE}")
    for key, style in plan.tensor.items():
        matched = list(matches(network, key))
        if not matched:
            names = [name for name, _ in network.named_modules() if name]
            raise Refusal(f"the plan's {key!r} matches no module{nearest(key, names)}; {ELSE}")
        for name, module in matched:
            _refuse_size(name, module, style, degree)
            _refuse_tied(name, module, network)


def split(network: nn.Module, mesh: DeviceMesh, plan: Plan) -> None:
    """Collective over the mesh: replace parameters that the plan names by this rank's part (DTensors), in place."""
    parallelize_module(network, mesh, dict(plan.tensor))


def settle(parameters: Iterator[Tensor]) -> None:
    """Collective: gradients that are still parts of a sum become what their parameter is, whole or cut.

    torch 2.11 clips such gradients wrongly and silently; afterwards every version is right.
    """
    for parameter in parameters:
        gradient = parameter.grad
        if not isinstance(parameter, DTensor) or not isinstance(gradient, DTensor):
            continue
        if gradient.placements != parameter.placements:
            parameter.grad = gradient.redistribute(placements=parameter.placements)


def _refuse_size(name: str, module: nn.Module, style: ParallelStyle, degree: int) -> None:
    """Refuse a layer whose cut dimension is no multiple of the degree: it would fail in the middle of a forward."""
    if isinstance(style, (ColwiseParallel, RowwiseParallel)) and not isinstance(module, (nn.Linear, nn.Embedding)):
        raise Refusal(f"the plan cuts {name}, a {type(module).__name__}; only Linear and Embedding can be cut; {ELSE}")
    sizes = {
        (ColwiseParallel, nn.Linear): "out_features",
        (RowwiseParallel, nn.Linear): "in_features",
        (ColwiseParallel, nn.Embedding): "embedding_dim",
        (RowwiseParallel, nn.Embedding): "num_embeddings",
    }
    for (kind, layer), attribute in sizes.items():
        if isinstance(style, kind) and isinstance(module, layer):
            size = getattr(module, attribute)
            if size % degree:
                raise Refusal(
                    f"{name}.{attribute} {size} / {degree} tensor ranks is not whole; {_degrees(size)}; {ELSE}"
                )


def _refuse_tied(name: str, module: nn.Module, network: nn.Module) -> None:
    """Refuse to cut a parameter that another module uses too: only one of the two would hold the part."""
    own = {id(parameter) for parameter in module.parameters()}
    for other, parameter in network.named_parameters(remove_duplicate=False):
        if id(parameter) in own and not other.startswith(f"{name}."):
            raise Refusal(
                f"the plan cuts {name}, whose parameter is tied to {other}; tied parameters cannot be cut; {ELSE}"
            )


def _degrees(size: int) -> str:
    return "degrees that work: " + ", ".join(str(d) for d in range(1, min(size, 64) + 1) if size % d == 0)
