"""Host memory of each rank under each strategy, as the command line trains: the table in docs/strategies.md.

    python scripts/memory.py                      a vision transformer of 100 million parameters
    python scripts/memory.py --depth 4 fsdp tp    a smaller one, two strategies

Every row is two runs of `python -m trainer` on CPUs: with this network, and with a tiny one. What stands in the table
is by how much more a process grew (VmHWM in /proc/self/status) in the first of them: *built* until its first step
began, *peak* until it had trained two steps. Rank 0 and the largest of the others.
"""

from __future__ import annotations

import argparse
import json
import os
import re
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import NamedTuple

import torch
from torch import Tensor, nn

from recipes.vision.classification import Classification
from recipes.vision.vit import VisionTransformer

ROOT = Path(__file__).resolve().parents[1]
MIB = 2**20
RUN = (
    "model=vit_small model.width={width} model.depth={depth} model.heads=12 model.patch_size=8 data=synthetic_images"
    " data.size=64 data.evaluation_size=0 task._target_=memory.Watched trust=[memory] optimizer=adamw schedule=constant"
    " precision=fp32 device=cpu loop.global_batch=4 loop.steps=2"
)


class Watched(Classification):
    """Notes on every rank how large its process was at most when the first step began, and after every step."""

    built = 0  # bytes

    def weight(self, target: Tensor) -> Tensor | int:
        """Samples, as usual; a step asks for this first."""
        self.built = self.built or highest()
        return super().weight(target)

    def after_step(self, network: nn.Module, step: int) -> None:
        """Leave the figures in a file of this rank."""
        path = Path(os.environ["MEMORY_FIGURES"]) / os.environ.get("RANK", "0")
        path.write_text(json.dumps([self.built, highest()]))


def highest() -> int:
    """Bytes that this process held at most so far."""
    found = re.search(r"VmHWM:\s+(\d+) kB", Path("/proc/self/status").read_text())
    assert found
    return int(found[1]) * 1024


class Row(NamedTuple):
    """A strategy on n processes, and the bytes that a rank should hold of p parameters, c of them in cut layers."""

    strategy: str
    processes: int
    arithmetic: str
    expected: Callable[[float, float, int], float]  # of p, c and n


def rows() -> Iterator[Row]:
    """Every line of the table."""
    yield Row("single", 1, "16P", lambda p, c, n: 16 * p)
    for n in (2, 4):
        yield Row("ddp", n, "16P", lambda p, c, n: 16 * p)
        yield Row("zero1", n, "4P + 12P/n", lambda p, c, n: 4 * p + 12 * p / n)
        yield Row("fsdp", n, "16P/n", lambda p, c, n: 16 * p / n)
        yield Row("tp", n, "16(C/n + P-C)", lambda p, c, n: 16 * (c / n + p - c))
        yield Row("pp", n, "16P/n", lambda p, c, n: 16 * p / n)
    yield Row("hsdp", 4, "16P/2", lambda p, c, n: 8 * p)
    yield Row("ddp_tp", 4, "16(C/2 + P-C)", lambda p, c, n: 16 * (c / 2 + p - c))
    yield Row("fsdp_tp", 4, "16(C/4 + (P-C)/2)", lambda p, c, n: 16 * (c / 4 + (p - c) / 2))
    yield Row("ddp_pp", 4, "16P/2", lambda p, c, n: 8 * p)
    yield Row("fsdp_pp", 4, "16P/4", lambda p, c, n: 4 * p)


def run(strategy: str, processes: int, width: int, depth: int) -> list[list[int]]:
    """Train; of each rank, how large it was when its first step began, and at the end."""
    launcher = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(processes)]
    with TemporaryDirectory() as folder:
        words = [*RUN.format(width=width, depth=depth).split(), f"strategy={strategy}", f"run.dir={folder}/run"]
        command = [sys.executable, *(launcher if processes > 1 else []), "-m", "trainer", *words]
        own = {"MEMORY_FIGURES": folder, "OMP_NUM_THREADS": "1", "PYTHONPATH": f"{ROOT / 'scripts'}:{ROOT}"}
        done = subprocess.run(command, env={**os.environ, **own}, capture_output=True, text=True)
        if done.returncode:
            raise SystemExit(f"{' '.join(command)} ended with {done.returncode}:\n{done.stdout}{done.stderr}")
        return [json.loads((Path(folder) / str(rank)).read_text()) for rank in range(processes)]


def measured(row: Row, depth: int) -> list[str]:
    """MiB that this network costs beyond a tiny one: built on rank 0 and elsewhere, peak on rank 0 and elsewhere."""
    large, tiny = run(row.strategy, row.processes, 768, depth), run(row.strategy, row.processes, 48, 4)
    figures = []
    for which in (0, 1):
        more = [(own[which] - less[which]) / MIB for own, less in zip(large, tiny, strict=True)]
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
    words = parser.parse_args()
    everything, cut = sizes(words.depth)
    print(f"P = {everything / 1e6:.1f} million parameters, C = {cut / 1e6:.1f} million in cut layers; MiB a rank\n")
    print("| strategy | processes | arithmetic | is | built: rank 0 | others | peak: rank 0 | others |")
    print("|" + 8 * " --- |", flush=True)
    for row in rows():
        if row.strategy in (words.strategies or [row.strategy]):
            held = f"{row.expected(everything, cut, row.processes) / MIB:.0f}"
            cells = [row.strategy, str(row.processes), row.arithmetic, held, *measured(row, words.depth)]
            print(f"| {' | '.join(cells)} |", flush=True)


if __name__ == "__main__":
    main()
