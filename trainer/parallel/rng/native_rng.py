"""Random numbers of a forward from the global generators, which are seeded for each micro-batch (`native`)."""

from __future__ import annotations

import random
import sys
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch
from torch import Tensor, nn

from trainer.data.rng import mix_seeds, seed_torch
from trainer.learning.parallel_plan import Plan
from trainer.parallel.ranks import Ranks
from trainer.parallel.rng.random_draw import DrawSites


class TorchRNG:
    """Random numbers follow from (seed, step, micro-batch, data rank), and are torch's own.

    The strategy calls these methods in every step; `SampleRNG` overrides those in which it differs.
    """

    draws_samples = False  # has each sample its own?
    sites: DrawSites | None = None  # whose the rows of each draw are; None: nobody has looked, or asks

    def __init__(self, seed: int, device: torch.device) -> None:
        self._seed, self._device = seed, device
        self.units: list[str] = []  # by which draws are counted, where samples have their own
        self._python_state: Any = None  # of Python's and NumPy's generators as the last forward found them
        self._python_used: bool | None = None  # does a forward draw from them? None: none has begun yet

    def __enter__(self) -> None:
        """Around forwards, and around their backwards, in which they may be computed again."""

    def __exit__(self, *error: object) -> None:
        """Draws are torch's own again."""

    def watch(self, network: nn.Module, plan: Plan) -> None:
        """Know the units of a network, which is whole as yet, by their names."""

    def learn(self, sites: DrawSites | None) -> None:
        """Know the places that draw, before the first step."""

    def call_outside(self, function: Callable[..., Any], *args: Any) -> Any:
        """Call a function that is no part of the network and may draw, for example a loss."""
        return function(*args)

    def begin_forward(self, indices: Tensor, step: int, *place: int) -> None:
        """A forward of these samples begins. place: micro-batch, data rank, and the stage if there are several."""
        seed = mix_seeds(self._seed, step, *place)
        seed_torch(seed, self._device)
        self._seed_python(seed)

    def begin_evaluation(self, indices: Tensor) -> None:
        """A forward of these samples begins in which nothing is learned."""

    def set_ranks(self, tensor: Ranks, context: Ranks, most_pieces: int) -> None:
        """These ranks share the layers of a network, and these the tokens of its samples, in so many pieces."""

    def set_tokens(self, tokens: int) -> None:
        """In this forward this rank has so many tokens of each sample."""

    def in_graph(self, numbers: list[int | None]) -> AbstractContextManager[None]:
        """Around a compiled graph with these draws."""
        return nullcontext()

    def pop_notes(self) -> list[str]:
        """What a user should know of the draws since the last call."""
        return []

    def _seed_python(self, seed: int) -> None:
        """Seed Python's and NumPy's generators, which costs as much as some layers: only while forwards draw there."""
        if self._python_used is None and self._python_state is not None:  # the first forward has shown it
            self._python_used = self._python_state != python_states()
        if self._python_used is False:
            return
        seed_python(seed)
        if self._python_used is None:
            self._python_state = python_states()


def seed_python(seed: int) -> None:
    """Seed the generators of Python and, if somebody has imported it, of NumPy."""
    random.seed(seed)
    if "numpy" in sys.modules:
        sys.modules["numpy"].random.seed(seed & 0xFFFFFFFF)


def python_states() -> tuple[Any, str]:
    """The states of Python's and NumPy's generators."""
    numpy = sys.modules.get("numpy")
    return random.getstate(), repr(numpy.random.get_state(legacy=False)) if numpy else ""
