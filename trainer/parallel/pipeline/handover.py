"""Handing values from stage to stage, forwards only; a shape travels the first time it is seen."""

from __future__ import annotations

import json
from collections.abc import Callable, Hashable, Mapping
from contextlib import suppress
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.tensor import DTensor

from trainer.parallel.pipeline.schedules import Layout
from trainer.parallel.ranks import Group

PATIENCE = timedelta(seconds=10)  # for the last word of a rank that has failed


class Handover:
    """Runs stages over the ranks of a pipeline, one after the other, and remembers the shapes of what they hand on.

    Shapes go ahead as JSON in a CPU tensor (torch's own way to learn them is a pickle for each). Where a stage fails
    instead, its error goes that way, so that no rank waits for what will not come.
    """

    def __init__(self, ranks: Group, layout: Layout, device: torch.device) -> None:
        self._ranks, self._layout, self._device = ranks, layout, device
        self._known: dict[tuple[Hashable, int], list[Tensor]] = {}  # what goes into a stage, on the meta device

    def run(self, key: Hashable, stages: Mapping[int, Callable[..., Any]]) -> Any:
        """Collective over the pipeline: call this rank's stages, by number, with what the stage before hands on.

        Returns what the last stage of all returns, where that is here. `key`: the same for inputs of the same shapes,
        and only for those. RuntimeError where that does not hold, or where something else than tensors is handed on.
        """
        values: Any = ()
        under_way: list[tuple[Any, Tensor]] = []  # a tensor must live until it is sent
        for stage in sorted(stages):
            try:
                if stage and not self._is_here(stage - 1):
                    values = self._receive(key, stage)
                values = stages[stage](*values)
                if stage == self._layout.count - 1:
                    break
                news = self._note(key, stage + 1, values)
            except Exception as error:
                self._pass_on(key, stage, str(error))
                raise
            if not self._is_here(stage + 1):
                under_way += self._send(stage + 1, values, news)
        for work, _ in under_way:
            work.wait()
        return values if self._layout.count - 1 in stages else None

    def received(self, key: Hashable, stage: int) -> tuple[Tensor, ...]:
        """What goes into this stage, as tensors on the meta device; known after a run to both ranks at the boundary."""
        return tuple(self._known[key, stage]) if stage else ()

    def _is_here(self, stage: int) -> bool:
        return self._layout.owner(stage) == self._ranks.rank

    def _send(self, stage: int, values: tuple[Tensor, ...], news: Any) -> list[tuple[Any, Tensor]]:
        peer, sent = self._layout.owner(stage), [*(_written(news) if news else ()), *values]
        # to the rank of the next stage: every value, the first time with its shape ahead of it
        return [(dist.isend(value, group=self._ranks.group, group_dst=peer), value) for value in sent]

    def _receive(self, key: Hashable, stage: int) -> tuple[Tensor, ...]:
        peer, group = self._layout.owner(stage - 1), self._ranks.group
        if (key, stage) not in self._known:
            size = torch.zeros(1, dtype=torch.int64)
            dist.recv(size, group=group, group_src=peer)
            letters = torch.empty(int(size), dtype=torch.uint8)
            dist.recv(letters, group=group, group_src=peer)
            news = json.loads(bytes(letters.tolist()))
            if isinstance(news, str):
                raise RuntimeError(f"an earlier stage failed: {news}")
            self._known[key, stage] = [torch.empty(s, dtype=getattr(torch, dtype), device="meta") for s, dtype in news]
        values = tuple(torch.empty_like(value, device=self._device) for value in self._known[key, stage])
        for value in values:
            dist.recv(value, group=group, group_src=peer)
        return values

    def _note(self, key: Hashable, stage: int, values: Any) -> list[Any] | None:
        """Remember what goes into a stage; where that is new, what its rank must be told."""
        for value in values:
            if not isinstance(value, Tensor) or isinstance(value, DTensor):
                raise RuntimeError(
                    f"between stages {stage - 1} and {stage} a {type(value).__name__} would be handed on; only whole"
                    " tensors can be: cut elsewhere, in the plan's cuts"
                )
        news = [[list(value.shape), str(value.dtype).removeprefix("torch.")] for value in values]
        if (key, stage) not in self._known:
            self._known[key, stage] = [torch.empty_like(value, device="meta") for value in values]
            return news
        before = [(known.shape, known.dtype) for known in self._known[key, stage]]
        if before != [(value.shape, value.dtype) for value in values]:
            raise RuntimeError(f"what goes into stage {stage} was {before} before and is {news} now, for equal inputs")
        return None

    def _pass_on(self, key: Hashable, stage: int, error: str) -> None:
        """Tell the rank that waits for what follows this stage, if it still waits to be told a shape."""
        for later in range(stage + 1, self._layout.count):
            if not self._is_here(later):
                told = [] if (key, later) in self._known else self._send(later, (), error)
                for work, _ in told:
                    with suppress(RuntimeError):  # it may have failed itself by now
                        work.wait(PATIENCE)
                return


def _written(news: Any) -> list[Tensor]:
    letters = torch.tensor(list(json.dumps(news).encode()), dtype=torch.uint8)
    return [torch.tensor([len(letters)]), letters]


def in_order(values: tuple[Any, ...]) -> tuple[Any, ...]:
    """What a stage hands on, ready to be sent: copies in order in memory, that nothing else looks at or writes to."""
    return tuple(
        value.clone(memory_format=torch.contiguous_format) if isinstance(value, Tensor) else value for value in values
    )


class InOrder(torch.autograd.Function):
    """A value that was received; its gradient goes back in order in memory, for else it cannot be sent.

    Schedules that compute gradients of inputs by themselves send them as autograd made them.
    """

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        """The same value."""
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> Tensor:
        """The same gradient, contiguous."""
        return grads[0].contiguous()
