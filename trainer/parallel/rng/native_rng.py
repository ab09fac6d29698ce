"""Random numbers of a forward from torch's own generators, which are seeded for each micro-batch (`native`)."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from hashlib import blake2b
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.tensor import Shard
from torch.overrides import TorchFunctionMode

from trainer.data.rng import mix_seeds, seed_torch
from trainer.launch.devices import default_generator
from trainer.learning.parallel_plan import Plan
from trainer.parallel.module_units import matching_modules
from trainer.parallel.ranks import Ranks
from trainer.parallel.tensor_parallel import activation_layouts


class TorchRNG:
    """Random numbers follow from (seed, step, micro-batch, data rank), and are torch's own.

    The strategy calls these methods in every step; `SampleRNG` overrides those in which it differs.
    """

    modes: Sequence[type[TorchFunctionMode]] = ()  # that give samples their own

    def __init__(self, seed: int, device: torch.device) -> None:
        self._seed, self._device = seed, device
        self._tensor_rngs: list[TensorParallelRNG] = []  # one for each network whose layers tensor ranks split

    def __enter__(self) -> None:
        """Around forwards, and around their backwards, in which they may be computed again."""

    def __exit__(self, *error: object) -> None:
        """Draws are torch's own again."""

    def watch(self, network: nn.Module, may_draw: bool) -> None:
        """Know the modules of a network, which is whole as yet, by their names. may_draw: its caller may draw, too."""

    def call_outside(self, function: Callable[..., Any], *args: Any) -> Any:
        """Call a function that is no part of the network and may draw, for example a loss."""
        return function(*args)

    def begin_forward(self, indices: Tensor, step: int, *place: int) -> None:
        """A forward of these samples begins. place: micro-batch, data rank, and the stage if there are several."""
        seed_torch(mix_seeds(self._seed, step, *place), self._device)

    def begin_evaluation(self, indices: Tensor) -> None:
        """A forward of these samples begins in which nothing is learned."""

    def follow_plan(self, network: nn.Module, plan: Plan, ranks: Ranks) -> None:
        """These tensor ranks hold parts of the network's layers, as the plan says."""
        self._tensor_rngs.append(TensorParallelRNG(self._device, ranks.rank))
        self._tensor_rngs[-1].watch(network, plan)

    def set_sequence_shard(self, ranks: Ranks, tokens: int, most_pieces: int) -> None:
        """In this forward these ranks have so many tokens of each sample, in at most so many pieces."""

    def pop_notes(self) -> list[str]:
        """What a user should know of the draws since the last call."""
        return []

    def end_step(self) -> None:
        """A step is over: nobody will compute any of it again."""
        for rng in self._tensor_rngs:
            rng.end_step()


class TensorParallelRNG:
    """Switches between a stream that all tensor ranks share and one of this rank's own, at modules of the plan.

    All tensor ranks have one seed, so a dropout between a column-wise and a row-wise layer would hide the same places
    of every shard. There each rank draws from a stream of its own, which follows from the common one. Nothing is
    counted: recomputing puts the generator back to where a unit began, and so draws the same again.
    """

    def __init__(self, device: torch.device, rank: int) -> None:
        self._generator = default_generator(device)  # the one that dropout on this device draws from
        self._rank = rank  # among the tensor ranks
        # seed of this rank's stream → state of the common stream when it was left, state of this one as it began
        self._left: dict[int, tuple[Tensor, Tensor]] = {}

    def watch(self, network: nn.Module, plan: Plan) -> None:
        """Change streams where the plan's modules split activations and where they put them together."""
        if not plan.tensor:
            return
        # here and not where they are defined: it imports the compiler, which takes a second
        to_rank, to_common = torch.compiler.disable(self._to_rank), torch.compiler.disable(self._to_common)
        for key, style in plan.tensor.items():
            before, after = activation_layouts(style)
            for _, module in matching_modules(network, key):
                if before:
                    module.register_forward_pre_hook(to_rank if _is_split(before) else to_common)
                if after:
                    module.register_forward_hook(to_rank if _is_split(after) else to_common)

    def end_step(self) -> None:
        """A step is over: nobody will recompute any of it."""
        self._left.clear()

    def _to_rank(self, module: nn.Module, *_: Any) -> None:
        if not module.training or self._generator.initial_seed() in self._left:
            return
        # the rank's stream follows from where the common one stands, so no two splits of a forward draw the same
        common = self._generator.get_state()
        seed = mix_seeds(_hash_state(common), self._rank)
        self._generator.manual_seed(seed)
        self._left[seed] = common, self._generator.get_state()

    def _to_common(self, module: nn.Module, *_: Any) -> None:
        seed = self._generator.initial_seed()
        if not module.training or seed not in self._left:
            return
        # back to whole activations, where all ranks must draw alike
        common, began = self._left[seed]
        if torch.equal(self._generator.get_state(), began):
            self._generator.set_state(common)  # nothing was drawn: go on as one process does
        else:
            self._generator.manual_seed(
                mix_seeds(_hash_state(common))
            )  # or the next split would find this stream again


def _is_split(layouts: Any) -> bool:
    """Does each tensor rank have another part of such activations? layouts: a placement, or one for each argument."""
    return any(isinstance(layout, Shard) for layout in (layouts if isinstance(layouts, tuple) else (layouts,)))


def _hash_state(state: Tensor) -> int:
    """A generator's state, (bytes,) uint8, as a number of 56 bits."""
    return int.from_bytes(blake2b(state.numpy().tobytes(), digest_size=7).digest())
