"""The order of samples in lanes: at any time a few blocks are read, and each rank has blocks of its own.

Position p of the order belongs to lane p modulo the number of lanes. A rank takes every `ranks`-th sample of a batch:
where the lanes are a multiple of the ranks it needs the blocks of its own lanes alone. No rank need be known for that.
"""

from __future__ import annotations

import torch
from torch import Tensor

_BLOCKS = 8  # of a lane at least: two lanes share a block at each end
_COUNTS = (1, 2, 4, 6, 12, 24, 48, 60, 120, 240)  # lanes; multiples of as many numbers of ranks as possible


def count_lanes(blocks: int) -> int:
    """How many lanes a set of so many blocks has."""
    return max(count for count in _COUNTS if count == 1 or count * _BLOCKS <= blocks)


def shuffled(block: Tensor, lanes: int, generator: torch.Generator) -> Tensor:
    """The samples in lanes: blocks shuffled, and the samples of each. block: (N,) of each sample, ascending; → (N,)."""
    # where each block comes, (K,); then the samples block by block, and within a block as another shuffle has them
    place = torch.randperm(int(block[-1]) + 1 if len(block) else 0, generator=generator)
    samples = torch.randperm(len(block), generator=generator)
    return in_lanes(samples[place[block[samples]].argsort(stable=True)], lanes)


def in_lanes(samples: Tensor, lanes: int) -> Tensor:
    """Cut samples (N,) into lanes of one length, give or take one, and take one of each lane in turn: (N,)."""
    size, larger = divmod(len(samples), lanes)
    starts = torch.arange(lanes) * size + torch.arange(lanes).clamp(max=larger)  # (lanes,)
    turns = starts + torch.arange(size)[:, None]  # (size, lanes)
    return samples[torch.cat((turns.flatten(), starts[:larger] + size))]


def following_blocks(blocks: Tensor, lanes: int, count: int) -> Tensor:
    """Which block a lane reads after each one: (count,), -1 for none. blocks: (N,) of each position of an order."""
    following = torch.full((count,), -1, dtype=torch.int64)
    # position p and the next one of its lane; where they differ a new block begins
    now, then = blocks[: len(blocks) - lanes], blocks[lanes:]
    changes = now != then
    following[now[changes]] = then[changes]
    return following
