"""Networks on the meta device, and the values that one rank has built for all of them.

Where ranks hold shards, only the first rank builds a network with values. The others hold shapes without memory, which
torch calls the meta device, and take their shard of each tensor when it is sent.
"""

from __future__ import annotations

import gc
from collections.abc import Callable, Iterator

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor, distribute_tensor

from trainer.messages import first_line
from trainer.parallel.device_mesh import to_local
from trainer.parallel.ranks import Ranks

Values = dict[tuple[str, ...], Tensor]  # all names of a tensor → it; on the meta device where only its shape is known


def build_meta_model(make: Callable[[], nn.Module]) -> tuple[nn.Module, str]:
    """The network on the meta device and ""; or the network with values, and why its constructor needs them."""
    before = _live_meta_tensors()  # kept until the end, so that nothing new can have the identity of one of them
    try:
        with torch.device("meta"):
            network = make()
        drop_computed_weights(network)
    except Exception as error:  # a constructor that reads values: whatever it makes of there being none, or a mistake
        cause = error.__cause__ or error  # a refusal to build it says the same in the words of a command line
        why = f"{type(cause).__name__}: {first_line(cause)}"
    else:
        # a tensor that is neither parameter nor buffer would never get a value; a view keeps its base alive
        registered = [x for _, tensor in named_state(network) for x in (tensor, tensor._base)]
        known = {id(x) for x in (*registered, *before)}
        if all(id(tensor) in known for tensor in _live_meta_tensors()):
            return network, ""
        why = "it holds tensors that are neither parameters nor buffers"
    return make(), why


def drop_computed_weights(network: nn.Module) -> None:
    """Delete weights that a hook computes before each forward, as of torch's old weight_norm and of prune.

    Until then they would hold on to the parameters that they are computed of, which could not be swapped.
    """
    for module in network.modules():
        for name, value in list(vars(module).items()):
            if isinstance(value, Tensor) and value.grad_fn is not None:
                delattr(module, name)


def is_meta_model(network: nn.Module) -> bool:
    """Is any tensor of the network without values?"""
    return any(tensor.is_meta for _, tensor in named_state(network))


def all_in_state_dict(network: nn.Module) -> bool:
    """Does a checkpoint hold every value of the network? Buffers may have been made not to be stored."""
    return {name for name, _ in named_state(network)} <= set(network.state_dict())


@torch.no_grad()
def move_to_meta(network: nn.Module) -> Values:
    """Move a network to the meta device, in place; returns the values that it had."""
    drop_computed_weights(network)
    for module in network.modules():
        # It keeps weak references, to see whether its weights are still the same: what has one cannot be swapped. It
        # does without, and has to: it would lay weights that FSDP has gathered out anew, in memory that stays behind.
        if isinstance(module, nn.RNNBase):
            module._flat_weight_refs = [None] * len(module._flat_weight_refs)
    names: dict[Tensor, list[str]] = {}
    for name, tensor in named_state(network):
        names.setdefault(tensor, []).append(name)
    values: Values = {}
    for tensor, tensor_names in names.items():
        other = _empty_like(tensor, torch.device("meta"))
        torch.utils.swap_tensors(tensor, other)  # every name and every tie keeps its tensor; the other has the values
        values[tuple(tensor_names)] = other.detach()
    return values


@torch.no_grad()
def allocate_empty(network: nn.Module, device: torch.device, shards: torch.device) -> None:
    """Give a network on the meta device memory, in place; no value is written. shards: where DTensors are to lie."""
    for tensor in {tensor for _, tensor in named_state(network) if tensor.is_meta}:
        torch.utils.swap_tensors(tensor, _empty_like(tensor, shards if isinstance(tensor, DTensor) else device))


@torch.no_grad()
def broadcast_values(values: Values, network: nn.Module, ranks: Ranks, device: torch.device) -> None:
    """Collective: the first rank's values come to all ranks, of each tensor the shard that a rank holds.

    values: of the whole network; they are freed on the way, so that a rank holds one whole tensor at a time. Nothing
    travels where the first rank has no values either: a checkpoint will be read.
    """
    known = ranks.broadcast_value(not any(value.is_meta for value in values.values()))  # all ranks
    tensors = dict(named_state(network))
    # in the constructor's order, which is the same on every rank
    for names in list(values) if known else ():
        value = values.pop(names)  # freed when the next one comes
        whole = torch.empty_like(value, device=device) if value.is_meta else value.to(device)
        ranks.broadcast_(whole)  # all ranks; every tensor of the network once, whole: who holds what differs
        for tensor in {tensors[name] for name in names if name in tensors}:
            shard = whole
            if isinstance(tensor, DTensor):  # nothing travels: this rank's shard of what has come
                shard = distribute_tensor(whole, tensor.device_mesh, tensor.placements, src_data_rank=None).to_local()
            to_local(tensor).copy_(shard)


def _empty_like(tensor: Tensor, device: torch.device) -> Tensor:
    """A tensor or parameter of the same shape and kind, with memory that nobody has written to."""
    other = torch.empty_like(tensor, device=device)
    return nn.Parameter(other, tensor.requires_grad) if isinstance(tensor, nn.Parameter) else other


def _live_meta_tensors() -> list[Tensor]:
    """Every tensor on the meta device that is alive, wherever it is kept."""
    alive = [each for each in gc.get_objects() if type(each) in (Tensor, nn.Parameter)]
    return [tensor for tensor in alive if tensor.is_meta]


def named_state(module: nn.Module) -> Iterator[tuple[str, Tensor]]:
    """Every parameter and buffer, under each of its names."""
    yield from module.named_parameters(remove_duplicate=False)
    yield from module.named_buffers(remove_duplicate=False)
