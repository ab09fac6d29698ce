"""Host memory of each rank under each strategy, as the command line trains: the table in docs/strategies.md.

    python scripts/memory.py                      a vision transformer of 100 million parameters
    python scripts/memory.py --depth 4 fsdp tp    a smaller one, two strategies
    python scripts/memory.py --frozen ddp fsdp    all but the head is frozen: the table in docs/language.md
    python scripts/memory.py --sequences          a decoder of 7 million parameters, one sequence of 2,048 tokens
    python scripts/memory.py --planned            what job=plan says beside what was measured: the table in docs/plan.md
    python scripts/memory.py --planned --networks vit,gpt --processes 2 -- ddp fsdp       some rows of it
    python scripts/memory.py --planned --networks scores,chunks --processes 1 2 -- single ddp fsdp tp   task.loss_chunk

Every row is two runs of `python -m trainer` on CPUs: with this network, and with a tiny one. What stands in the table
is by how much more a process grew (VmHWM in /proc/self/status) in the first of them: *built* until its first step
began, *peak* until it had trained two steps. Rank 0 and the largest of the others.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable, Iterator
from typing import NamedTuple

import torch
from memory_errors import NETWORKS, compare
from memory_runs import train
from torch import nn

from recipes.vision.vit import VisionTransformer

MIB = 2**20
RUN = (
    "model=vit_small model.width={width} model.depth={depth} model.heads=12 model.patch_size=8 data=synthetic_images"
    " data.size=64 data.evaluation_size=0 task._target_=memory_runs.Watched trust=[memory_runs]"
    " optimizer=adamw schedule=constant precision=fp32 device=cpu loop.global_batch=4 loop.steps=2"
)
SEQUENCES = (
    "model=gpt_nano model.width={width} model.depth={depth} data=text data.length={length} data.held=0 task=language"
    " task._target_=memory_runs.WatchedTokens trust=[memory_runs] optimizer=adamw schedule=constant"
    " precision=fp32 device=cpu loop.global_batch=1 loop.steps=2"
)
LARGE, TINY = SEQUENCES.format(width=256, depth=8, length=2048), SEQUENCES.format(width=32, depth=2, length=64)

Share = Callable[
    [float, float, int], float
]  # of p parameters, c of them in cut layers, on n processes: what a rank has


class Row(NamedTuple):
    """A strategy on n processes: how many parameters a rank holds, and of how many the gradient and optimizer state."""

    strategy: str
    processes: int
    held: tuple[str, Share]
    learned: tuple[str, Share]

    def expected(self, frozen: bool, parameters: float, cut: float) -> tuple[str, float]:
        """The bytes that a rank should hold, as arithmetic and as a number; 4 a parameter, and 12 if it learns."""
        (held, own), (learned, state) = self.held, self.learned
        weights = 4 * own(parameters, cut, self.processes)
        if frozen:  # the head is next to nothing
            return times(4, held), weights
        together = times(16, held) if held == learned else f"{times(4, held)} + {times(12, learned)}"
        return together, weights + 12 * state(parameters, cut, self.processes)


def times(factor: int, what: str) -> str:
    """A product in words."""
    return f"{factor}({what})" if "+" in what else f"{factor}{what}"


def rows() -> Iterator[Row]:
    """Every line of the table."""
    whole: tuple[str, Share] = ("P", lambda p, c, n: p)
    part: tuple[str, Share] = ("P/n", lambda p, c, n: p / n)
    half: tuple[str, Share] = ("P/2", lambda p, c, n: p / 2)
    split: tuple[str, Share] = ("C/n + P-C", lambda p, c, n: c / n + p - c)
    split_in_two: tuple[str, Share] = ("C/2 + P-C", lambda p, c, n: c / 2 + p - c)
    split_and_sharded: tuple[str, Share] = ("C/4 + (P-C)/2", lambda p, c, n: c / 4 + (p - c) / 2)
    yield Row("single", 1, whole, whole)
    for n in (2, 4):
        yield Row("ddp", n, whole, whole)
        yield Row("zero1", n, whole, part)
        yield Row("fsdp", n, part, part)
        yield Row("tp", n, split, split)
        yield Row("pp", n, part, part)
    yield Row("hsdp", 4, half, half)
    yield Row("ddp_tp", 4, split_in_two, split_in_two)
    yield Row("fsdp_tp", 4, split_and_sharded, split_and_sharded)
    yield Row("ddp_pp", 4, half, half)
    yield Row("fsdp_pp", 4, part, part)


def measured(strategy: str, processes: int, large_run: str, tiny_run: str) -> list[str]:
    """MiB that this network costs beyond a tiny one: built on rank 0 and elsewhere, peak on rank 0 and elsewhere."""
    large, tiny = (train(f"{run} strategy={strategy}", processes) for run in (large_run, tiny_run))
    figures = []
    # until the first step, and in all
    for sizes_of in ((lambda rank: rank.built), (lambda rank: max(rank.built, rank.peak))):
        more = [(sizes_of(rank) - sizes_of(other)) / MIB for rank, other in zip(large, tiny, strict=True)]
        figures += [f"{more[0]:.0f}", f"{max(more[1:]):.0f}" if more[1:] else ""]
    return figures


def sizes(depth: int) -> tuple[int, int]:
    """All parameters of the network, and those in layers that its plan cuts."""
    with torch.device("meta"):
        network: nn.Module = VisionTransformer(10, 3, 32, patch_size=8, width=768, depth=depth)
    cut = ("qkv.weight", "qkv.bias", "out.weight", "up.weight", "up.bias", "down.weight")
    named = dict(network.named_parameters())
    return (
        sum(p.numel() for p in named.values()),
        sum(p.numel() for name, p in named.items() if name.endswith(cut)),
    )


def main() -> None:
    """Print the table, line by line."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("strategies", nargs="*", help="only these")
    parser.add_argument("--depth", type=int, default=14, help="blocks of 7.1 million parameters")
    parser.add_argument("--frozen", action="store_true", help="train the head alone")
    parser.add_argument("--planned", action="store_true", help="compare with job=plan, over several networks")
    parser.add_argument("--networks", default=",".join(NETWORKS), help="with --planned: only these")
    parser.add_argument("--processes", type=int, nargs="+", default=[1, 2, 4], help="with --planned")
    parser.add_argument("--sequences", action="store_true", help="what is left of a long sequence's activations")
    words = parser.parse_args()
    if words.sequences:
        sequences()
        return
    if words.planned:
        compare(words.networks.split(","), words.strategies, words.processes)
        return
    everything, cut = sizes(words.depth)
    print(f"P = {everything / 1e6:.1f} million parameters, C = {cut / 1e6:.1f} million in cut layers; MiB a rank\n")
    print("| strategy | processes | arithmetic | is | built: rank 0 | others | peak: rank 0 | others |")
    print("|" + 8 * " --- |", flush=True)
    for row in rows():
        if row.strategy in (words.strategies or [row.strategy]):
            arithmetic, held = row.expected(words.frozen, everything, cut)
            freezing = " model.freeze=[backbone]" if words.frozen else ""
            wide, tiny = RUN.format(width=768, depth=words.depth) + freezing, RUN.format(width=48, depth=4) + freezing
            figures = measured(row.strategy, row.processes, wide, tiny)
            cells = [row.strategy, str(row.processes), arithmetic, f"{held / MIB:.0f}", *figures]
            print(f"| {' | '.join(cells)} |", flush=True)


def sequences() -> None:
    """Print the table of one long sequence on more and more context ranks."""
    print("| strategy | processes | built: rank 0 | others | peak: rank 0 | others |")
    print("|" + 6 * " --- |", flush=True)
    figures = measured("single", 1, LARGE, TINY)
    print(f"| single | 1 | {' | '.join(figures)} |", flush=True)
    for strategy, processes in (("cp", 2), ("cp", 4), ("fsdp_cp", 2), ("fsdp_cp", 4)):
        figures = measured(f"{strategy} strategy.context={processes}", processes, LARGE, TINY)
        print(f"| {' | '.join([strategy, str(processes), *figures])} |", flush=True)


if __name__ == "__main__":
    main()
