"""Is a state finite? Of what training moves, which tensors hold NaN or infinity."""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor, nn

from trainer.parallel.batch_norm import statistics
from trainer.parallel.local_shard import held
from trainer.parallel.optimizer_state import AVERAGE, PREFIX


def moving(network: nn.Module, state: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Of a checkpoint's tensors those that training moves, so that all their numbers must be finite.

    Trainable parameters, BatchNorm's running statistics, the averages of both, and the optimizer's memories. Other
    buffers and frozen parameters may be infinite by design (masks of -inf, a best value that starts at inf), and so may
    lone numbers that an optimizer keeps.
    """
    trainable = {name for name, one in network.named_parameters(remove_duplicate=False) if one.requires_grad}
    own = trainable | statistics(network).keys()
    return {name: x for name, x in state.items() if name in own or (name.startswith((PREFIX, AVERAGE)) and x.ndim)}


def not_finite(tensors: Mapping[str, Tensor]) -> list[str]:
    """The names of those that hold NaN or infinity, in what this rank holds of them. Waits for the device."""
    # one type and device at a time: their answers are one number to wait for; an empty shard has no extremes
    alike: dict[tuple[torch.device, torch.dtype], dict[str, Tensor]] = {}
    for name, one in tensors.items():
        own = held(one).detach()
        if own.is_floating_point() and own.numel():
            own = own.float() if own.itemsize == 1 else own  # torch compares no float8
            alike.setdefault((own.device, own.dtype), {})[name] = own
    # both extremes are finite only where all numbers are, and aminmax is one pass: 8 times as fast as isfinite
    extremes = {kind: torch.stack([torch.stack(x.aminmax()) for x in own.values()]) for kind, own in alike.items()}
    broken = [alike[kind] for kind, each in extremes.items() if not each.isfinite().all()]
    return [name for own in broken for name, x in own.items() if not x.isfinite().all()]
