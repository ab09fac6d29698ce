"""`loop.uneven`: where the ranks do not divide the global batch the gradient is still that of one process."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from tests.processes import Processes
from tests.quick import quickly
from tests.strategies.toys import Case, run
from trainer.launch.rendezvous import Launch
from trainer.parallel.batch_gather import gather, set_gather_ranks, set_gather_span
from trainer.strategies.ddp import DDP
from trainer.strategies.machine import Machine

BATCH = 50  # over 3 ranks 17, 17 and 16 samples; over 4 ranks 13, 13, 12 and 12

# name → (processes, samples of the global batch, the case)
SPREAD = {
    "ddp on 2": (2, 49, Case("ddp")),
    "ddp on 3": (3, BATCH, Case("ddp")),
    "ddp on 4": (4, BATCH, Case("ddp")),
    "ddp_tp on 4": (4, 49, Case("ddp_tp", {"tensor": 2})),
    "ddp_tp on 3, nothing cut": (3, BATCH, Case("ddp_tp", {"tensor": 1})),
    "tp on 2": (2, 49, Case("tp")),  # one data rank: only its micro-batches differ
    "fsdp on 3": (3, BATCH, Case("fsdp")),
    "hsdp on 4": (4, BATCH, Case("fsdp", {"replicate": 2})),
    "fsdp_tp on 4": (4, 49, Case("fsdp", {"tensor": 2})),
    "zero1 on 3": (3, BATCH, Case("zero1")),
}
# those with data ranks of which each holds the whole network, or parts of it, in a way of its own
GATHERING = ["ddp on 2", "ddp on 3", "ddp on 4", "ddp_tp on 4", "fsdp on 3", "zero1 on 3"]
NORMALISING = ["ddp on 2", "ddp on 3", "ddp on 4", "fsdp on 3", "zero1 on 3"]
STEPS = 10  # two epochs and a half
once_each = pytest.mark.parametrize("where", quickly(SPREAD, "ddp on 3", "tp on 2", "fsdp on 3", "zero1 on 3"))
_done: dict[str, list[dict[str, Any]]] = {}


@pytest.fixture
def train(processes: Processes) -> Any:
    """Run a case on so many ranks; one that ran before is remembered, unless it touches files."""

    def remembered(size: int, batch: int, case: Case) -> list[dict[str, Any]]:
        key = f"{size} {batch} {case}"
        if key not in _done or case.folder:
            _done[key] = processes.run(size, run, case.but(batch=batch))
        return _done[key]

    return remembered


def alone(case: Case, **changes: Any) -> Case:
    return case.but(strategy="single", fields={}, **changes)


def furthest(one: Any, other: Any) -> float:
    if isinstance(one, dict):
        assert one.keys() == other.keys()
        return max(furthest(one[name], other[name]) for name in one)
    if isinstance(one, list):
        return max((furthest(a, b) for a, b in zip(one, other, strict=True)), default=0.0)
    return abs(one - other)


def same(rank: dict[str, Any], reference: dict[str, Any]) -> None:
    assert rank["digests"] == reference["digests"]
    for figures in ("losses", "norms", "weights", "parts"):
        assert furthest(rank[figures], reference[figures]) < 1e-10, figures
    assert rank["figures"] == pytest.approx(reference["figures"], abs=1e-9)


@once_each
@pytest.mark.parametrize(("micro_batches", "task"), quickly([(1, "weighted"), (4, "plain")], (4, "plain")))
def test_the_curve_is_that_of_one_process(train: Any, where: str, task: str, micro_batches: int) -> None:
    size, batch, case = SPREAD[where]
    case = case.but(precision="fp64", task=task, steps=STEPS)
    (reference,) = train(1, batch, alone(case))  # all of the global batch at once
    for rank in train(size, batch, case.but(micro_batches=micro_batches)):
        same(rank, reference)


@pytest.mark.parametrize("where", GATHERING)
@pytest.mark.parametrize("micro_batches", [4])
@pytest.mark.long
def test_gathered_rows_are_those_of_one_process(train: Any, where: str, micro_batches: int) -> None:
    size, batch, case = SPREAD[where]
    case = case.but(precision="fp64", task="contrast", micro_batches=micro_batches, steps=STEPS)
    (reference,) = train(1, batch, alone(case))  # the loss depends on what a micro-batch holds: as many of them here
    for rank in train(size, batch, case):
        same(rank, reference)


@pytest.mark.parametrize("where", NORMALISING)
@pytest.mark.parametrize("micro_batches", [4])
@pytest.mark.long
def test_synchronised_batch_norm_is_that_of_one_process(train: Any, where: str, micro_batches: int) -> None:
    size, batch, case = SPREAD[where]
    # plain SGD: Adam would amplify a bias without gradient
    case = case.but(network="batch_norm", precision="fp64", optimizer="sgd", micro_batches=micro_batches, steps=STEPS)
    (reference,) = train(1, batch, alone(case))
    for rank in train(size, batch, case.but(fields={"sync_bn": True})):
        same(rank, reference)


def test_a_share_of_one_sample_is_enough(train: Any) -> None:
    case = Case(precision="fp64", steps=6, micro_batches=1)
    for task in ("plain", "weighted", "contrast"):
        (reference,) = train(1, 5, case.but(task=task))
        for rank in train(4, 5, case.but(strategy="ddp", task=task)):  # 2, 1, 1 and 1 samples
            same(rank, reference)


@pytest.mark.long
@pytest.mark.parametrize(("before", "after"), [(3, 2), (2, 3), (3, 4), (4, 1)])
def test_another_number_of_processes_goes_on(train: Any, before: int, after: int, tmp_path: Path) -> None:
    case = Case("ddp", precision="fp64", steps=STEPS)
    (reference,) = train(1, BATCH, alone(case))
    train(before, BATCH, case.but(folder=str(tmp_path), save=6, steps=6))  # in the middle of the second epoch
    for rank in train(after, BATCH, case.but(folder=str(tmp_path), start=6)):
        assert furthest(rank["losses"], reference["losses"][6:]) < 1e-10
        assert furthest(rank["weights"], reference["weights"]) < 1e-10
        assert rank["digests"] == reference["digests"][6:]


@pytest.mark.parametrize("part", [range(10), range(4, 11), range(5, 8), range(7, 12)])
def test_rows_are_gathered_in_the_samples_own_order(processes: Processes, part: range) -> None:
    for rows, gradient in processes.run(3, gather_part, part):
        assert rows == [float(at) for at in part]
        assert gradient == [3.0 * weight for weight in gradient_of(part)]  # of three ranks, each with the same loss


def gradient_of(part: range) -> list[float]:
    return [float(at * at) for at in part]


def gather_part(launch: Launch, part: range) -> tuple[list[float], list[float]]:
    with DDP(machine=Machine(launch=launch, device="cpu")) as strategy:
        own = torch.tensor([[float(at)] for at in part if at % 3 == launch.rank], requires_grad=True)
        with set_gather_ranks(strategy.data_group), set_gather_span(part):
            rows = gather(own)
        (rows.squeeze(1) * torch.tensor(gradient_of(part))).sum().backward()
        with set_gather_ranks(strategy.data_group), set_gather_span(part):
            return rows.squeeze(1).tolist(), gather(_gradient(own)).squeeze(1).tolist()


def _gradient(x: Tensor) -> Tensor:
    assert x.grad is not None
    return x.grad


def test_rows_that_are_not_one_a_sample_are_refused(processes: Processes) -> None:
    for said in processes.run(3, gather_twice_as_many):
        assert "must have one" in said


def gather_twice_as_many(launch: Launch) -> str:
    with (
        DDP(machine=Machine(launch=launch, device="cpu")) as strategy,
        set_gather_ranks(strategy.data_group),
        set_gather_span(range(10)),
        pytest.raises(ValueError, match="gather of 20 rows") as refused,
    ):
        gather(torch.zeros(20, 2))
    return str(refused.value)
