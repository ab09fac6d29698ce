"""How long attention takes on context ranks, keys and values gathered or in a ring: a table of docs/strategies.md.

    python scripts/context_attention.py                    2 processes on CPUs
    python scripts/context_attention.py --processes 4

One layer, forward and backward, of one sequence. Both ways are timed in turn, so that a busy machine is as busy for
both; what stands there is the least and the median of the times of the slowest rank, in ms.
"""

from __future__ import annotations

import argparse
from statistics import median
from tempfile import TemporaryDirectory
from time import perf_counter

import torch
import torch.distributed as dist
from torch import nn
from torch.multiprocessing.spawn import spawn

from recipes.language.causal import Causal
from recipes.language.masks import Masks
from trainer import Plan, RingAttention
from trainer.parallel.context_parallel import apply_context_parallel
from trainer.parallel.ranks import Group

HEADS, WIDTH = 8, 64


def main() -> None:
    """Start the processes."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--processes", type=int, default=2)
    parser.add_argument("--times", type=int, default=15)
    words = parser.parse_args()
    with TemporaryDirectory() as folder:
        spawn(measure, (words.processes, words.times, f"file://{folder}/store"), words.processes)


def measure(rank: int, ranks: int, times: int, store: str) -> None:
    """Print the table, on rank 0."""
    torch.set_num_threads(1)
    dist.init_process_group("gloo", store, rank=rank, world_size=ranks)
    if rank == 0:
        print("| tokens | heads of keys | type | gather: least | median | ring: least | median |\n|" + 7 * " --- |")
    for tokens in (512, 2048):
        for groups in (HEADS, 2):
            for dtype in (torch.float32, torch.bfloat16):
                took = durations(ranks, times, tokens, groups, dtype)
                figures = (f"{function(each):.1f}" for each in took for function in (min, median))
                if rank == 0:
                    print(f"| {tokens} | {groups} | {str(dtype)[6:]} | {' | '.join(figures)} |", flush=True)
    dist.destroy_process_group()


def durations(ranks: int, times: int, tokens: int, groups: int, dtype: torch.dtype) -> list[list[float]]:
    """Collective: ms of each forward and backward of the slowest rank, gathered and in a ring."""
    layers = [layer(groups, in_ring) for in_ring in (False, True)]
    took: list[list[float]] = [[], []]
    for _ in range(times + 1):
        for each, module in zip(took, layers, strict=True):
            shapes = [(1, heads, tokens // ranks, WIDTH) for heads in (HEADS, groups, groups)]
            inputs = [torch.randn(shape, dtype=dtype, requires_grad=True) for shape in shapes]
            dist.barrier()
            began = perf_counter()
            module(*inputs).sum().backward()
            slowest = torch.tensor((perf_counter() - began) * 1e3)
            dist.all_reduce(slowest, dist.ReduceOp.MAX)  # all ranks; 4 bytes
            each.append(float(slowest))
    return [each[1:] for each in took]  # the first call also prepares


def layer(groups: int, in_ring: bool) -> nn.Module:
    """Attention on stretches."""
    network = nn.ModuleDict({"core": Causal(grouped=groups < HEADS, window=None, masks=Masks())})
    plan = Plan(context={"core": RingAttention()})
    assert dist.group.WORLD is not None
    apply_context_parallel(network, plan, Group(dist.group.WORLD), "cpu", in_ring)
    return network["core"]


if __name__ == "__main__":
    main()
