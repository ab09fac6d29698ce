"""What travels in a step: counted, and as much as planned; and when gradients leave."""

from __future__ import annotations

import json
from collections import Counter
from math import prod
from pathlib import Path
from typing import Any

import pytest
from torch import nn

from tests.ranks import Processes
from tests.run import TRANSFORMER, quickly, run
from tests.strategies.networks import Net, Weighted
from tests.strategies.runs import Train

WIDTHS = {"float": 4, "double": 8, "c10::BFloat16": 2, "c10::Half": 2, "unsigned char": 1}  # bytes of a number
# a step alone: lines and evaluations are no part of what a strategy sends
STEP = "precision=fp32 loop.steps=5 loop.log_every=null profile=[3,3]"


def events(folder: Path, rank: int) -> list[dict[str, Any]]:
    """What torch's profiler has of the third step of a run, on this rank."""
    return json.loads((folder / f"profile/rank-{rank}.json").read_text())["traceEvents"]


def sent(folder: Path, rank: int = 0) -> list[tuple[str, int]]:
    """(name, bytes) of every collective of that step, sorted; not the loop's own vote, which time decides."""
    found = []
    for event in events(folder, rank):
        if event["name"].startswith("gloo:"):
            dims, types = event["args"]["Input Dims"], event["args"]["Input type"]
            if (dims, types) != ([[7]], ["double"]):
                numbers = zip(types, map(prod, dims), strict=True)
                found.append(
                    (event["name"].removeprefix("gloo:"), sum(WIDTHS[kind] * count for kind, count in numbers))
                )
    return sorted(found)


def travels(train: Train, words: str, ranks: int, **parts: Any) -> list[tuple[str, int]]:
    """The same of a toy, on the main rank."""
    return sent(train(f"{STEP} loop.max_norm=null {words}", ranks, **parts).folder)


def total(found: list[tuple[str, int]], word: str = "") -> int:
    return sum(size for name, size in found if word in name)


def bytes_of(module: nn.Module) -> int:
    """Of its parameters."""
    return sum(parameter.nbytes for parameter in module.parameters())


WHOLE = bytes_of(Net())
FROZEN = bytes_of(Net().up) + bytes_of(Net().down)
FREEZE = "+model.freeze=[up,down]"


@pytest.mark.parametrize("words", quickly(["strategy=ddp", "strategy=zero1"], "strategy=ddp"))
def test_four_micro_batches_send_what_one_sends_every_gradient_once(train: Train, words: str) -> None:
    one, four = (travels(train, f"{words} loop.micro_batches={n}", 2, task=Weighted) for n in (1, 4))
    assert one == four
    assert WHOLE <= total(one, "reduce") < WHOLE + 100  # and sums of weights
    assert total(one, "broadcast") == (WHOLE if "zero1" in words else 0)


@pytest.mark.parametrize(("words", "times"), [("strategy=ddp", 1), ("strategy=zero1", 2)])
def test_of_what_is_frozen_nothing_travels(train: Train, words: str, times: int) -> None:
    learns = times * (WHOLE - FROZEN)
    assert learns <= total(travels(train, f"{words} {FREEZE}", 2)) < learns + 100


@pytest.mark.long
def test_zero_2_gathers_once_and_zero_3_twice_and_gradients_travel_as_often_as_they_are_told(train: Train) -> None:
    def kinds(words: str) -> Counter[str]:
        return Counter(name for name, _ in travels(train, f"strategy=fsdp {words}", 2))

    three, two = kinds("loop.micro_batches=4"), kinds("strategy.reshard_after_forward=false")
    each = kinds("loop.micro_batches=4 strategy.sync_micro_batches=true")
    assert three["all_gather"] == 8 * two["all_gather"] > 0
    # gloo scatters what it has reduced for everyone
    assert each["all_reduce"] == 4 * three["all_reduce"] == 4 * two["all_reduce"] > 0


# ------------------------------------------------------------------------------------------------------- as planned

DECODER = ("model=gpt_nano", "model.width=32", "model.depth=2", "data=synthetic_tokens", "data.length=64")


@pytest.mark.long
@pytest.mark.parametrize(
    ("ranks", "network", "strategies"),
    [
        (2, TRANSFORMER, ["ddp", "zero1", "fsdp", "tp", "pp"]),
        (4, TRANSFORMER, ["hsdp", "ddp_tp", "fsdp_tp", "ddp_pp", "fsdp_pp"]),
        (4, DECODER, ["cp", "ddp_cp", "fsdp_cp"]),
    ],
)
def test_a_step_sends_the_bytes_that_are_planned(
    processes: Processes, tmp_path: Path, ranks: int, network: tuple[str, ...], strategies: list[str]
) -> None:
    common = [*network, "loop.global_batch=8", "loop.max_norm=1"]
    words = [*common, "job=plan", "run.dir=plan", f"job.processes=[{ranks}]", "job.seconds=600"]
    words += [f"job.strategies=[{','.join(strategies)}]"]
    planned = run([*words, "device=cpu", "log=[]"], 1, "process", place=tmp_path).folder
    rows = json.loads((planned / "plan/plan.json").read_text())["rows"]
    assert {row["strategy"] for row in rows} == {*strategies}
    step = [word for word in STEP.split() if "precision" not in word]
    for number, row in enumerate(rows):  # a strategy may have several
        own = [*row["words"].split(), "loop.eval_every=null", f"run.dir=run-{number}"]
        folder = run([*common, *step, *own], ranks, "group", place=tmp_path).folder
        assert as_gloo_sends(row) == by_kind(sent(folder, row["rank"])), row["words"]


def by_kind(found: list[tuple[str, int]]) -> dict[str, int]:
    sums: Counter[str] = Counter()
    for name, size in found:
        sums[{"all_reduce": "all-reduce", "all_gather": "all-gather", "recv": "receive"}.get(name, name)] += size
    return dict(sums)


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


@pytest.mark.long
@pytest.mark.parametrize("strategy", SENDS_GRADIENTS)
def test_gradients_leave_while_the_backward_still_runs(processes: Processes, tmp_path: Path, strategy: str) -> None:
    network = ("model=vit_tiny", "model.width=128", "model.heads=4", "model.depth=4", "loop.global_batch=8")
    words = [*network, *STEP.split(), "loop.eval_every=null", *f"strategy={strategy}".split(), "run.dir=run"]
    folder = run(words, 2, "group", place=tmp_path).folder
    name, least = SENDS_GRADIENTS[strategy]
    for rank in range(2):
        found = sorted(events(folder, rank), key=lambda event: event.get("ts", 0))
        nodes = [event["ts"] for event in found if event["name"].startswith("autograd::engine::evaluate_function")]
        assert sum(nodes[0] < event["ts"] < nodes[-1] for event in found if event["name"] == name) >= least
