"""Random numbers under tensor parallelism: a rank's own where activations are split, all ranks' where whole."""

from __future__ import annotations

from hashlib import blake2b
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.tensor import Shard
from torch.distributed.tensor.parallel import ParallelStyle, PrepareModuleInput, PrepareModuleInputOutput

from trainer.data.seeds import mix
from trainer.learning.plan import Plan
from trainer.parallel.units import matches


class Masks:
    """Which random numbers a forward draws on this rank; it changes at the modules that a plan names.

    All tensor ranks have one seed, so a dropout between a column-wise and a row-wise layer would hide the same places
    of every shard. There each rank draws from a stream of its own, which follows from the common one: nothing is
    counted, so recomputing, which puts the generator back to where a unit began, draws the same again.
    """

    def __init__(self, device: torch.device, rank: int) -> None:
        cuda = device.type == "cuda"
        self._generator = torch.cuda.default_generators[device.index or 0] if cuda else torch.default_generator
        self._rank = rank
        # own seed → the common stream where it was left, the own stream as it began
        self._left: dict[int, tuple[Tensor, Tensor]] = {}

    def follow(self, network: nn.Module, plan: Plan) -> None:
        """Change streams where the plan's modules split activations and where they put them together."""
        for key, style in plan.tensor.items():
            before, after = _layouts(style)
            for _, module in matches(network, key):
                if before:
                    module.register_forward_pre_hook(self._own if _is_split(before) else self._common)
                if after:
                    module.register_forward_hook(self._own if _is_split(after) else self._common)

    def forget(self) -> None:
        """A step is over: nobody will recompute any of it."""
        self._left.clear()

    @torch.compiler.disable
    def _own(self, module: nn.Module, *_: Any) -> None:
        if not module.training or self._generator.initial_seed() in self._left:
            return
        # the own stream follows from where the common one stands, so no two splits of a forward draw the same
        common = self._generator.get_state()
        seed = mix(_number(common), self._rank)
        self._generator.manual_seed(seed)
        self._left[seed] = common, self._generator.get_state()

    @torch.compiler.disable
    def _common(self, module: nn.Module, *_: Any) -> None:
        seed = self._generator.initial_seed()
        if not module.training or seed not in self._left:
            return
        # back to whole activations, where all ranks must draw alike
        common, began = self._left[seed]
        if torch.equal(self._generator.get_state(), began):
            self._generator.set_state(common)  # nothing was drawn: go on as one process does
        else:
            self._generator.manual_seed(mix(_number(common)))  # or the next split would find the own stream again


def _layouts(style: ParallelStyle) -> tuple[Any, Any]:
    """How activations lie when a module begins and when it has ended; None: as they were."""
    if isinstance(style, PrepareModuleInputOutput):
        return style.prepare_module_input.desired_input_layouts, style.prepare_module_output.desired_output_layouts
    if isinstance(style, PrepareModuleInput):
        return style.desired_input_layouts, None
    for name in ("desired_output_layouts", "output_layouts", "sequence_sharding"):
        if hasattr(style, name):
            return None, getattr(style, name)
    return None, None


def _is_split(layouts: Any) -> bool:
    return any(isinstance(layout, Shard) for layout in (layouts if isinstance(layouts, tuple) else (layouts,)))


def _number(state: Tensor) -> int:
    return int.from_bytes(blake2b(state.numpy().tobytes(), digest_size=7).digest())
