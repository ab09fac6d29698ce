"""Handing values from stage to stage, forwards only; a shape travels the first time it is seen."""

from __future__ import annotations

import json
from collections.abc import Callable, Hashable, Mapping
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.tensor import DTensor

from trainer.parallel.ranks import Group
from trainer.parallel.schedules import Layout


class Handover:
    """Runs stages over the ranks of a pipeline, one after the other, and remembers the shapes of what they hand on.

    Shapes go ahead as JSON in a CPU tensor: torch's own way to learn them is a pickle for each.
    """

    def __init__(self, ranks: Group, layout: Layout, device: torch.device) -> None:
        self._ranks, self._layout, self._device = ranks, layout, device
        self._known: dict[tuple[Hashable, int], list[Tensor]] = {}  # of what each stage here receives or sends, empty

    def run(self, key: Hashable, stages: Mapping[int, Callable[..., Any]]) -> Any:
        """Collective over the pipeline: call this rank's stages, by number, with what the stage before hands on.

        Returns what the last stage of all returns, where that is here. `key`: the same for inputs of the same shapes,
        and only for those. RuntimeError where shapes differ all the same.
        """
        values: Any = ()
        under_way: list[tuple[Any, Tensor]] = []  # a tensor must live until it is sent
        for stage in sorted(stages):
            if stage and self._layout.owner(stage - 1) != self._ranks.rank:
                values = self._receive(key, stage)
            values = stages[stage](*values)
            if stage == self._layout.count - 1:
                break
            if self._layout.owner(stage + 1) == self._ranks.rank:
                self._remember(key, stage + 1, values)
            else:
                under_way += self._send(key, stage + 1, values)
        for work, _ in under_way:
            work.wait()
        return values if self._layout.count - 1 in stages else None

    def received(self, key: Hashable, stage: int) -> tuple[Tensor, ...]:
        """What this stage receives, as tensors on the meta device; both ranks at a boundary know it after a run."""
        return tuple(self._known[key, stage]) if stage else ()

    def _send(self, key: Hashable, stage: int, values: tuple[Tensor, ...]) -> list[tuple[Any, Tensor]]:
        peer, sent = self._layout.owner(stage), list(values)
        if self._remember(key, stage, values):
            text = json.dumps([[list(value.shape), str(value.dtype).removeprefix("torch.")] for value in values])
            letters = torch.tensor(list(text.encode()), dtype=torch.uint8)
            sent = [torch.tensor([len(letters)]), letters, *sent]
        # to the rank of the next stage; every value once, the first time with its shape before it
        return [(dist.isend(value, group=self._ranks.group, group_dst=peer), value) for value in sent]

    def _receive(self, key: Hashable, stage: int) -> tuple[Tensor, ...]:
        peer, group = self._layout.owner(stage - 1), self._ranks.group
        if (key, stage) not in self._known:
            size = torch.zeros(1, dtype=torch.int64)
            dist.recv(size, group=group, group_src=peer)
            letters = torch.empty(int(size), dtype=torch.uint8)
            dist.recv(letters, group=group, group_src=peer)
            told = json.loads(bytes(letters.tolist()))
            self._known[key, stage] = [
                torch.empty(shape, dtype=getattr(torch, dtype), device="meta") for shape, dtype in told
            ]
        values = tuple(torch.empty_like(value, device=self._device) for value in self._known[key, stage])
        for value in values:
            dist.recv(value, group=group, group_src=peer)
        return values

    def _remember(self, key: Hashable, stage: int, values: tuple[Tensor, ...]) -> bool:
        """Note what goes into a stage; was it new?"""
        for value in values:
            if not isinstance(value, Tensor) or isinstance(value, DTensor):
                raise RuntimeError(
                    f"between stages {stage - 1} and {stage} a {type(value).__name__} would be handed on; only whole"
                    " tensors can be: cut elsewhere, in the plan's cuts"
                )
        shapes = [torch.empty(value.shape, dtype=value.dtype, device="meta") for value in values]
        if (key, stage) not in self._known:
            self._known[key, stage] = shapes
            return True
        before = [(known.shape, known.dtype) for known in self._known[key, stage]]
        if before != [(value.shape, value.dtype) for value in shapes]:
            raise RuntimeError(
                f"the shapes between stages {stage - 1} and {stage} depend on values: {before}, now others"
            )
        return False
