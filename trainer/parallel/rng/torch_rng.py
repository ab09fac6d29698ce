"""Random numbers of a forward from torch's own generators."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from hashlib import blake2b
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.tensor import Shard

from trainer.data.rng import mix_seeds, seed_torch
from trainer.launch.devices import default_generator
from trainer.learning.parallel_plan import Plan
from trainer.parallel.ranks import Ranks
from trainer.parallel.tensor_parallel import layouts
from trainer.parallel.units import matches


class TorchRNG:
    """Random numbers follow from (seed, step, micro-batch, data rank), and are torch's own."""

    def __init__(self, seed: int, device: torch.device) -> None:
        self._seed, self._device = seed, device
        self._masks: list[Any] = []  # of the tensor ranks, if there are any

    def __enter__(self) -> None:
        """Around forwards, and around their backwards, in which they may be computed again."""

    def __exit__(self, *error: object) -> None:
        """Draws are torch's own again."""

    def follow(self, network: nn.Module, may_draw: bool) -> None:
        """Know the modules of a network, which is whole as yet, by their names. may_draw: so may what calls it."""

    def call(self, function: Callable[..., Any], *args: Any) -> Any:
        """What a function gives that is no part of the network, and may draw."""
        return function(*args)

    def begin(self, indices: Tensor, step: int, *place: int) -> None:
        """A forward begins, of these samples. place: the micro-batch, the data rank, the stage if there are several."""
        seed_torch(mix_seeds(self._seed, step, *place), self._device)

    def go_on(self, calls: Mapping[str, int]) -> None:
        """The forward that begins is the rest of one that has called these modules so often."""

    def begin_evaluation(self, indices: Tensor) -> None:
        """The same where nothing is learned."""

    def split(self, network: nn.Module, plan: Plan, ranks: Ranks) -> None:
        """These ranks have layers of a network in parts, as the plan says."""
        self._masks.append(Masks(self._device, ranks.rank))
        self._masks[-1].follow(network, plan)

    def cut(self, ranks: Ranks, tokens: int, most: int) -> None:
        """In this forward these ranks have stretches of so many tokens of each sample, of at most so many pieces."""

    def heard(self) -> list[str]:
        """What a user should know of the draws since this was asked last."""
        return []

    def forget(self) -> None:
        """A step is over: nobody will compute any of it again."""
        for masks in self._masks:
            masks.forget()


class Masks:
    """Which random numbers a forward draws on this rank; it changes at the modules that a plan names.

    All tensor ranks have one seed, so a dropout between a column-wise and a row-wise layer would hide the same places
    of every shard. There each rank draws from a stream of its own, which follows from the common one: nothing is
    counted, so recomputing, which puts the generator back to where a unit began, draws the same again.
    """

    def __init__(self, device: torch.device, rank: int) -> None:
        self._generator = default_generator(device)
        self._rank = rank
        # own seed → the common stream where it was left, the own stream as it began
        self._left: dict[int, tuple[Tensor, Tensor]] = {}

    def follow(self, network: nn.Module, plan: Plan) -> None:
        """Change streams where the plan's modules split activations and where they put them together."""
        for key, style in plan.tensor.items():
            before, after = layouts(style)
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
        seed = mix_seeds(_number(common), self._rank)
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
            self._generator.manual_seed(mix_seeds(_number(common)))  # or the next split would find the own stream again


def _is_split(layouts: Any) -> bool:
    return any(isinstance(layout, Shard) for layout in (layouts if isinstance(layouts, tuple) else (layouts,)))


def _number(state: Tensor) -> int:
    return int.from_bytes(blake2b(state.numpy().tobytes(), digest_size=7).digest())
