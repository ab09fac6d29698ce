"""Bytes on the wire in a step: as many as planned, as many as the algorithm needs; and when gradients leave."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Callable
from functools import partial
from math import prod
from pathlib import Path
from statistics import mean
from typing import Any, NamedTuple
from unittest.mock import patch

import pytest
from torch import nn
from torch.distributed.tensor.parallel import RowwiseParallel
from torch.profiler import profile

from tests.commands import TRANSFORMER
from tests.inside import product
from tests.processes import Processes
from tests.quick import quickly
from tests.test_plan import DECODER, plan
from trainer.api import build_run
from trainer.launch.rendezvous import Launch
from trainer.parallel.module_units import matching_modules

GLOO = {"all_reduce": "all-reduce", "all_gather": "all-gather", "recv": "receive"}
WIDTHS = {"float": 4, "double": 8, "c10::BFloat16": 2, "c10::Half": 2, "unsigned char": 1}  # bytes of a number


def trace(launch: Launch, place: Path, arguments: list[str]) -> list[dict[str, Any]]:
    """What torch's profiler has of the third step of a run, on this rank."""
    words = [*arguments, "loop.steps=5", "loop.log_every=null", "loop.eval_every=null", "profile=[3,3]"]
    # a step alone: votes of the loop, lines and evaluations are no part of what a strategy sends
    with (
        patch("trainer.records.profiler.profile", partial(profile, record_shapes=True)),
        patch("trainer.strategies.rank_context.VOTE_INTERVAL", 3600),  # after the second step there is none
    ):
        assert product(launch, place, words) == 0
    root = next(word.removeprefix("run.dir=") for word in words if word.startswith("run.dir="))
    return json.loads((place / root / f"profile/rank-{launch.rank}.json").read_text())["traceEvents"]


def sent(launch: Launch, place: Path, arguments: list[str]) -> dict[str, int]:
    """The bytes that this rank gives to collectives in a step, by kind."""
    sums: Counter[str] = Counter()
    for event in trace(launch, place, arguments):
        if event["name"].startswith("gloo:"):
            op, given = event["name"].removeprefix("gloo:"), event["args"]
            numbers = zip(given["Input type"], map(prod, given["Input Dims"]), strict=True)
            sums[GLOO.get(op, op)] += sum(WIDTHS[kind] * count for kind, count in numbers)
    return dict(sums)


BATCH, TOKENS = 8, {"VisionTransformer": 16, "Decoder": 64}
SMALL = 200  # bytes beside what an algorithm needs: norms, losses, is there a gradient?


class Sizes(NamedTuple):
    """Bytes of a network, and of a step with the global batch, by the symbols of docs/strategies.md."""

    n: int  # processes
    P: int  # all parameters
    U: int  # those in units
    C: int  # those in units that tensor ranks split
    E: int  # others that they split: embedding and head
    N: int  # a number for each channel of the BatchNorms
    L: int  # blocks
    A: int  # what goes from a block to the next one
    K: int  # keys and values of a block
    S: int  # scores
    held: int  # weights that this rank holds, by the plan


def sizes_of(network: Any, n: int) -> Sizes:
    """Of a network with blocks, or of one without, which is split nowhere."""
    blocks: nn.ModuleList = getattr(network, "blocks", nn.ModuleList())
    split: Counter[bool] = Counter()
    for key, style in (network.plan().tensor if len(blocks) else {}).items():
        for _, layer in matching_modules(network, key):
            by_row = isinstance(style, RowwiseParallel) and isinstance(layer, nn.Linear)  # its bias stays whole
            weight: Any = layer.weight
            split[key.startswith("blocks.")] += weight.nbytes if by_row else bytes_of(layer)
    stream = scores = 0
    if len(blocks):
        tokens, head = BATCH * TOKENS[type(network).__name__], network.head
        stream, scores = 4 * tokens * head.in_features, 4 * tokens * head.out_features
    channels = sum(bytes_of(module) for module in network.modules() if isinstance(module, nn.BatchNorm2d)) // 2
    total, units = bytes_of(network), bytes_of(blocks)
    return Sizes(n, total, units, split[True], split[False], channels, len(blocks), stream, 2 * stream, scores, 0)


def bytes_of(module: nn.Module) -> int:
    """Of its parameters."""
    return sum(parameter.nbytes for parameter in module.parameters())


def passed(size: float, ranks: int = 2) -> float:
    """What a rank sends of a tensor that is gathered or scattered in a ring: it passes on all parts but one."""
    return size * (ranks - 1) / ranks


def tensor_parallel(s: Sizes, activations: float) -> float:
    """What tensor ranks send of a stream: each block adds it up twice there, twice back."""
    return 2 * passed(4 * s.L * activations)


def sharded(s: Sizes) -> float:
    """What shard ranks send of layers that two tensor ranks split: weights, those of units again, gradients."""
    mine, units = s.P - (s.C + s.E) / 2, s.U - s.C / 2
    return passed(mine + units + mine)


# What collectives have a rank send in a step, by the algorithm. Groups have two ranks, or all n. An all-reduce is as
# much as a scatter and a gather; what is broadcast, or reduced to one rank, counts once.
NEEDED: dict[str, Callable[[Sizes], float]] = {
    "ddp": lambda s: 2 * passed(s.P, s.n),
    "ddp strategy.compress=bf16": lambda s: 2 * passed(s.P / 2, s.n),
    "ddp loop.on_nonfinite=skip": lambda s: 2 * passed(s.P, s.n),
    "ddp strategy.sync_bn=true": lambda s: 2 * passed(s.P + 4 * s.N, s.n),
    "zero1": lambda s: s.P + s.P,  # gradients to the owners, weights back from them
    "fsdp": lambda s: passed(s.P + s.U + s.P, s.n),  # what is in no unit is gathered once
    "fsdp strategy.reshard_after_forward=false": lambda s: passed(s.P + s.P, s.n),
    "fsdp strategy.param_dtype=bf16 loop.micro_batches=4": lambda s: passed(4 * (s.P + s.U) / 2 + s.P, s.n),
    "hsdp strategy.replicate=2": lambda s: passed(s.P + s.U + s.P) + 2 * passed(s.P / 2),
    # what tensor ranks hold in common is broadcast among them
    "tp": lambda s: tensor_parallel(s, s.A) + s.P - s.C,
    "ddp_tp strategy.tensor=2": lambda s: tensor_parallel(s, s.A / 2) + 2 * passed(s.P - s.C / 2) + s.P - s.C,
    "fsdp_tp strategy.tensor=2": lambda s: tensor_parallel(s, s.A / 2) + sharded(s) + (s.P - s.C) / 2,
    "pp loop.micro_batches=2": lambda s: 0,
    "ddp_pp strategy.pipe=2 loop.micro_batches=2": lambda s: 2 * passed(s.held),
    "fsdp_pp strategy.pipe=2 loop.micro_batches=2": lambda s: passed(2 * s.held + 2 * s.held),
    "cp": lambda s: 2 * passed(s.P, s.n),
    "ddp_cp strategy.context=2": lambda s: 2 * passed(s.P, s.n),
    "fsdp_cp strategy.context=2": lambda s: passed(s.P + s.U + s.P, s.n),
    # the embedding's output, the gradient of what the head is given, and the scores are put together, too
    "mesh strategy.context=2 strategy.tensor=2": lambda s: (
        tensor_parallel(s, s.A / 2) + 2 * passed(2 * s.A / 2) + passed(s.S / 2) + sharded(s) + (s.P - s.C - s.E) / 2
    ),
}
# What a rank sends to single ranks, on average over all of them: there, and as much of gradients back.
TO_ONE: dict[str, Callable[[Sizes], float]] = {
    "pp loop.micro_batches=2": lambda s: s.A,
    "ddp_pp strategy.pipe=2 loop.micro_batches=2": lambda s: s.A / 2,
    "fsdp_pp strategy.pipe=2 loop.micro_batches=2": lambda s: s.A / 2,
    "cp": lambda s: 2.25 * passed(s.L * s.K, s.n),
    "ddp_cp strategy.context=2": lambda s: 2.25 * passed(s.L * s.K / 2),
    "fsdp_cp strategy.context=2": lambda s: 2.25 * passed(s.L * s.K / 2),
    "mesh strategy.context=2 strategy.tensor=2": lambda s: 2.25 * passed(s.L * s.K / 2),
}


@pytest.mark.slow
@pytest.mark.parametrize(
    ("size", "network", "strategies"),
    [
        pytest.param(2, TRANSFORMER, ["ddp", "zero1", "fsdp", "tp", "pp"], marks=pytest.mark.long),
        pytest.param(
            4, TRANSFORMER, ["ddp", "fsdp", "hsdp", "ddp_tp", "fsdp_tp", "ddp_pp", "fsdp_pp"], marks=pytest.mark.long
        ),
        pytest.param(4, DECODER, ["cp", "ddp_cp", "fsdp_cp"], marks=pytest.mark.long),
        # with keys of their own, each a plan for itself
        pytest.param(4, DECODER, "mesh strategy.context=2 strategy.tensor=2", marks=pytest.mark.long),
        pytest.param(2, TRANSFORMER, "fsdp strategy.param_dtype=bf16 loop.micro_batches=4", marks=pytest.mark.long),
        pytest.param(2, TRANSFORMER, "ddp strategy.compress=bf16", marks=pytest.mark.long),
        pytest.param(2, TRANSFORMER, "ddp loop.on_nonfinite=skip", marks=pytest.mark.long),
        pytest.param(2, ("model=resnet18",), "ddp strategy.sync_bn=true", marks=pytest.mark.long),
    ],
)
def test_a_step_sends_the_bytes_that_are_planned_and_that_its_algorithm_needs(
    processes: Processes, tmp_path: Path, size: int, network: tuple[str, ...], strategies: list[str] | str
) -> None:
    common = [*network, f"loop.global_batch={BATCH}"]
    step = ["loop.max_norm=1", f"job.processes=[{size}]", "job.seconds=600"]
    if isinstance(strategies, str):
        asked = [f"strategy={strategies}", "job.strategies=[own]"]
    else:
        asked = [f"job.strategies=[{','.join(strategies)}]"]
    facts, _ = plan(tmp_path, *common[len(network) :], *step, *" ".join(asked).split(), network=network)
    rows: dict[Any, Any] = {row["words"].removeprefix("strategy=") or strategies: row for row in facts["rows"]}
    assert isinstance(strategies, str) or {row["strategy"] for row in rows.values()} == {*strategies}
    sizes = sizes_of(build_run([*common, f"run.dir={tmp_path}/run", "device=cpu"], Launch()).make_network(), size)
    for number, (words, row) in enumerate(rows.items()):
        run = [*common, "loop.max_norm=1", *f"strategy={words}".split(), f"run.dir=run-{number}"]
        seen = processes.run(size, sent, tmp_path, run)
        assert as_gloo_sends(row) == seen[row["rank"]], words
        here = sizes._replace(held=row["by_kind"]["weights"])
        to_one = sum(each["bytes"] for each in row["collectives"] if each["op"] == "send")
        assert 0 <= row["wire"]["inside"] - to_one - NEEDED[words](here) < SMALL, words
        assert mean(rank.get("send", 0) for rank in seen) == TO_ONE.get(words, lambda _: 0)(here), words


def as_gloo_sends(row: dict[str, Any]) -> dict[str, int]:
    """The collectives of a row as gloo makes them of one another; the profiler has what a rank gives."""
    given: Counter[str] = Counter()
    for each in row["collectives"]:
        op = {"reduce-scatter": "all-reduce"}.get(each["op"], each["op"])
        given[op] += each["bytes"] // each["ranks"] if op == "all-gather" else each["bytes"]
    return dict(given)


# strategy → the operator that sends gradients, and how many of its calls must come while the backward still runs: of
# four blocks, each a unit, or of buckets of up to 1 MiB of 3.2 MB, but for the last one (of each owner)
SENDS_GRADIENTS = {
    "ddp strategy.bucket_mb=1": ("c10d::allreduce_", 3),
    "zero1 strategy.bucket_mb=1": ("c10d::reduce_", 2),
    "fsdp": ("c10d::_reduce_scatter_base_", 4),
}


def called_before_the_backward_ends(launch: Launch, place: Path, arguments: list[str], name: str) -> int:
    """How often this operator was called between the first and the last operator of a step's backward."""
    events = sorted(trace(launch, place, arguments), key=lambda event: event.get("ts", 0))
    nodes = [event["ts"] for event in events if event["name"].startswith("autograd::engine::evaluate_function")]
    return sum(nodes[0] < event["ts"] < nodes[-1] for event in events if event["name"] == name)


@pytest.mark.slow
@pytest.mark.parametrize("strategy", quickly(SENDS_GRADIENTS, "ddp strategy.bucket_mb=1"))
def test_gradients_leave_while_the_backward_still_runs(processes: Processes, tmp_path: Path, strategy: str) -> None:
    network = ("model=vit_tiny", "model.width=128", "model.heads=4", "model.depth=4", "loop.global_batch=8")
    name, least = SENDS_GRADIENTS[strategy]
    run = [*network, *f"strategy={strategy}".split(), "run.dir=run"]
    assert min(processes.run(2, called_before_the_backward_ends, tmp_path, run, name)) >= least
