"""Random numbers of a forward from torch's own generators, which are seeded for each micro-batch (`native`)."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

from trainer.data.rng import mix_seeds, seed_torch
from trainer.learning.parallel_plan import Plan
from trainer.parallel.ranks import Ranks


class TorchRNG:
    """Random numbers follow from (seed, step, micro-batch, data rank), and are torch's own.

    The strategy calls these methods in every step; `SampleRNG` overrides those in which it differs.
    """

    modes: Sequence[type[TorchFunctionMode]] = ()  # that give samples their own

    def __init__(self, seed: int, device: torch.device) -> None:
        self._seed, self._device = seed, device

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

    def set_sequence_shard(self, ranks: Ranks, tokens: int, most_pieces: int) -> None:
        """In this forward these ranks have so many tokens of each sample, in at most so many pieces."""

    def pop_notes(self) -> list[str]:
        """What a user should know of the draws since the last call."""
        return []
