"""What a strategy is: everything here holds for each of them, measured against one process."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from tests.processes import Processes
from tests.quick import quickly
from tests.strategies.toys import BATCH, STRATEGIES, Case, Net, Plain, ToyData, built, run
from trainer.data.reader import Loading
from trainer.data.stream import Stream
from trainer.launch.launch import Launch
from trainer.strategies.machine import Machine

# name → (processes, the case)
SPREAD = {
    "dp": (1, Case("dp")),
    "ddp on 1": (1, Case("ddp")),
    "ddp on 2": (2, Case("ddp")),
    "ddp on 4": (4, Case("ddp")),
    "tp on 2": (2, Case("tp")),
    "tp on 3": (3, Case("tp")),
    "ddp_tp on 4": (4, Case("ddp_tp", {"tensor": 2})),
    "zero1 on 1": (1, Case("zero1")),
    "zero1 on 3": (3, Case("zero1")),
    "fsdp on 1": (1, Case("fsdp")),
    "fsdp on 2": (2, Case("fsdp", {"reshard_after_forward": False})),
    "fsdp on 3": (3, Case("fsdp", {"sync_micro_batches": True})),
    "fsdp on 4": (4, Case("fsdp", {"cpu_offload": True, "prefetch": 2})),
    "hsdp on 4": (4, Case("fsdp", {"replicate": 2})),
    "fsdp_tp on 4": (4, Case("fsdp", {"tensor": 2})),
}
SPREAD |= {
    "pp on 2": (2, Case("pp")),
    "pp on 3": (3, Case("pp", {"schedule": "GPipe"})),
    "ddp_pp on 4": (4, Case("pp", {"pipe": 2, "replicate": 2})),
    "fsdp_pp on 4": (4, Case("pp", {"pipe": 2, "shard": 2})),
    "mesh of shard and tensor on 4": (4, Case("mesh", {"shard": 2, "tensor": 2})),
    "mesh of pipe and tensor on 4": (4, Case("mesh", {"pipe": 2, "tensor": 2})),
}
MORE = [(1, "weighted"), (2, "plain")]  # micro-batches, the task
everywhere = pytest.mark.parametrize("where", SPREAD)
_done: dict[str, list[dict[str, Any]]] = {}


@pytest.fixture
def train(processes: Processes) -> Any:
    """Run a case on so many ranks; one that ran before is remembered, unless it touches files."""

    def remembered(size: int, case: Case) -> list[dict[str, Any]]:
        key = f"{size} {case}"
        if key not in _done or case.folder:
            _done[key] = processes.run(size, run, case)
        return _done[key]

    return remembered


def apart(one: list[float], other: list[float]) -> list[float]:
    assert len(one) == len(other)
    return [abs(a - b) for a, b in zip(one, other, strict=True)]


@everywhere
def test_losses_norms_and_weights_equal_those_of_one_process(train: Any, where: str) -> None:
    size, case = SPREAD[where]
    (reference,), ranks = train(1, case.but(strategy="single", fields={})), train(size, case)
    for rank in ranks:
        assert max(apart(rank["losses"], reference["losses"])[:8]) < 1e-5
        assert max(apart(rank["losses"], reference["losses"])) < 1e-3
        assert max(apart(rank["norms"], reference["norms"])[:8]) < 1e-4
        assert rank["digests"] == reference["digests"]


@everywhere
def test_every_run_begins_with_the_same_bits(train: Any, where: str) -> None:
    size, case = SPREAD[where]
    (reference,), ranks = train(1, case.but(strategy="single", fields={})), train(size, case)
    for rank in ranks:  # the first has built the network, and sent the others their parts
        assert rank["initial"] == {name: reference["initial"][name] for name in rank["initial"]}
    assert {name for rank in ranks for name in rank["initial"]} == set(reference["initial"])


@everywhere
@pytest.mark.parametrize(("micro_batches", "task"), quickly([(4, "weighted"), *MORE], (4, "weighted")))
def test_in_double_precision_every_curve_is_the_same_curve(
    train: Any, where: str, task: str, micro_batches: int
) -> None:
    size, case = SPREAD[where]
    case = case.but(precision="fp64", task=task, steps=8)  # two epochs
    (reference,) = train(1, case.but(strategy="single", fields={}))
    for rank in train(size, case.but(micro_batches=micro_batches)):
        assert max(apart(rank["losses"], reference["losses"])) < 1e-10
        assert max(apart(rank["norms"], reference["norms"])) < 1e-10
        for name, weights in rank["weights"].items():  # a stage has those of its own
            assert _furthest(weights, reference["weights"][name]) < 1e-10
        for name, average in rank["averages"].items():
            assert _furthest(average, reference["averages"][name]) < 1e-10
        # evaluation counts each sample once, or fails: the 101 of a prime divide by no number of ranks
        assert {"perplexity", "ema_perplexity"} <= set(rank["figures"])
        assert rank["figures"] == pytest.approx(reference["figures"], abs=1e-9)
        assert rank["back"]  # the average stood in the weights' place meanwhile


@pytest.mark.parametrize("where", ["ddp on 2", "zero1 on 3", "fsdp on 3", "pp on 2"])
def test_a_moving_average_leaves_the_curve_as_it_is(train: Any, where: str) -> None:
    size, case = SPREAD[where]
    for rank, without in zip(train(size, case), train(size, case.but(average=None)), strict=True):
        assert (rank["losses"], rank["weights"]) == (without["losses"], without["weights"])
        assert {name.removeprefix("ema/") for name in rank["averages"]} == set(rank["names"])
        assert without["averages"] == {}


def test_inputs_may_be_nested(train: Any) -> None:
    (reference,) = train(1, Case())
    for size, case in (SPREAD["ddp on 2"], SPREAD["tp on 2"], SPREAD["fsdp on 2"]):
        for rank in train(size, case.but(task="nested", micro_batches=2)):
            assert max(apart(rank["losses"], reference["losses"])[:8]) < 1e-5


@everywhere
def test_names_are_the_networks_own(train: Any, where: str) -> None:
    size, case = SPREAD[where]
    own, ranks = Net(), train(size, case)  # a rank may hold a part: what all of them hold counts
    names, state = (sorted({name for rank in ranks for name in rank[key]}) for key in ("names", "state"))
    assert names == sorted(name for name, _ in own.named_parameters())
    assert {name for name in state if "/" not in name} == set(own.state_dict())
    assert {name.removeprefix("ema/") for name in state if name.startswith("ema/")} == set(names)
    assert {name.split("/")[1] for name in state if name.startswith("optimizer/")} == set(names)


@everywhere
def test_data_slices_make_up_an_epoch_once_and_change_with_it(train: Any, where: str) -> None:
    size, case = SPREAD[where]
    ranks = train(size, case)
    epochs: dict[int, list[int]] = {}
    for rank in {rank["data_rank"]: rank for rank in ranks}.values():  # one of each that read the same
        for epoch, indices in rank["indices"]:
            epochs.setdefault(epoch, []).extend(indices)
    for indices in epochs.values():
        assert len(indices) == len(set(indices)) == 4 * 48  # floor(220 / 48) steps
    assert len({frozenset(indices) for indices in epochs.values()}) == len(epochs)  # another tail left out each time


@everywhere
def test_the_same_command_again_stopped_and_resumed_gives_the_same_bits(train: Any, where: str, tmp_path: Path) -> None:
    size, case = SPREAD[where]
    unbroken = train(size, case)
    stopped = train(size, case.but(folder=str(tmp_path), save=6, steps=6))  # in the middle of the second epoch
    assert [rank["losses"] for rank in stopped] == [rank["losses"][:6] for rank in unbroken]
    for rank, whole_run in zip(train(size, case.but(folder=str(tmp_path), start=6)), unbroken, strict=True):
        assert rank["losses"] == whole_run["losses"][6:]
        assert rank["digests"] == whole_run["digests"][6:]
        assert rank["weights"] == whole_run["weights"]
        assert rank["averages"] == whole_run["averages"]


SPREADS = [
    "dp",
    "ddp on 2",
    "tp on 2",
    "ddp_tp on 4",
    "zero1 on 3",
    "fsdp on 3",
    "hsdp on 4",
    "fsdp_tp on 4",
    "pp on 2",
    "ddp_pp on 4",
]
# gloo sends no GPU tensors from rank to rank, which a pipeline needs; these processes share one GPU
ON_GPUS = [
    pytest.param(name, "gloo", marks=pytest.mark.gpu, id=f"{name}, gloo")
    for name in ("ddp on 2", "tp on 2", "fsdp on 2", "zero1 on 3", "ddp_tp on 4")
]
ON_GPUS += [
    pytest.param(name, None, marks=pytest.mark.gpu(size), id=f"{name}, NCCL") for name, (size, _) in SPREAD.items()
]
# Each saves and each goes on with what another layout has saved, alone or in parts.
JOURNEYS = {
    "adamw": ["dp", "ddp on 2", "tp on 2", "fsdp on 3", "zero1 on 3", "ddp_pp on 4", "fsdp_tp on 4", "single"],
    "sgd": ["single", "hsdp on 4", "pp on 2", "zero1 on 3", "fsdp_tp on 4", "ddp_tp on 4", "fsdp on 3", "pp on 3"],
}
PAIRS = [
    *[("single", name) for name in SPREADS],
    *[(name, "single") for name in SPREADS],
    ("fsdp on 3", "ddp_tp on 4"),
    ("zero1 on 3", "fsdp_tp on 4"),
    ("fsdp_tp on 4", "zero1 on 3"),
    ("hsdp on 4", "pp on 3"),
    ("pp on 2", "tp on 2"),
    ("ddp_pp on 4", "fsdp on 3"),
]


@pytest.mark.parametrize("optimizer", JOURNEYS)
def test_a_run_goes_on_under_one_strategy_after_the_other(train: Any, optimizer: str, tmp_path: Path) -> None:
    stations = JOURNEYS[optimizer]
    (reference,) = train(1, Case(optimizer=optimizer, steps=2 * len(stations)))
    for start, name in zip(range(0, 2 * len(stations), 2), stations, strict=True):
        size, case = {"single": (1, Case()), **SPREAD}[name]
        case = case.but(folder=str(tmp_path), start=start, steps=start + 2, save=start + 2, optimizer=optimizer)
        for rank in train(size, case):
            assert max(apart(rank["losses"], reference["losses"][start : start + 2])) < 1e-5, name
            assert rank["digests"] == reference["digests"][start : start + 2], name
            for own, average in rank["averages"].items() if name == stations[-1] else ():
                assert _furthest(average, reference["averages"][own]) < 1e-5, name


@pytest.mark.long
@pytest.mark.parametrize("optimizer", ["adamw", "sgd"])
@pytest.mark.parametrize(("source", "target"), PAIRS)
def test_saved_under_one_strategy_it_goes_on_under_another(
    train: Any, source: str, target: str, optimizer: str, tmp_path: Path
) -> None:
    where = {"single": (1, Case()), **SPREAD}
    (size_a, a), (size_b, b) = where[source], where[target]
    (reference,) = train(1, Case(optimizer=optimizer))
    train(size_a, a.but(folder=str(tmp_path), save=6, steps=6, optimizer=optimizer))
    for rank in train(size_b, b.but(folder=str(tmp_path), start=6, optimizer=optimizer)):
        assert max(apart(rank["losses"], reference["losses"][6:])) < 1e-5
        assert rank["digests"] == reference["digests"][6:]


@pytest.mark.parametrize("task", ["plain", "weighted"])
@pytest.mark.parametrize(("where", "backend"), ON_GPUS)
def test_on_gpus_the_curve_is_that_of_one_process_on_a_cpu(
    train: Any, where: str, task: str, backend: str | None
) -> None:
    size, case = SPREAD[where]
    (reference,) = train(1, Case(precision="fp64", task=task))
    case = case.but(precision="fp64", task=task, device="cuda", backend=backend, micro_batches=2)
    for rank in train(size, case):
        assert max(apart(rank["losses"], reference["losses"])) < 1e-10
        assert max(apart(rank["norms"], reference["norms"])) < 1e-10
        assert rank["figures"] == pytest.approx(reference["figures"], abs=1e-9)


@pytest.mark.gpu
@pytest.mark.parametrize("optimizer", ["adamw", "sgd"])
def test_on_a_gpu_offloaded_parameters_learn_in_fp16(train: Any, optimizer: str) -> None:
    (reference,) = train(1, Case(optimizer=optimizer))
    case = Case("fsdp", {"cpu_offload": True}, precision="fp16", device="cuda", optimizer=optimizer)
    (rank,) = train(1, case)  # gradients on the host, the loss's scale on the GPU
    assert rank["losses"][-1] == pytest.approx(reference["losses"][-1], abs=0.1)


def test_sequence_and_loss_parallel_are_exact_where_the_plan_asks(train: Any) -> None:
    case = Case(network="sequence", task="steps", precision="fp64")
    (reference,) = train(1, case)
    for size, spread in ((2, case.but(strategy="tp")), (4, case.but(strategy="ddp_tp", fields={"tensor": 2}))):
        for rank in train(size, spread):
            assert max(apart(rank["losses"], reference["losses"])) < 1e-10
            assert max(apart(rank["norms"], reference["norms"])) < 1e-10
            assert rank["figures"] == pytest.approx(reference["figures"], abs=1e-9)


@pytest.mark.parametrize("size", [2, 3])
def test_a_loss_over_gathered_rows_is_the_loss_of_one_process(train: Any, size: int) -> None:
    case = Case(task="contrast", precision="fp64")
    (reference,) = train(1, case)
    for rank in train(size, case.but(strategy="ddp")):
        assert max(apart(rank["losses"], reference["losses"])) < 1e-10


@pytest.mark.parametrize("size", [2, 3, 4])
def test_synchronised_batch_norm_is_that_of_one_process(train: Any, size: int) -> None:
    case = Case(network="batch_norm", precision="fp64", optimizer="sgd")  # Adam would amplify a bias without gradient
    (reference,) = train(1, case)
    for rank in train(size, case.but(strategy="ddp", fields={"sync_bn": True})):
        assert max(apart(rank["losses"], reference["losses"])) < 1e-10
        for kind in ("weights", "averages"):
            for name in reference[kind]:
                assert _furthest(rank[kind][name], reference[kind][name]) < 1e-10


def test_without_it_running_statistics_are_averaged_before_use(train: Any) -> None:
    ranks = train(2, Case("ddp", network="batch_norm"))
    assert ranks[0]["weights"]["1.running_mean"] == ranks[1]["weights"]["1.running_mean"]
    assert ranks[0]["averages"]["ema/1.running_var"] == ranks[1]["averages"]["ema/1.running_var"]
    assert ranks[0]["figures"] == ranks[1]["figures"]


def test_dropout_differs_over_data_ranks_and_agrees_over_tensor_ranks(train: Any) -> None:
    case = Case(network="dropout", precision="fp64")
    (one,) = train(1, case)
    for rank in train(2, case.but(strategy="tp")):  # the masks are those of one process
        assert max(apart(rank["losses"], one["losses"])) < 1e-10
    two = train(2, case.but(strategy="ddp"))
    four = train(4, case.but(strategy="ddp_tp", fields={"tensor": 2}))
    assert max(apart(two[0]["losses"], four[0]["losses"])) < 1e-10  # two data ranks each
    assert min(apart(two[0]["losses"], one["losses"])) > 0


class Drawing(Plain):
    """Says what a generator would give next, whenever a loss is computed."""

    def __init__(self) -> None:
        self.drawn: list[float] = []

    def loss(self, output: Any, target: Any) -> Any:
        self.drawn.append(float(torch.rand(())))
        return super().loss(output, target)


def drawn(launch: Launch, word: str, seed: int) -> list[float]:
    """Two steps of two micro-batches."""
    task, data = Drawing(), ToyData()
    with STRATEGIES[word](machine=Machine(launch=launch, device="cpu", seed=seed)) as strategy:
        stream = Stream(data, data.train(), strategy.slice, BATCH, 2, Loading())
        placed = strategy.build(task, built(strategy, Net), stream.example())
        task.drawn.clear()  # of a rehearsal
        for step, batches in zip(range(2), stream.epoch(0), strict=False):
            placed.forward_backward(batches, step)
    return task.drawn


def test_random_numbers_follow_from_seed_step_micro_batch_and_data_rank(processes: Processes) -> None:
    (alone,) = processes.run(1, drawn, "single", 3)
    ((other,), two, cut) = (
        processes.run(*words) for words in ((1, drawn, "single", 4), (2, drawn, "ddp", 3), (2, drawn, "tp", 3))
    )
    assert len({*alone, *other, *two[1]}) == 12
    assert two[0] == cut[0] == cut[1] == alone
    assert processes.run(2, drawn, "ddp", 3) == two


def _furthest(one: Any, other: Any) -> float:
    if isinstance(one, list):
        return max((_furthest(a, b) for a, b in zip(one, other, strict=True)), default=0.0)
    return abs(one - other)
