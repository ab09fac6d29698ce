"""What travels in a step: counted, as much as planned, as much as the algorithm needs; and when gradients leave."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Callable
from fnmatch import fnmatch
from math import prod
from pathlib import Path
from statistics import mean
from typing import Any, NamedTuple

import pytest
from torch import nn
from torch.distributed.tensor.parallel import RowwiseParallel

from recipes.language.decoder import Decoder
from recipes.vision.vit import VisionTransformer
from tests.ranks import Processes
from tests.run import TRANSFORMER, quickly, run
from tests.strategies.networks import BATCH, LENGTH, Net, Next, Weighted, decoder
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


@pytest.mark.parametrize("words", ["strategy=ddp", "strategy=zero1"])
def test_four_micro_batches_send_what_one_sends_every_gradient_once(train: Train, words: str) -> None:
    one, four = (travels(train, f"{words} loop.micro_batches={n}", 2, task=Weighted) for n in (1, 4))
    assert one == four
    assert WHOLE <= total(one, "reduce") < WHOLE + 100  # and sums of weights
    assert total(one, "broadcast") == (WHOLE if "zero1" in words else 0)


@pytest.mark.long
def test_owners_get_and_send_each_parameter_in_messages_of_their_own(train: Train) -> None:
    found = travels(train, "strategy=zero1", 3)
    assert (total(found, "broadcast"), total(found, "reduce")) == (WHOLE, WHOLE + 8)
    assert total(travels(train, "strategy=zero1 strategy.bucket_mb=0", 2), "broadcast") == WHOLE


@pytest.mark.long
def test_copies_of_a_split_network_send_gradients_once_whatever_the_slices(train: Train) -> None:
    one, four = (travels(train, f"strategy=ddp_tp strategy.tensor=2 loop.micro_batches={n}", 4) for n in (1, 4))
    gradients = WHOLE - (FROZEN - 4 * 12) // 2  # half of `up` and `down`, whose bias is whole
    assert [size for _, size in one].count(gradients) == [size for _, size in four].count(gradients) == 1
    assert total(one) == total(four)  # what is left are activations inside a copy: four of a quarter each


@pytest.mark.parametrize(("words", "times"), [("strategy=ddp", 1), ("strategy=zero1", 2)])
def test_of_what_is_frozen_nothing_travels(train: Train, words: str, times: int) -> None:
    learns = times * (WHOLE - FROZEN)
    assert learns <= total(travels(train, f"{words} {FREEZE}", 2)) < learns + 100


@pytest.mark.long
def test_of_what_is_frozen_no_gradient_is_averaged_where_it_is_split_or_gathered(train: Train) -> None:
    found = travels(train, f"strategy=ddp_tp strategy.tensor=2 {FREEZE}", 4)
    learns, activations = WHOLE - FROZEN, 4 * BATCH // 2 * 12
    # over the copies; forward, not backward; between tensor ranks, which hold it in common
    assert [size for _, size in found if size > 16] == [learns, activations, learns]
    whole, frozen = (travels(train, f"strategy=fsdp {words}", 2) for words in ("", FREEZE))
    assert total(whole, "reduce") - total(frozen, "reduce") >= FROZEN


@pytest.mark.long
def test_zero_2_gathers_once_and_zero_3_twice_and_gradients_travel_as_often_as_they_are_told(train: Train) -> None:
    def kinds(words: str) -> Counter[str]:
        return Counter(name for name, _ in travels(train, f"strategy=fsdp {words}", 2))

    three, two = kinds("loop.micro_batches=4"), kinds("strategy.reshard_after_forward=false")
    each = kinds("loop.micro_batches=4 strategy.sync_micro_batches=true")
    assert three["all_gather"] == 8 * two["all_gather"] > 0
    # gloo scatters what it has reduced for everyone
    assert each["all_reduce"] == 4 * three["all_reduce"] == 4 * two["all_reduce"] > 0


@pytest.mark.long
def test_what_tensor_ranks_told_each_other_is_not_told_again_where_operators_are_kept(train: Train) -> None:
    plain, units, operators = (
        sum(
            name == "all_reduce"
            for name, _ in travels(
                train, f"strategy=tp strategy.activation_checkpointing={mode}", 2, model="gpt", task=Next
            )
        )
        for mode in ("none", "units", "operators")
    )
    assert operators == plain
    assert plain < units <= plain + 2 * 2  # an attention's and an MLP's in each block


@pytest.mark.long
def test_context_ranks_send_keys_and_values_and_each_gradient_once(train: Train) -> None:
    one, four = (
        [size for _, size in travels(train, f"strategy=cp loop.micro_batches={n}", 2, model="llama", task=Next)]
        for n in (1, 4)
    )
    parameters = bytes_of(decoder("llama"))
    # two layers with two heads of keys and values of width 4: gathered, and their gradients, which gloo adds up whole
    stretch = 4 * BATCH * 2 * (LENGTH // 2) * (4 + 4)
    assert [size for size in one if size > 1000] == sorted([stretch, stretch, 2 * stretch, 2 * stretch, parameters])
    assert sum(size for size in one if size <= 1000) < 100  # sums of losses and of their weights
    assert four.count(parameters) == 1
    assert sum(size for size in four if size > 100) == sum(size for size in one if size > 100)


@pytest.mark.parametrize("words", ["strategy=ddp", "strategy=fsdp"])  # zero1 sends each owner its own
@pytest.mark.long
def test_a_step_has_as_many_collectives_however_many_ranks_there_are(train: Train, words: str) -> None:
    two, four = (travels(train, words, ranks) for ranks in (2, 4))
    assert [name for name, _ in two] == [name for name, _ in four]


# -------------------------------------------------------------------------------- as planned, as the algorithm needs

DECODER = ("model=gpt_nano", "model.width=32", "model.depth=2", "data=synthetic_tokens", "data.length=64")
SAMPLES, SMALL = 8, 200  # bytes beside what an algorithm needs: norms, losses, is there a gradient?


class Sizes(NamedTuple):
    """Bytes of a network, and of a step with the global batch, by the symbols of docs/strategies.md."""

    n: int  # processes
    P: int  # all parameters
    U: int  # those in units
    C: int  # those in units that tensor ranks split
    E: int  # others that they split: embedding and head
    L: int  # blocks
    A: int  # what goes from a block to the next one
    K: int  # keys and values of a block
    S: int  # scores
    held: int  # weights that this rank holds, by the plan


def sizes_of(network: Any, n: int, tokens: int) -> Sizes:
    """Of a network with blocks."""
    split: Counter[bool] = Counter()
    for key, style in network.plan().tensor.items():
        for name, layer in network.named_modules():
            if fnmatch(name, key) and name.count(".") == key.count("."):
                by_row = isinstance(style, RowwiseParallel) and isinstance(layer, nn.Linear)  # its bias stays whole
                split[key.startswith("blocks.")] += layer.weight.nbytes if by_row else bytes_of(layer)
    head, depth = network.head, len(network.blocks)
    stream, scores = (4 * SAMPLES * tokens * size for size in (head.in_features, head.out_features))
    units = bytes_of(network.blocks)
    return Sizes(n, bytes_of(network), units, split[True], split[False], depth, stream, 2 * stream, scores, 0)


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


@pytest.mark.long
@pytest.mark.slow
@pytest.mark.parametrize(
    ("ranks", "network", "strategies"),
    [
        (2, TRANSFORMER, ["ddp", "zero1", "fsdp", "tp", "pp"]),
        (4, TRANSFORMER, ["ddp", "fsdp", "hsdp", "ddp_tp", "fsdp_tp", "ddp_pp", "fsdp_pp"]),
        (4, DECODER, ["cp", "ddp_cp", "fsdp_cp"]),
        # with keys of their own, each a plan for itself
        (4, DECODER, "mesh strategy.context=2 strategy.tensor=2"),
        (2, TRANSFORMER, "fsdp strategy.param_dtype=bf16 loop.micro_batches=4"),
        (2, TRANSFORMER, "ddp strategy.compress=bf16"),
    ],
)
def test_a_step_sends_the_bytes_that_are_planned_and_that_its_algorithm_needs(
    processes: Processes, tmp_path: Path, ranks: int, network: tuple[str, ...], strategies: list[str] | str
) -> None:
    common = [*network, f"loop.global_batch={SAMPLES}", "loop.max_norm=1"]
    own = [f"strategy={strategies}", "job.strategies=[own]"] if isinstance(strategies, str) else []
    asked = " ".join(own) or f"job.strategies=[{','.join(strategies)}]"
    words = [*common, "job=plan", "run.dir=plan", f"job.processes=[{ranks}]", "job.seconds=600", *asked.split()]
    facts = json.loads(
        (run([*words, "device=cpu", "log=[]"], 1, "process", place=tmp_path).folder / "plan/plan.json").read_text()
    )
    rows: dict[Any, Any] = {row["words"].removeprefix("strategy=") or strategies: row for row in facts["rows"]}
    assert isinstance(strategies, str) or {row["strategy"] for row in rows.values()} == {*strategies}
    if network == DECODER:
        sizes = sizes_of(Decoder(256, 64, width=32, depth=2, heads=4), ranks, 64)
    else:
        sizes = sizes_of(VisionTransformer(10, 1, 8, patch_size=2, width=24, depth=2, heads=4), ranks, 16)
    for number, (words_, row) in enumerate(rows.items()):
        step = [word for word in STEP.split() if "precision" not in word]
        folder = run(
            [*common, *step, "loop.eval_every=null", *f"strategy={words_}".split(), f"run.dir=run-{number}"],
            ranks,
            "group",
            place=tmp_path,
        ).folder
        seen = [by_kind(sent(folder, rank)) for rank in range(ranks)]
        assert as_gloo_sends(row) == seen[row["rank"]], words_
        here = sizes._replace(held=row["by_kind"]["weights"])
        to_one = sum(each["bytes"] for each in row["collectives"] if each["op"] == "send")
        assert 0 <= row["wire"]["inside"] - to_one - NEEDED[words_](here) < SMALL, words_
        assert mean(rank.get("send", 0) for rank in seen) == TO_ONE.get(words_, lambda _: 0)(here), words_


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


@pytest.mark.slow
@pytest.mark.parametrize("strategy", quickly(SENDS_GRADIENTS, "ddp strategy.bucket_mb=1"))
def test_gradients_leave_while_the_backward_still_runs(processes: Processes, tmp_path: Path, strategy: str) -> None:
    network = ("model=vit_tiny", "model.width=128", "model.heads=4", "model.depth=4", "loop.global_batch=8")
    words = [*network, *STEP.split(), "loop.eval_every=null", *f"strategy={strategy}".split(), "run.dir=run"]
    folder = run(words, 2, "group", place=tmp_path).folder
    name, least = SENDS_GRADIENTS[strategy]
    for rank in range(2):
        found = sorted(events(folder, rank), key=lambda event: event.get("ts", 0))
        nodes = [event["ts"] for event in found if event["name"].startswith("autograd::engine::evaluate_function")]
        assert sum(nodes[0] < event["ts"] < nodes[-1] for event in found if event["name"] == name) >= least
