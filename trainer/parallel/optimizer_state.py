"""An optimizer's state by the names of its parameters: `optimizer/<parameter>/<key>`, as a checkpoint stores it.

Here are also the other prefixes of names in a checkpoint, and how its network differs from the one at hand.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor, Placement, Replicate, zeros

from trainer.learning.optimizer_leaves import is_plain, load_leaves, optimizer_leaves
from trainer.messages import Refusal
from trainer.parallel.muon_on_shards import MuonOnShards

OPTIMIZER_PREFIX = "optimizer/"
EMA_PREFIX = "ema/"
STRATEGY_PREFIX = "strategy/"  # of what one strategy alone keeps, and no other reads
# names in a checkpoint that begin so are not the network's; older versions wrote carried/, which nobody reads
OTHER_PREFIXES = (OPTIMIZER_PREFIX, EMA_PREFIX, STRATEGY_PREFIX, "scaler/", "carried/")


def is_optimizer_state(name: str) -> bool:
    """Is this the name of what an optimizer keeps, of all ranks or (in a strategy's own part) of one?"""
    return name.startswith(OPTIMIZER_PREFIX) or f"/{OPTIMIZER_PREFIX}" in name


def optimizer_tensors(network: nn.Module, optimizer: torch.optim.Optimizer) -> dict[str, Tensor]:
    """The optimizer's state as one flat dict: of each parameter, what this rank keeps of it."""
    names: dict[Tensor, str] = {parameter: name for name, parameter in network.named_parameters()}
    return {
        f"{OPTIMIZER_PREFIX}{names[parameter]}/{key}": x
        for parameter, leaves in optimizer_leaves(optimizer).items()
        for key, x in leaves.items()
    }


def empty_optimizer_state(
    network: nn.Module, optimizer: torch.optim.Optimizer, stored: Mapping[str, Any], known: Collection[str]
) -> dict[str, Tensor]:
    """Zeros for all stored optimizer state that this rank's optimizer takes, sharded as the parameter it belongs to.

    State of another shape than its parameter (step counts) is whole. stored: name → what has a shape and a dtype.
    known: the names of the whole network, of which this rank may hold some. Refusal where state belongs to none.
    """
    # a rank may own, or hold, a few of the network's parameters: others read the rest
    optimized = {parameter for group in optimizer.param_groups for parameter in group["params"]}
    parameters: dict[str, Tensor] = {name: p for name, p in network.named_parameters() if p in optimized}
    if isinstance(optimizer, MuonOnShards):  # of some parameters the whole, or nothing
        likes = {name: optimizer.state_like(parameter) for name, parameter in parameters.items()}
        parameters = {name: like for name, like in likes.items() if like is not None}
    space: dict[str, Tensor] = {}
    for name, parameter_name, key in _split_names(stored):
        if parameter_name not in known:
            raise Refusal(f"the checkpoint's {name} belongs to no parameter of this network")
        if parameter_name not in parameters:
            continue
        parameter, shape, dtype = parameters[parameter_name], tuple(stored[name].shape), stored[name].dtype
        # moments are of the type of their parameter, in a run of another precision of another one
        if shape == parameter.shape and parameter_name in stored and dtype == stored[parameter_name].dtype:
            dtype = parameter.dtype
        if is_plain(key):
            space[name] = torch.zeros(shape, dtype=dtype)
        elif shape == parameter.shape:  # moments: they are sharded as their parameter is
            space[name] = torch.zeros_like(parameter, dtype=dtype, requires_grad=False)
        elif isinstance(parameter, DTensor) and shape:  # for example one number a row: along the dimensions it shares
            placements = _placements(parameter, shape)
            space[name] = zeros(shape, dtype=dtype, device_mesh=parameter.device_mesh, placements=placements)
        else:  # step counts
            space[name] = torch.zeros(shape, dtype=dtype)
    return space


def _placements(parameter: DTensor, shape: Sequence[int]) -> list[Placement]:
    """How state of another shape is sharded: along its parameter's dimensions where it has them, else not.

    If rows of a parameter are sharded, a number for each row is on the rank that has the row.
    """
    placements = []
    for placement in parameter.placements:
        dim = getattr(placement, "dim", None)
        has = dim is not None and dim < len(shape) and shape[dim] == parameter.shape[dim]
        placements.append(placement if has else Replicate())
    return placements


def restore_optimizer(network: nn.Module, optimizer: torch.optim.Optimizer, state: Mapping[str, Tensor]) -> None:
    """Load the optimizer's state. Its groups and hyper-parameters stay those of the present configuration."""
    parameters: dict[str, Tensor] = dict(network.named_parameters())
    leaves: dict[Tensor, dict[str, Tensor]] = {}
    for name, parameter_name, key in _split_names(state):
        leaves.setdefault(parameters[parameter_name], {})[key] = state[name]
    load_leaves(optimizer, leaves)


def refuse_checkpoint_shapes(shapes: Mapping[str, Sequence[int]], stored: Mapping[str, Any]) -> None:
    """Refuse a checkpoint of another network than this one; the message names at most ten differences."""
    wrong = network_differences(shapes, stored)
    if wrong:
        more = f" and {len(wrong) - 10} more" if len(wrong) > 10 else ""
        raise Refusal(f"the checkpoint is of another network: {'; '.join(wrong[:10])}{more}")


def network_differences(shapes: Mapping[str, Sequence[int]], stored: Mapping[str, Any]) -> list[str]:
    """How a checkpoint's network (name → what has a shape) differs from these shapes: a sentence for each tensor."""
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
    """Of all optimizer state: its name, the name of its parameter, and the optimizer's key."""
    for name in names:
        if name.startswith(OPTIMIZER_PREFIX):
            parameter_name, _, key = name.removeprefix(OPTIMIZER_PREFIX).rpartition("/")
            yield name, parameter_name, key
