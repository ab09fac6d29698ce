"""What a plan says of modules that work on stretches of sequences: each context rank has one of every sequence."""

from __future__ import annotations

from typing import Any

from torch import Tensor, cat, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Partial, Replicate, Shard
from torch.distributed.tensor.parallel import ParallelStyle


class GatheredKeys(ParallelStyle):
    """Causal attention, called with (queries, keys, values): it gets the keys and values of all earlier tokens.

    The module gets the queries of this rank's stretch, (…, T, …), and keys and values from the beginning of the
    sequence to the end of the stretch, (…, S, …): so the last query may see the last key, and each query before one
    key less (`torch.nn.attention.bias.causal_lower_right`). Gathered, not sent in a ring: Grattafiori et al. 2024,
    arXiv:2407.21783, section 3.3.2. dim: that of the tokens.
    """

    def __init__(self, dim: int = 2) -> None:
        self._dim = dim

    def _apply(self, module: nn.Module, device_mesh: DeviceMesh) -> nn.Module:
        """What torch calls, in 2.11 to 2.15: no public name is meant for styles of one's own."""
        rank, dim = device_mesh.get_local_rank(), self._dim

        def gather(_: nn.Module, args: tuple[Any, ...]) -> tuple[Any, ...]:
            queries, keys, values, *rest = args
            # of later stretches nothing is seen
            seen = (rank + 1) * keys.shape[dim]
            both = _gathered(cat((keys, values), -1), device_mesh, dim).narrow(dim, 0, seen)
            return queries, *both.split((keys.shape[-1], values.shape[-1]), -1), *rest

        module.register_forward_pre_hook(gather)
        return module


class ShiftedPlaces(ParallelStyle):
    """A module that is told where its first argument's tokens are: it is told where they are in the whole sequence.

    argument: which one holds the place of the first token, or the places of all, as numbers. dim: that of the tokens
    in the first argument.
    """

    def __init__(self, argument: int = 0, dim: int = -1) -> None:
        self._argument, self._dim = argument, dim

    def _apply(self, module: nn.Module, device_mesh: DeviceMesh) -> nn.Module:
        """What torch calls."""
        rank, at, dim = device_mesh.get_local_rank(), self._argument, self._dim

        def shift(_: nn.Module, args: tuple[Any, ...]) -> tuple[Any, ...]:
            before = rank * args[0].shape[dim]  # all stretches are as long
            return *args[:at], args[at] + before, *args[at + 1 :]

        module.register_forward_pre_hook(shift)
        return module


def _gathered(stretch: Tensor, mesh: DeviceMesh, dim: int) -> Tensor:
    """Collective: the stretches of all context ranks, one behind the other; gradients go back to whom they belong."""
    own = DTensor.from_local(stretch, mesh, [Shard(dim)], run_check=False)
    # the context ranks; forward: each one's keys and values to all, backward: the sum of what all have found for them
    return own.redistribute(placements=[Replicate()]).to_local(grad_placements=[Partial()])
