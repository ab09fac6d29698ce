"""What a strategy is: everything here holds for each of them, measured against one process."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from tests.processes import Processes
from tests.quick import quickly
from tests.strategies.toys import BATCH, STRATEGIES, Case, Net, Plain, ToyData, built, run
from trainer.data.dataset_reader import LoaderOptions
from trainer.data.loader import TrainLoader
from trainer.launch.rendezvous import Launch
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
# every plan of a decoder under every strategy: name → (processes, what its network is asked for, the case)
PLANS = {
    "alone, recomputing": (1, "", Case(fields={"activation_checkpointing": "units"})),
    "dp": (1, "", Case("dp")),
    "ddp on 2": (2, "", Case("ddp")),
    "zero1 on 3": (3, "", Case("zero1")),
    "fsdp on 3": (3, "", Case("fsdp", {"activation_checkpointing": "operators"})),
    "hsdp on 4": (4, "", Case("fsdp", {"replicate": 2})),
    "tp on 2": (2, "", Case("tp")),
    "tp on 2, by sequence": (2, " sequence", Case("tp")),
    "tp on 2, by sequence, dropout": (2, " sequence dropout", Case("tp")),
    "tp on 2, loss_parallel": (2, " loss_parallel", Case("tp")),
    "ddp_tp on 4, by sequence, loss_parallel": (4, " sequence loss_parallel", Case("ddp_tp", {"tensor": 2})),
    "fsdp_tp on 4, by sequence": (4, " sequence", Case("fsdp", {"tensor": 2, "activation_checkpointing": "units"})),
    "pp on 2": (2, "", Case("pp")),
    "ddp_pp on 4": (4, "", Case("pp", {"pipe": 2, "replicate": 2})),
    "fsdp_pp on 4": (4, "", Case("pp", {"pipe": 2, "shard": 2})),
    "pipe and tensor on 4, by sequence": (4, " sequence", Case("mesh", {"pipe": 2, "tensor": 2})),
}
# the same with stretches of sequences
PLANS |= {
    "cp on 2": (2, "", Case("cp")),
    "cp on 4": (4, "", Case("cp", {"activation_checkpointing": "operators"})),
    "ddp_cp on 4": (4, "", Case("ddp_cp")),
    "ddp_cp on 4, dropout": (4, " dropout", Case("ddp_cp")),
    "context and tensor on 4, by sequence, dropout": (4, " sequence dropout", Case("ddp_cp", {"tensor": 2})),
    "fsdp_cp on 4": (4, "", Case("fsdp", {"context": 2, "activation_checkpointing": "units"})),
    "hsdp with context on 4": (4, "", Case("fsdp", {"replicate": 2, "context": 2})),
    "context and tensor on 4": (4, " loss_parallel", Case("ddp_cp", {"tensor": 2})),
    "context and tensor on 4, by sequence": (4, " sequence", Case("mesh", {"context": 2, "tensor": 2})),
}
DECODERS = [(kind, plan) for kind in ("gpt", "gpt tied", "llama", "llama tied") for plan in PLANS]
DECODERS = [
    (kind, plan)  # a tied weight is not split, and no two stages share it
    for kind, plan in DECODERS
    if "tied" not in kind or ("loss_parallel" not in PLANS[plan][1] and "pp" not in plan and "pipe" not in plan)
]
# mixtures of experts: each plan with one of them
EXPERTS = {
    "fsdp, expert on 2": (2, "", Case("mesh", {"shard": 2, "expert": 2})),
    "copies, expert on 2": (2, "", Case("mesh", {"replicate": 2, "expert": 2})),
    "fsdp, expert on 4": (4, "", Case("fsdp", {"expert": 2, "activation_checkpointing": "units"})),
    "hsdp, expert on 4": (4, "", Case("mesh", {"replicate": 2, "shard": 2, "expert": 4})),
    "offloaded, expert on 2": (2, "", Case("fsdp", {"expert": 2, "cpu_offload": True})),
    "context and expert on 4": (4, "", Case("fsdp", {"context": 2, "expert": 4})),
    "tensor and expert on 4, by sequence": (4, " sequence", Case("fsdp", {"tensor": 2, "expert": 2})),
}
MIXTURES = ("experts biased", "experts shared", "experts behind")
DECODERS += [(MIXTURES[number % 3], plan) for number, plan in enumerate(PLANS)]
DECODERS += [(kind, plan) for kind in MIXTURES for plan in EXPERTS]
PLANS |= EXPERTS
QUICK_DECODERS = [
    ("experts biased", "fsdp, expert on 2"),
    ("llama", "context and tensor on 4"),
    ("gpt tied", "ddp_cp on 4, dropout"),
    ("llama tied", "fsdp_cp on 4"),
]
# samples of documents, of which no token sees another one; the last tokens of documents do not count
PLANS |= {"ddp on 3": (3, "", Case("ddp")), "zero1 on 2": (2, "", Case("zero1")), "fsdp on 2": (2, "", Case("fsdp"))}
PACKED_PLANS = ["alone, recomputing", "dp", "ddp on 2", "ddp on 3", "zero1 on 2", "fsdp on 2", "fsdp on 3", "hsdp on 4"]
PACKED_PLANS += ["tp on 2", "tp on 2, by sequence", "tp on 2, loss_parallel", "pp on 2", "cp on 2", "cp on 4"]
PACKED = [
    *[("llama", plan) for plan in PACKED_PLANS],
    *[("gpt", plan) for plan in ("tp on 2, by sequence", "pp on 2", "pipe and tensor on 4, by sequence", "cp on 2")],
    ("gpt tied", "ddp_cp on 4, dropout"),
    ("llama", "fsdp_cp on 4"),
    ("llama", "context and tensor on 4, by sequence, dropout"),
    *[(kind, plan) for kind in MIXTURES for plan in ("ddp on 2", "cp on 2", "pp on 2")],
]
QUICK_PACKED = [("llama", "cp on 2")]
# a token sees three tokens: with and without documents
WINDOWS = [(kind, plan) for kind in ("gpt window", "llama window") for plan in PACKED_PLANS]
# each strategy once, and each pair of axes
ONCE = ["dp", "ddp on 4", "tp on 2", "ddp_tp on 4", "zero1 on 3", "fsdp on 3", "hsdp on 4", "fsdp_tp on 4"]
ONCE += ["pp on 2", "fsdp_pp on 4", "mesh of pipe and tensor on 4"]
once_each = pytest.mark.parametrize("where", quickly(SPREAD, *ONCE))
# and where nothing but the number of axes differs from these
TO_THE_BIT = ["dp", "ddp on 4", "tp on 2", "zero1 on 3", "fsdp on 3", "fsdp_tp on 4", "pp on 2"]
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


def in_double_precision(where: str, task: str = "weighted", micro_batches: int = 2) -> tuple[int, Case]:
    """A run of two epochs, which several tests look at."""
    size, case = SPREAD[where]
    return size, case.but(precision="fp64", task=task, micro_batches=micro_batches, steps=8)


def apart(one: list[float], other: list[float]) -> list[float]:
    assert len(one) == len(other)
    return [abs(a - b) for a, b in zip(one, other, strict=True)]


@pytest.mark.parametrize("where", quickly(SPREAD, *TO_THE_BIT))
def test_losses_norms_and_weights_equal_those_of_one_process(train: Any, where: str) -> None:
    size, case = SPREAD[where]
    (reference,), ranks = train(1, case.but(strategy="single", fields={})), train(size, case)
    for rank in ranks:
        assert max(apart(rank["losses"], reference["losses"])[:8]) < 1e-5
        assert max(apart(rank["losses"], reference["losses"])) < 1e-3
        assert max(apart(rank["norms"], reference["norms"])[:8]) < 1e-4
        assert rank["digests"] == reference["digests"]


@once_each
def test_every_run_begins_with_the_same_bits(train: Any, where: str) -> None:
    size, case = in_double_precision(where)
    (reference,), ranks = train(1, case.but(strategy="single", fields={}, micro_batches=1)), train(size, case)
    for rank in ranks:  # the first has built the network, and sent the others their parts
        assert rank["initial"] == {name: reference["initial"][name] for name in rank["initial"]}
    assert {name for rank in ranks for name in rank["initial"]} == set(reference["initial"])


@once_each
@pytest.mark.parametrize(
    ("micro_batches", "task"), quickly([(2, "weighted"), (1, "weighted"), (4, "plain")], (2, "weighted"))
)
def test_in_double_precision_every_curve_is_the_same_curve(
    train: Any, where: str, task: str, micro_batches: int
) -> None:
    size, case = in_double_precision(where, task, micro_batches)
    (reference,) = train(1, case.but(strategy="single", fields={}, micro_batches=1))
    for rank in train(size, case):
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


@pytest.mark.parametrize(("kind", "plan"), quickly(DECODERS, *QUICK_DECODERS))
def test_every_plan_of_a_decoder_keeps_the_contract(train: Any, kind: str, plan: str) -> None:
    keeps_the_contract(train, kind, plan, "next")


@pytest.mark.parametrize(("kind", "plan"), quickly(PACKED, *QUICK_PACKED))
def test_every_plan_of_a_decoder_keeps_the_contract_with_packed_documents(train: Any, kind: str, plan: str) -> None:
    keeps_the_contract(train, kind, plan, "packed")


@pytest.mark.parametrize(("kind", "plan"), quickly(WINDOWS, ("gpt window", "cp on 2"), ("llama window", "pp on 2")))
def test_every_plan_of_a_decoder_keeps_the_contract_with_windows(train: Any, kind: str, plan: str) -> None:
    keeps_the_contract(train, kind, plan, "packed" if "llama" in kind else "next")


def keeps_the_contract(train: Any, kind: str, plan: str, task: str) -> None:
    """The curve, the weights and the metrics of a decoder are those of one process."""
    size, asked, case = PLANS[plan]
    case = case.but(network=kind + asked, task=task, precision="fp64", steps=6)  # into the second epoch
    alone = kind + " dropout" * ("dropout" in asked)
    (reference,) = train(1, case.but(strategy="single", fields={}, network=alone))
    ranks = train(size, case.but(micro_batches=2))
    for rank in ranks:
        assert max(apart(rank["losses"], reference["losses"])) < 1e-10
        assert max(apart(rank["norms"], reference["norms"])) < 1e-10
        assert rank["digests"] == reference["digests"]
        assert rank["figures"] == pytest.approx(reference["figures"], abs=1e-9)
        for key in ("weights", "averages"):
            for name, value in rank[key].items():
                assert _furthest(value, reference[key][name]) < 1e-10
    for key in ("initial", "weights", "averages"):
        assert {name for rank in ranks for name in rank[key]} == set(reference[key])
    assert all(rank["initial"][name] == reference["initial"][name] for rank in ranks for name in rank["initial"])


@pytest.mark.long
def test_stretches_go_on_where_whole_sequences_stopped_and_the_other_way_round(train: Any, tmp_path: Path) -> None:
    whole = Case(network="gpt tied", task="next", precision="fp64", steps=8)
    stretches = whole.but(strategy="fsdp", fields={"context": 2})
    (reference,) = train(1, whole)
    unbroken, _ = train(2, stretches)
    path = str(tmp_path)
    train(2, stretches.but(folder=path, save=3, steps=3))
    again, _ = train(2, stretches.but(folder=path, start=3, save=5, steps=5))
    assert again["losses"] == unbroken["losses"][3:5]  # to the bit
    (alone,) = train(1, whole.but(folder=path, start=5, save=7, steps=7))
    last, _ = train(2, stretches.but(folder=path, start=7))
    assert max(apart(alone["losses"] + last["losses"], reference["losses"][5:])) < 1e-10


@pytest.mark.long
def test_experts_and_their_bias_go_on_under_one_strategy_after_the_other(train: Any, tmp_path: Path) -> None:
    whole = Case(network="experts biased", task="next", precision="fp64", steps=10)
    (reference,) = train(1, whole)
    stations = ["fsdp, expert on 4", "tp on 2", "copies, expert on 2", "zero1 on 3", "fsdp, expert on 2"]
    path, start = str(tmp_path), 0
    for name in stations:
        size, _, case = PLANS[name]
        here = whole.but(strategy=case.strategy, fields=case.fields, folder=path, start=start)
        ranks = train(size, here.but(steps=start + 2, save=start + 2))
        assert max(apart(ranks[0]["losses"], reference["losses"][start : start + 2])) < 1e-10, name
        start += 2
    for number, here in enumerate((Case("ddp"), PLANS["fsdp, expert on 2"][2])):
        case = whole.but(strategy=here.strategy, fields=here.fields)
        unbroken, _ = train(2, case)
        path = str(tmp_path / str(number))
        train(2, case.but(folder=path, save=3, steps=3))
        again, _ = train(2, case.but(folder=path, start=3))
        assert again["losses"] == unbroken["losses"][3:]  # to the bit
        assert again["weights"] == unbroken["weights"]


@pytest.mark.long
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
        for rank in train(size, case.but(task="nested", micro_batches=2, steps=8)):
            assert max(apart(rank["losses"], reference["losses"][:8])) < 1e-5


@once_each
def test_names_are_the_networks_own(train: Any, where: str) -> None:
    size, case = in_double_precision(where)
    own, ranks = Net(), train(size, case)  # a rank may hold a part: what all of them hold counts
    names, state = (sorted({name for rank in ranks for name in rank[key]}) for key in ("names", "state"))
    assert names == sorted(name for name, _ in own.named_parameters())
    assert {name for name in state if "/" not in name} == set(own.state_dict())
    assert {name.removeprefix("ema/") for name in state if name.startswith("ema/")} == set(names)
    assert {name.split("/")[1] for name in state if name.startswith("optimizer/")} == set(names)


@once_each
def test_data_slices_make_up_an_epoch_once_and_change_with_it(train: Any, where: str) -> None:
    size, case = in_double_precision(where)
    ranks = train(size, case)
    epochs: dict[int, list[int]] = {}
    for rank in {rank["data_rank"]: rank for rank in ranks}.values():  # one of each that read the same
        for epoch, indices in rank["indices"]:
            epochs.setdefault(epoch, []).extend(indices)
    for indices in epochs.values():
        assert len(indices) == len(set(indices)) == 4 * 48  # floor(220 / 48) steps
    assert len({frozenset(indices) for indices in epochs.values()}) == len(epochs)  # another tail left out each time


@pytest.mark.parametrize("where", quickly(SPREAD, *TO_THE_BIT))
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
# these processes share one GPU; gloo sends no GPU's tensors from rank to rank, and gathers none as DTensor does
ON_GPUS = [
    pytest.param(name, "gloo", marks=pytest.mark.gpu, id=f"{name}, gloo")
    for name in ("ddp on 2", "fsdp on 2", "zero1 on 3", "hsdp on 4")
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


@pytest.mark.parametrize("optimizer", quickly(JOURNEYS, "adamw"))
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


@pytest.mark.long
@pytest.mark.parametrize("network", ["sequence", "drawing sequence"])
def test_sequence_and_loss_parallel_are_exact_where_the_plan_asks(train: Any, network: str) -> None:
    case = Case(network=network, task="steps", precision="fp64")
    (reference,) = train(1, case)
    for size, spread in ((2, case.but(strategy="tp")), (4, case.but(strategy="ddp_tp", fields={"tensor": 2}))):
        for rank in train(size, spread):
            assert max(apart(rank["losses"], reference["losses"])) < 1e-10
            assert max(apart(rank["norms"], reference["norms"])) < 1e-10
            assert rank["figures"] == pytest.approx(reference["figures"], abs=1e-9)


@pytest.mark.parametrize("size", quickly([2, 3], 3))
def test_a_loss_over_gathered_rows_is_the_loss_of_one_process(train: Any, size: int) -> None:
    case = Case(task="contrast", precision="fp64")
    (reference,) = train(1, case)
    for rank in train(size, case.but(strategy="ddp")):
        assert max(apart(rank["losses"], reference["losses"])) < 1e-10


@pytest.mark.parametrize("size", quickly([2, 3, 4], 3))
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


@pytest.mark.parametrize("where", quickly(SPREAD, "zero1 on 3", "tp on 2", "mesh of pipe and tensor on 4"))
def test_networks_that_draw_have_one_curve(train: Any, where: str) -> None:
    size, case = SPREAD[where]
    case = case.but(network="drawing", precision="fp64", average=None, steps=6)  # into the second epoch
    alike(train(size, case.but(micro_batches=2)), train(1, case.but(strategy="single", fields={})))


@pytest.mark.long
@pytest.mark.parametrize("where", SPREAD)
def test_so_they_have_in_single_precision(train: Any, where: str) -> None:
    size, case = SPREAD[where]
    case = case.but(network="drawing", average=None, steps=8)
    (reference,) = train(1, case.but(strategy="single", fields={}))
    for rank in train(size, case.but(micro_batches=4)):
        assert max(apart(rank["losses"], reference["losses"])) < 1e-5
        assert max(apart(rank["norms"], reference["norms"])) < 1e-4


SYNCHRONISED = [(name, "normed") for name in SPREAD if name != "dp"]
SYNCHRONISED += [
    (name, "foreign") for name in SPREAD if name != "dp" and "tensor" not in f"{name} {SPREAD[name][1].fields}"
]
SYNCHRONISED = [
    (name, network) for name, network in SYNCHRONISED if network == "normed" or SPREAD[name][1].strategy != "tp"
]


@pytest.mark.long
@pytest.mark.parametrize(
    ("where", "network"),
    quickly(
        SYNCHRONISED,
        ("ddp_tp on 4", "normed"),
        ("ddp_pp on 4", "normed"),
        ("ddp on 2", "foreign"),
        ("pp on 2", "foreign"),
    ),
)
def test_so_have_those_that_have_batch_statistics_too(train: Any, where: str, network: str) -> None:
    size, case = SPREAD[where]
    # Adam would amplify a bias without gradient
    case = case.but(network=network, precision="fp64", average=None, steps=6, optimizer="sgd")
    case = case.but(fields={**case.fields, "sync_bn": True})
    alike(train(size, case), train(1, case.but(strategy="single", fields={})))


def alike(ranks: list[dict[str, Any]], references: list[dict[str, Any]]) -> None:
    """Have all ranks the curve and the weights of one process, and its running statistics?"""
    (reference,) = references
    for rank in ranks:
        assert max(apart(rank["losses"], reference["losses"])) < 1e-10
        assert max(apart(rank["norms"], reference["norms"])) < 1e-10
        for name, weights in rank["weights"].items():
            assert _furthest(weights, reference["weights"][name]) < 1e-10, name


@pytest.mark.parametrize("where", quickly(SPREAD, "tp on 2"))
def test_what_draws_goes_on_elsewhere_as_if_it_had_never_stopped(train: Any, where: str, tmp_path: Path) -> None:
    size, case = SPREAD[where]
    case = case.but(network="drawing", precision="fp64", average=None, steps=6)
    train(size, case.but(folder=str(tmp_path), save=3, steps=3))
    (reference,) = train(1, case.but(strategy="single", fields={}))
    (rank,) = train(1, case.but(strategy="single", fields={}, folder=str(tmp_path), start=3, micro_batches=3))
    assert max(apart(rank["losses"], reference["losses"][3:])) < 1e-10


@pytest.mark.long
def test_native_dropout_differs_over_data_ranks(train: Any) -> None:
    case = Case(network="dropout", precision="fp64", dropout="native")
    (one,), two = train(1, case), train(2, case.but(strategy="ddp"))
    assert min(apart(two[0]["losses"], one["losses"])) > 1e-6


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
    with STRATEGIES[word](machine=Machine(launch, "cpu", seed=seed, dropout="native")) as strategy:
        stream = TrainLoader(data, data.train(), strategy.slice, BATCH, 2, LoaderOptions())
        parallel_model = strategy.build(task, built(strategy, Net), stream.example())
        task.drawn.clear()  # of a rehearsal
        for step, batches in zip(range(2), stream.epoch(0), strict=False):
            parallel_model.forward_backward(batches, step)
    return task.drawn


def test_native_random_numbers_follow_from_seed_step_micro_batch_and_data_rank(processes: Processes) -> None:
    (alone,) = processes.run(1, drawn, "single", 3)
    (other,), two = processes.run(1, drawn, "single", 4), processes.run(2, drawn, "ddp", 3)
    assert len({*alone, *other, *two[1]}) == 12
    assert two[0] == alone
    assert processes.run(2, drawn, "ddp", 3) == two


def _furthest(one: Any, other: Any) -> float:
    if isinstance(one, list):
        return max((_furthest(a, b) for a, b in zip(one, other, strict=True)), default=0.0)
    return abs(one - other)


# where matrices are whole, gathered, of one stage: name → (processes, the case)
MATRICES = {
    "ddp on 2": (2, Case("ddp")),
    "zero1 on 2": (2, Case("zero1")),
    "fsdp on 1": (1, Case("fsdp")),
    "fsdp on 2": (2, Case("fsdp")),
    "fsdp on 3": (3, Case("fsdp")),  # 4 rows and 24 over 3 ranks
    "fsdp, offloaded, on 2": (2, Case("fsdp", {"cpu_offload": True})),
    "hsdp on 4": (4, Case("fsdp", {"replicate": 2})),
    "tp on 2": (2, Case("tp")),
    "ddp_tp on 4": (4, Case("ddp_tp", {"tensor": 2})),
    "fsdp_tp on 4": (4, Case("fsdp", {"tensor": 2})),
    "pp on 2": (2, Case("pp")),
    "ddp_pp on 4": (4, Case("pp", {"pipe": 2, "replicate": 2})),
    "fsdp_pp on 4": (4, Case("pp", {"pipe": 2, "shard": 2})),
    "cp on 2": (2, Case("cp", network="gpt", task="next")),
    "fsdp_cp on 4": (4, Case("fsdp", {"context": 2}, network="gpt tied", task="next")),
    "gpt, fsdp_tp on 4": (4, Case("fsdp", {"tensor": 2}, network="gpt", task="next")),
}
# of experts ranks hold whole matrices, which they step; or parts of them, which travel
MATRICES |= {
    f"experts, {where}": (size, case.but(network="experts biased", task="next"))
    for where, (size, case) in {
        "ddp on 2": (2, Case("ddp")),
        "fsdp on 2": (2, Case("fsdp")),
        "fsdp on 3": (3, Case("fsdp")),  # 4 experts over 3 ranks: each has columns of all of them
        "hsdp on 4": (4, Case("fsdp", {"replicate": 2})),
        "tp on 2": (2, Case("tp")),
        "fsdp_tp on 4": (4, Case("fsdp", {"tensor": 2})),
        "ddp_pp on 4": (4, Case("pp", {"pipe": 2, "replicate": 2})),
        "expert on 2": (2, Case("fsdp", {"expert": 2})),
        "copies, expert on 4": (4, Case("mesh", {"replicate": 2, "shard": 2, "expert": 2})),
        "tensor and expert on 4": (4, Case("fsdp", {"tensor": 2, "expert": 2})),
    }.items()
}


@pytest.mark.parametrize("where", quickly(MATRICES, "fsdp on 3"))
def test_whole_matrices_have_one_curve_and_resume_to_the_bit(train: Any, where: str, tmp_path: Path) -> None:
    size, case = MATRICES[where]
    case = case.but(optimizer="muon", precision="fp64", steps=8)
    alone = case.but(strategy="single", fields={})
    (reference,), ranks = train(1, alone), train(size, case)
    for rank in ranks:
        assert max(apart(rank["losses"], reference["losses"])) < 1e-10
        assert max(apart(rank["norms"], reference["norms"])) < 1e-10
        for name, weights in rank["weights"].items():
            assert _furthest(weights, reference["weights"][name]) < 1e-10, name
    assert {name for rank in ranks for name in rank["state"]} == set(reference["state"])
    # stopped and resumed, to the bit; then one process goes on from its checkpoint, and it from that one's
    folder = str(tmp_path)
    train(size, case.but(folder=folder, save=3, steps=3))
    for rank, unbroken in zip(train(size, case.but(folder=folder, start=3, save=5, steps=5)), ranks, strict=True):
        assert rank["losses"] == unbroken["losses"][3:5]
    (other,) = train(1, alone.but(folder=folder, start=5, save=7, steps=7))
    (last, *_) = train(size, case.but(folder=folder, start=7))
    assert max(apart(other["losses"] + last["losses"], reference["losses"][5:])) < 1e-10
