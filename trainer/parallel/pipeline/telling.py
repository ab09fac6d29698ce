"""What one rank of a group knows, told to all of it."""

from __future__ import annotations

from collections.abc import Hashable
from math import prod

import torch
import torch.distributed as dist
from torch import Tensor

from trainer.parallel.ranks import Group

Facts = list[tuple[str, list[int], bool]]  # name, shape, whole numbers?


class Telling:
    """Sums by name from one rank to all; names and shapes travel the first time only, later two tensors do."""

    def __init__(self, ranks: Group, source: int, device: torch.device) -> None:
        self._ranks, self._source, self._device = ranks, source, device
        self._facts: dict[Hashable, Facts] = {}

    def tell(self, occasion: Hashable, sums: dict[str, Tensor]) -> dict[str, Tensor]:
        """Collective: the source's sums on every rank; those of the others are not looked at.

        Whole numbers arrive as int64, all others as float64. RuntimeError where the source's names or shapes are not
        those of the same occasion before.
        """
        own = [(name, list(value.shape), not value.is_floating_point()) for name, value in sums.items()]
        if occasion not in self._facts:
            told = self._ranks.all_gather_values(own)[self._source]  # the group; once for each occasion
            self._facts[occasion] = [(name, shape, whole) for name, shape, whole in told]
        facts = self._facts[occasion]
        if self._ranks.rank == self._source and own != facts:
            raise RuntimeError(f"the sums of {occasion} have other names or shapes than before: {own}, not {facts}")
        return self._spread(facts, sums, True) | self._spread(facts, sums, False)

    def _spread(self, facts: Facts, sums: dict[str, Tensor], whole: bool) -> dict[str, Tensor]:
        shapes = {name: shape for name, shape, is_whole in facts if is_whole == whole}
        if not shapes:
            return {}
        sizes = [prod(shape) for shape in shapes.values()]
        dtype = torch.int64 if whole else torch.float64
        flat = torch.empty(sum(sizes), dtype=dtype, device=self._device)
        if self._ranks.rank == self._source:
            flat = torch.cat([sums[name].detach().to(self._device, dtype).reshape(-1) for name in shapes])
        dist.broadcast(flat, group_src=self._source, group=self._ranks.group)  # the group; 8 bytes a number
        return {n: part.view(shape) for (n, shape), part in zip(shapes.items(), flat.split(sizes), strict=True)}
