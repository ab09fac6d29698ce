"""An optimizer's tensors by the names of the parameters they belong to: `optimizer/<parameter>/<key>`."""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor, Placement, Replicate, zeros

from trainer.messages import Refusal

OPTIMIZER_PREFIX = "optimizer/"
EMA_PREFIX = "ema/"
CARRIED_PREFIX = "carried/"
STRATEGY_PREFIX = "strategy/"  # of what one strategy alone keeps, and no other reads
OTHER_PREFIXES = (
    OPTIMIZER_PREFIX,
    EMA_PREFIX,
    CARRIED_PREFIX,
    STRATEGY_PREFIX,
    "scaler/",
)  # begin names in a checkpoint that are not the network's


def optimizer_tensors(network: nn.Module, optimizer: torch.optim.Optimizer) -> dict[str, Tensor]:
    """What the optimizer remembers, flat. TypeError where that is more than tensors: nothing could give it back."""
    names: dict[Tensor, str] = {parameter: name for name, parameter in network.named_parameters()}
    flat: dict[str, Tensor] = {}
    for parameter, memory in optimizer.state.items():
        for key, value in memory.items():
            if value is None:  # SGD without momentum
                continue
            if not isinstance(value, Tensor):
                raise TypeError(
                    f"{type(optimizer).__name__} keeps {key} as {type(value).__name__}; only tensors can be saved"
                )
            flat[f"{OPTIMIZER_PREFIX}{names[parameter]}/{key}"] = value
    return flat


def empty_optimizer_state(
    network: nn.Module, optimizer: torch.optim.Optimizer, stored: Mapping[str, Any], known: Collection[str]
) -> dict[str, Tensor]:
    """Tensors for every stored memory that this rank's optimizer takes, split as the parameter it belongs to.

    Those of another shape than their parameter (step counts) are whole. `known`: the names of the whole network, of
    which this rank may hold some; Refusal where a memory belongs to none of them.
    """
    # a rank may own, or hold, a few of the network's parameters: others read the rest
    taken = {id(parameter) for group in optimizer.param_groups for parameter in group["params"]}
    parameters = {name: parameter for name, parameter in network.named_parameters() if id(parameter) in taken}
    space: dict[str, Tensor] = {}
    for name, parameter_name, _ in _split_names(stored):
        if parameter_name not in known:
            raise Refusal(f"the checkpoint's {name} belongs to no parameter of this network")
        if parameter_name not in parameters:
            continue
        parameter, fact = parameters[parameter_name], stored[name]
        # moments lie as their parameter does; what has other dimensions as far as it shares them; numbers whole
        if tuple(fact.shape) == tuple(parameter.shape):
            space[name] = torch.zeros_like(parameter, dtype=fact.dtype, requires_grad=False)
        elif isinstance(parameter, DTensor) and len(fact.shape):
            space[name] = zeros(
                tuple(fact.shape),
                dtype=fact.dtype,
                device_mesh=parameter.device_mesh,
                placements=_memory_placements(parameter, fact.shape),
            )
        else:
            space[name] = torch.zeros(tuple(fact.shape), dtype=fact.dtype)
    return space


def _memory_placements(parameter: DTensor, shape: Sequence[int]) -> list[Placement]:
    """How a memory of another shape is spread: along its parameter's dimensions where it has them, else whole.

    One number for each row of a parameter whose rows are spread lies beside its row.
    """
    spread = []
    for placement in parameter.placements:
        dim = getattr(placement, "dim", None)
        has = dim is not None and dim < len(shape) and shape[dim] == parameter.shape[dim]
        spread.append(placement if has else Replicate())
    return spread


def restore_optimizer(network: nn.Module, optimizer: torch.optim.Optimizer, state: Mapping[str, Tensor]) -> None:
    """Give the optimizer its memory back. Its groups and hyper-parameters stay those of the present configuration."""
    memories: dict[str, dict[str, Tensor]] = {}
    for name, parameter_name, key in _split_names(state):
        memories.setdefault(parameter_name, {})[key] = state[name]
    names = {parameter: name for name, parameter in network.named_parameters()}
    order = [names[parameter] for group in optimizer.param_groups for parameter in group["params"]]
    # load_state_dict puts step counts where this optimizer wants them (the device if it is fused, else the CPU)
    optimizer.load_state_dict(
        {
            "state": {index: memories[name] for index, name in enumerate(order) if name in memories},
            "param_groups": optimizer.state_dict()["param_groups"],
        }
    )


def refuse_other_network(shapes: Mapping[str, Sequence[int]], stored: Mapping[str, Any]) -> None:
    """Refusal, naming at most ten, where a checkpoint's network is not this one."""
    wrong = network_differences(shapes, stored)
    if wrong:
        more = f" and {len(wrong) - 10} more" if len(wrong) > 10 else ""
        raise Refusal(f"the checkpoint is of another network: {'; '.join(wrong[:10])}{more}")


def network_differences(shapes: Mapping[str, Sequence[int]], stored: Mapping[str, Any]) -> list[str]:
    """How a checkpoint's network (name → what has a shape) is not the one with these shapes, a sentence a tensor."""
    # what belongs to optimizer, average, scaler and batches is compared when it is read
    theirs = {name for name in stored if not name.startswith(OTHER_PREFIXES)}
    other = [
        f"{name} is {tuple(stored[name].shape)} in the checkpoint, {tuple(shapes[name])} here"
        for name in shapes
        if name in theirs and tuple(stored[name].shape) != tuple(shapes[name])
    ]
    missing = [f"{name} is not in the checkpoint" for name in shapes if name not in theirs]
    return other + missing + [f"{name} is only in the checkpoint" for name in sorted(theirs - shapes.keys())]


def _split_names(names: Mapping[str, Any]) -> Iterator[tuple[str, str, str]]:
    for name in names:
        if name.startswith(OPTIMIZER_PREFIX):
            parameter_name, _, key = name.removeprefix(OPTIMIZER_PREFIX).rpartition("/")
            yield name, parameter_name, key
