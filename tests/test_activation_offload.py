"""Offloading moves what a backward needs, and changes nothing: losses, gradients and names are those without it.

Copies are those of `LateCopies`, which a CPU can make: whoever does not wait for one reads NaN.
"""

from __future__ import annotations

import gc
import json
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any
from unittest.mock import patch

import pytest
import torch
from torch import Tensor, nn

from tests.commands import SMALL, TRANSFORMER, curve, finish, single
from tests.inside import here
from tests.late_copies import LateCopies
from tests.processes import Processes
from tests.quick import quickly
from tests.strategies.toys import Case, run
from tests.test_activation_checkpointing import NETWORKS, built
from tests.test_devices import STEPS, elsewhere, not_setting_up
from trainer import Plan
from trainer.launch.rendezvous import Launch
from trainer.parallel.activation_checkpointing import apply_activation_checkpointing
from trainer.parallel.activation_offload import ActivationOffload, HostCopies
from trainer.parallel.module_units import find_units


@pytest.fixture(autouse=True)
def everything_is_large() -> Iterator[None]:
    with patch("trainer.parallel.activation_offload.MIN_BYTES", 0):
        yield


def offloaded(
    make: Callable[[], nn.Module], mode: str = "none", names: list[str] | None = None
) -> tuple[Any, LateCopies]:
    network, copies = built(make, mode), LateCopies()
    ActivationOffload(copies).apply(network, names or find_units(network, Plan()))
    return network, copies


def train(network: nn.Module, steps: int = 3) -> tuple[list[float], dict[str, Tensor]]:
    """Losses and everything a network holds after some steps; of the two forwards in one the later comes back first."""
    optimizer, losses = torch.optim.SGD(network.parameters(), lr=0.1), []
    for step in range(steps):
        torch.manual_seed(step)
        x = torch.randn(4, 3, 6, 6, dtype=torch.float64)
        first, second = network(x).square().mean(), network(2 * x).square().mean()
        loss = first + second
        (second if step else loss).backward()
        if step:
            first.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    return losses, network.state_dict()


@pytest.mark.parametrize(
    ("name", "mode"),
    quickly(
        [(name, mode) for name in NETWORKS for mode in ("none", "units", "operators")],
        ("convolutions", "units"),
        ("spectral", "none"),
        ("attention", "operators"),
        ("transformer", "none"),
    ),
)
def test_losses_weights_and_buffers_are_the_same_bits(name: str, mode: str) -> None:
    losses, state = train(built(NETWORKS[name], mode))
    network, copies = offloaded(NETWORKS[name], mode)
    again, same = train(network)
    assert again == losses
    assert list(same) == list(state)
    assert all(torch.equal(same[key], value) for key, value in state.items())
    sent, fetched = (sum(int(one.split()[1]) for one in copies.log if one.startswith(way)) for way in ("out", "back"))
    assert sent
    gc.collect()
    assert (sent, copies.held) == (fetched, 0)  # nothing is left behind


class Step(nn.Module):
    """Keeps three tensors of 8 KB: its input, which the unit before keeps as well, and what lies between two layers."""

    def __init__(self, log: list[str], number: int) -> None:
        super().__init__()
        self.log, self.number, self.first, self.second = log, number, nn.Linear(32, 32), nn.Linear(32, 32)

    def forward(self, x: Tensor) -> Tensor:
        self.log.append(f"forward {self.number}")
        y = self.second(torch.tanh(self.first(x))).relu()
        if y.requires_grad:
            y.register_hook(lambda _: self.log.append(f"backward {self.number}"))
        return y


def steps(count: int) -> tuple[Any, LateCopies]:
    torch.manual_seed(0)
    copies = LateCopies()
    network = nn.Sequential(*(Step(copies.log, number) for number in range(count)))
    ActivationOffload(copies).apply(network, [str(number) for number in range(count)])
    return network, copies


def test_each_copy_runs_beside_the_unit_next_to_it_and_the_last_unit_stays() -> None:
    network, copies = steps(3)
    network(torch.ones(64, 32, requires_grad=True)).sum().backward()
    assert copies.log == [
        "forward 0",
        "out 3",  # while 1 computes
        "forward 1",
        "out 2",  # its input went with 0, which keeps it as what relu gave
        "forward 2",
        "backward 2",
        "back 2",  # while 2 computes
        "backward 1",
        "back 3",
        "backward 0",
    ]
    assert copies.held == 0


def test_after_a_forward_the_device_holds_what_the_last_unit_keeps() -> None:
    network, copies = steps(6)
    output = network(torch.ones(64, 32, requires_grad=True))
    assert len(network[0].offloaded_by.present) == 2  # its input was sent by the unit before
    assert copies.most == copies.held == 11 * 64 * 32 * 4  # of each other unit a tanh and a relu, and the first input
    output.sum().backward()
    assert copies.held == 0


def test_parameters_views_of_them_and_small_tensors_stay() -> None:
    for least, sent in ((0, ["out 2"]), (64 * 32 * 4, ["out 2"]), (64 * 32 * 4 + 1, [])):
        with patch("trainer.parallel.activation_offload.MIN_BYTES", least):
            copies = LateCopies()
            network = nn.Sequential(nn.Sequential(nn.Linear(32, 32), nn.Tanh()), nn.Linear(32, 32))
            ActivationOffload(copies).apply(network, ["0", "1"])
            x = torch.ones(64, 32)
            network(x).sum().backward()
        assert [one for one in copies.log if one.startswith("out")] == sent  # x and what tanh gives; no weight.t()


@pytest.mark.parametrize("last", [False, True])
def test_what_is_overwritten_before_it_could_be_sent_is_an_error_as_it_is_in_torch(last: bool) -> None:
    network, _ = steps(2)
    x = torch.ones(64, 32) * 1.0
    hidden = network[0](x.requires_grad_())
    with torch.no_grad():
        hidden.mul_(2)
    with pytest.raises(RuntimeError, match="changed in place after it was kept"):
        (hidden if last else network[1](hidden)).sum().backward()


def test_a_graph_may_be_used_twice_and_an_evaluation_keeps_nothing() -> None:
    network, copies = steps(3)
    x = torch.ones(64, 32, requires_grad=True)
    loss = network(x).sum()
    (first,) = torch.autograd.grad(loss, x, retain_graph=True)
    (again,) = torch.autograd.grad(loss, x)
    assert torch.equal(first, again)
    copies.log.clear()
    with torch.no_grad():
        network(x)
    assert copies.log == ["forward 0", "forward 1", "forward 2"]


def test_names_and_classes_stay() -> None:
    network, _ = offloaded(NETWORKS["attention"])
    plain = built(NETWORKS["attention"], "none")
    assert [name for name, _ in network.named_modules()] == [name for name, _ in plain.named_modules()]
    assert [type(one).__qualname__ for one in network.modules()] == [type(one).__qualname__ for one in plain.modules()]


def offloading(launch: Launch, case: Case) -> tuple[dict[str, Any], list[str]]:
    """A run of a toy that offloads, and what it has copied."""
    copies = LateCopies()
    with (
        patch("trainer.strategies.rank_context.make_host_copies", lambda device: copies),
        patch("trainer.parallel.activation_offload.MIN_BYTES", 0),
    ):
        seen = run(launch, case.but(fields={**case.fields, "activation_offload": True}))
    gc.collect()
    return seen, [*copies.log, f"held {copies.held}"]


UNITS = {"activation_checkpointing": "units"}
SPREAD = {
    "alone": (1, "drawing", Case(fields=UNITS)),
    "ddp": (2, "drawing", Case("ddp")),
    "zero1, recomputing": (2, "drawing", Case("zero1", {"activation_checkpointing": "operators"})),
    "fsdp": (2, "drawing", Case("fsdp")),
    "fsdp, recomputing": (2, "drawing", Case("fsdp", {**UNITS, "cpu_offload": True})),
    "tp": (2, "drawing", Case("tp")),
    "tp by sequence": (2, "gpt sequence", Case("tp", task="next")),
    "cp": (2, "gpt", Case("cp", task="next")),
    "fsdp_tp": (4, "gpt sequence", Case("fsdp", {"tensor": 2, **UNITS}, task="next")),
    "pp": (2, "drawing", Case("pp", {"schedule": "GPipe"}, micro_batches=4)),
    "pp, recomputing": (2, "drawing", Case("pp", UNITS, micro_batches=4)),
    "fsdp_pp": (4, "drawing", Case("mesh", {"pipe": 2, "shard": 2}, micro_batches=2)),
}
QUICK = ("ddp", "fsdp, recomputing", "tp by sequence", "pp, recomputing")


@pytest.mark.long
@pytest.mark.parametrize("where", quickly(SPREAD, *QUICK))
def test_under_every_strategy_the_run_has_the_same_bits(processes: Processes, where: str) -> None:
    size, network, case = SPREAD[where]
    case = case.but(network=network, steps=4)
    plain, ranks = processes.run(size, run, case), processes.run(size, offloading, case)
    for one, (other, log) in zip(plain, ranks, strict=True):
        for key in ("losses", "norms", "weights", "figures"):
            assert one[key] == other[key]
        assert log[-1] == "held 0"
    assert any("back" in line for _, log in ranks for line in log)


def test_on_a_cpu_the_run_says_that_there_is_nothing_to_offload(tmp_path: Path, monkeypatch: Any) -> None:
    monkeypatch.chdir(tmp_path)
    for name, more in (("plain", ()), ("offloading", ("strategy.activation_offload=true",))):
        assert here(*SMALL, "loop.steps=3", "loop.log_every=1", f"run.dir={name}", *more) == 0
    assert "nothing to offload on cpu, which has one memory" in (tmp_path / "offloading/logs/rank-0.log").read_text()
    assert curve(tmp_path / "offloading", "loss_hex") == curve(tmp_path / "plain", "loss_hex")


@pytest.mark.long
def test_on_a_simulated_device_no_step_waits_for_what_is_offloaded(tmp_path: Path, monkeypatch: Any) -> None:
    monkeypatch.chdir(tmp_path)
    words = (*TRANSFORMER, *STEPS, "loop.steps=3")
    (told,) = elsewhere(tmp_path, "wide", [(*words, "strategy.activation_offload=true", "run.dir=there")])
    assert told["end"] == "0"
    assert not_setting_up(told["findings"]) == []
    sent = [start for start, during in told["copies"] if start == "elsewhere" and "train_step" in during]
    assert len(sent) > 2 * 2 * 4  # of two steps and two micro-batches what the first of two blocks keeps
    assert here(*words, "run.dir=here") == 0
    assert curve(tmp_path / "there", "loss_hex") == curve(tmp_path / "here", "loss_hex")


@pytest.mark.long
def test_a_plan_knows_the_peak_and_the_memory_of_the_host(tmp_path: Path) -> None:
    words = ("job=plan", "run.dir=run", "log=[]", "device=cpu", "job.processes=[1]", "loop.global_batch=512")
    network = ("model=vit_tiny", "model.width=192", "model.heads=4", "model.depth=6", "job.seconds=200")
    rows = {}
    for device, asked in (("h100", "false"), ("h100", "true"), ("cpu", "true")):
        more = (f"job.device={device}", f"strategy.activation_offload={asked}", "job.strategies=[single]")
        screen = finish(single(*network, *words, *more), tmp_path)
        (rows[device, asked],) = json.loads((tmp_path / "run/plan/plan.json").read_text())["rows"]
        assert ("of the host's memory" in screen) == (device == "h100" and asked == "true")
    plain, offloading = rows["h100", "false"], rows["h100", "true"]
    assert plain["host"] == rows["cpu", "true"]["host"] == 0
    # what lies on the host no longer lies on the device, but for the units next to the one that computes
    assert 0.3 * offloading["host"] < plain["peak"] - offloading["peak"] <= offloading["host"]


@pytest.mark.gpu
@pytest.mark.parametrize("more", [{}, UNITS])
def test_on_a_gpu_bits_stay_and_memory_falls(more: dict[str, Any]) -> None:
    device = torch.device("cuda", 0)
    ends = []
    for asked in (False, True):
        torch.manual_seed(0)
        network = nn.Sequential(
            *(nn.Sequential(nn.Linear(1024, 4096), nn.GELU(), nn.Linear(4096, 1024)) for _ in range(12))
        )
        network.to(device)
        names = [str(number) for number in range(12)]
        apply_activation_checkpointing(network, names, "units" if more else "none")
        if asked:
            ActivationOffload(HostCopies(device)).apply(network, names)
        losses = []
        torch.cuda.reset_peak_memory_stats()
        for step in range(4):
            torch.manual_seed(step)
            loss = network(torch.randn(8192, 1024, device=device)).square().mean()
            loss.backward()
            losses.append(loss.item())
        peak = torch.cuda.max_memory_allocated()
        # on the host: the memory of these would count in the peak of the next network
        ends.append((losses, [each.grad.cpu() for each in network.parameters() if each.grad is not None], peak))
    (losses, gradients, peak), (same, others, lower) = ends
    assert losses == same
    assert all(torch.equal(one, other) for one, other in zip(gradients, others, strict=True))
    assert lower < (1 if more else 0.6) * peak  # with recomputing 0.95 on an H200: gradients are most of it here
