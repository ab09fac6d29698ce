"""Memory of one rank under each strategy, beside what the arithmetic says: the table in docs/strategies.md.

    python scripts/memory.py                      a vision transformer of 100 million parameters
    python scripts/memory.py --depth 4 fsdp tp    a smaller one, two strategies

Each rank is a process of its own. `held`: bytes of weights, gradients and AdamW's state at the end of a backward,
counted tensor by tensor. `built` and `peak`: by how much the process grew at most (VmHWM) until the network stood, and
until it had trained two steps; activations, gathered units and buffers are in it. The largest rank counts.
"""

from __future__ import annotations

import argparse
import gc
import multiprocessing
import os
import re
from collections.abc import Callable, Iterator
from datetime import timedelta
from pathlib import Path
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from recipes.vision.classification import Classification
from recipes.vision.vit import VisionTransformer
from trainer.launch import Launch
from trainer.machine import Machine
from trainer.seeds import seed_all
from trainer.strategies.base import Strategy
from trainer.strategies.ddp import DDP
from trainer.strategies.ddp_tensor import DDPTP
from trainer.strategies.fsdp import FSDP
from trainer.strategies.pipeline import PP
from trainer.strategies.single import Single
from trainer.strategies.tensor import TP
from trainer.strategies.zero1 import Zero1
from trainer.stream import Batch

MIB = 2**20
SAMPLES = 4  # of one step, over all ranks


class Row(NamedTuple):
    """A strategy on n processes, and the bytes that a rank should hold of p parameters, c of them in cut layers."""

    words: str
    kind: type[Strategy]
    fields: dict[str, Any]
    processes: int
    arithmetic: str
    expected: Callable[[float, float, int], float]  # of p, c and n


def rows() -> Iterator[Row]:
    """Every line of the table."""
    yield Row("single", Single, {}, 1, "16P", lambda p, c, n: 16 * p)
    for n in (1, 2, 4):
        yield Row("ddp", DDP, {}, n, "16P", lambda p, c, n: 16 * p)
        yield Row("zero1", Zero1, {}, n, "4P + 12P/n", lambda p, c, n: 4 * p + 12 * p / n)
        yield Row("fsdp", FSDP, {}, n, "16P/n", lambda p, c, n: 16 * p / n)
    yield Row("hsdp", FSDP, {"replicate": 2}, 4, "16P/2", lambda p, c, n: 8 * p)
    for n in (2, 4):
        yield Row("tp", TP, {}, n, "16(C/n + P-C)", lambda p, c, n: 16 * (c / n + p - c))
        yield Row("pp", PP, {}, n, "16P/n", lambda p, c, n: 16 * p / n)
    yield Row("ddp_tp", DDPTP, {}, 4, "16(C/2 + P-C)", lambda p, c, n: 16 * (c / 2 + p - c))
    yield Row("fsdp_tp", FSDP, {"tensor": 2}, 4, "16(C/4 + (P-C)/2)", lambda p, c, n: 16 * (c / 4 + (p - c) / 2))
    yield Row("ddp_pp", PP, {"pipe": 2, "replicate": 2}, 4, "16P/2", lambda p, c, n: 8 * p)
    yield Row("fsdp_pp", PP, {"pipe": 2, "shard": 2}, 4, "16P/4", lambda p, c, n: 4 * p)


def measure(launch: Launch, row: Row, depth: int, answers: Any) -> None:
    """On one rank: build, train two steps, say what was held, and how far the process grew before and after."""
    torch.set_num_threads(1)
    strategy = row.kind(machine=Machine(launch=launch, device="cpu"), **row.fields)
    with strategy:
        train(strategy, width=48, depth=4)  # what is imported and set up once does not count
        strategy.barrier()
        gc.collect()
        before = _status("VmRSS")
        Path("/proc/self/clear_refs").write_text("5")  # the high-water mark begins here
        held, built = train(strategy, width=768, depth=depth)
        answers.put((held, built - before, _status("VmHWM") - before))


def train(strategy: Strategy, width: int, depth: int) -> tuple[int, int]:
    """Collective: two steps of a vision transformer; bytes held at the end of a backward, high-water mark before it."""
    seed_all(0)
    network = strategy.construct(lambda: VisionTransformer(10, 3, 32, patch_size=8, width=width, depth=depth))
    share = SAMPLES // strategy.data_size
    images, classes = torch.randn(share, 3, 32, 32), torch.zeros(share, dtype=torch.int64)
    placed = strategy.build(Classification(), network, (images[:1], classes[:1]))
    built = _status("VmHWM")
    optimizer = placed.optimizer(
        lambda groups: torch.optim.AdamW(groups, fused=True), [{"params": list(placed.network.parameters())}]
    )
    held = 0
    for step in range(2):
        placed.forward_backward([Batch(images, classes, torch.arange(share), range(SAMPLES), SAMPLES)], step)
        held = held_by(placed.network, optimizer)
        placed.optimizer_step(optimizer, 1.0)
    return held, built


def held_by(network: nn.Module, optimizer: torch.optim.Optimizer) -> int:
    """Bytes of this rank's weights, gradients and optimizer state."""
    gradients = [p.grad for p in network.parameters() if p.grad is not None]
    memory = [m for state in optimizer.state.values() for m in state.values() if isinstance(m, Tensor)]
    return sum(_bytes(tensor) for tensor in [*network.parameters(), *gradients, *memory])


def _bytes(tensor: Tensor) -> int:
    local = tensor.to_local() if isinstance(tensor, DTensor) else tensor
    return local.numel() * local.element_size()


def _status(key: str) -> int:
    """A line of /proc/self/status, in bytes."""
    found = re.search(rf"{key}:\s+(\d+) kB", Path("/proc/self/status").read_text())
    assert found, key
    return int(found[1]) * 1024


def run(row: Row, index: int, depth: int) -> list[int]:
    """Bytes held, grown by until the network stood, and grown by at the end, on the largest rank."""
    context = multiprocessing.get_context("spawn")
    store = dist.TCPStore("127.0.0.1", 0, None, True, timedelta(minutes=5), wait_for_workers=False)
    answers = context.SimpleQueue()
    members = []
    for rank in range(row.processes):
        launch = Launch(
            rank=rank,
            world_size=row.processes,
            local_rank=rank,
            local_world_size=row.processes,
            run_id=f"row-{index}",
            address=f"127.0.0.1:{store.port}",
            hosted=True,
        )
        member = context.Process(target=_member, args=(launch, index, depth, answers))
        member.start()
        members.append(member)
    for member in members:
        member.join()
        if member.exitcode:
            raise SystemExit(f"{row.words} on {row.processes}: a rank ended with {member.exitcode}")
    seen = [answers.get() for _ in members]
    return [max(figures) for figures in zip(*seen, strict=True)]


def _member(launch: Launch, index: int, depth: int, answers: Any) -> None:
    measure(launch, list(rows())[index], depth, answers)
    os._exit(0)  # an ordinary exit sometimes aborts while gloo's threads are torn down


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
    os.environ["MALLOC_MMAP_THRESHOLD_"] = "65536"  # in the ranks: what is freed leaves the process, and is not counted
    everything, cut = sizes(words.depth)
    print(f"P = {everything / 1e6:.1f} million parameters, C = {cut / 1e6:.1f} million in cut layers; MiB a rank\n")
    print("| strategy | processes | arithmetic | is | held | built | peak |\n|" + 7 * " --- |")
    for index, row in enumerate(rows()):
        if words.strategies and row.words not in words.strategies:
            continue
        expected = row.expected(everything, cut, row.processes)
        figures = " | ".join(f"{size / MIB:.0f}" for size in (expected, *run(row, index, words.depth)))
        print(f"| {row.words} | {row.processes} | {row.arithmetic} | {figures} |", flush=True)


if __name__ == "__main__":
    main()
