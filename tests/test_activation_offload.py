"""Offloading moves what a backward needs, and changes nothing: losses, gradients and names are those without it.

Copies are those of `LateCopies`, which a CPU can make: whoever does not wait for one reads NaN.
"""

from __future__ import annotations

import gc
from collections.abc import Sequence
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from tests.ranks import Processes
from tests.run import SMALL, TRANSFORMER, quickly, run, type_words
from tests.test_activation_checkpointing import NETWORKS, built, train
from tests.test_initial_weights import equal, saved
from trainer.parallel.activation_offload import ActivationOffload, HostCopies


class LateCopies(HostCopies):
    """A stream whose copies are made when somebody waits for one of them or of those behind it, in order."""

    def __init__(self, min_bytes: int = 0) -> None:
        self.min_bytes, self._device = min_bytes, torch.device("cpu")
        self._queue: list[tuple[Tensor, Tensor]] = []
        self._done = 0
        self.log: list[str] = []  # what was asked for, with the number of storages
        self.held = 0  # bytes that were sent and not fetched again

    def to_host(self, values: Sequence[Tensor]) -> tuple[list[Tensor], Any]:
        self.log.append(f"out {len(values)}")
        self.held += sum(value.nbytes for value in values)
        return self._later(values)

    def to_device(self, copies: Sequence[Tensor]) -> tuple[list[Tensor], Any]:
        self.log.append(f"back {len(copies)}")
        self.held -= sum(copy.nbytes for copy in copies)
        return self._later(copies)

    def wait(self, event: int) -> None:
        for goal, start in self._queue[self._done : event]:
            goal.data.copy_(start)  # as a device does it: nothing in Python counts it as a write
        self._done = max(self._done, event)

    def _later(self, starts: Sequence[Tensor]) -> tuple[list[Tensor], int]:
        goals = [torch.full_like(start, float("nan") if start.is_floating_point() else -1) for start in starts]
        self._queue += zip(goals, starts, strict=True)
        return goals, len(self._queue)


CASES = [(name, mode) for name in NETWORKS for mode in ("none", "units", "operators")]
QUICK = [("convolutions", "units"), ("spectral", "none"), ("attention", "operators")]


@pytest.mark.parametrize(("name", "mode"), quickly(CASES, *QUICK))
def test_losses_weights_buffers_and_names_are_the_same_bits(name: str, mode: str) -> None:
    plain, network, copies = built(name, mode), built(name, mode), LateCopies()
    ActivationOffload(copies).apply(network, NETWORKS[name][1])
    assert [name for name, _ in network.named_modules()] == [name for name, _ in plain.named_modules()]
    assert [type(one).__qualname__ for one in network.modules()] == [type(one).__qualname__ for one in plain.modules()]
    losses, state = train(plain)
    again, same = train(network)
    assert again == losses
    assert equal(same, state)
    sent, fetched = (sum(int(one.split()[1]) for one in copies.log if one.startswith(way)) for way in ("out", "back"))
    assert sent
    gc.collect()
    assert (sent, copies.held) == (fetched, 0)  # nothing is left behind


@pytest.mark.parametrize("last", [False, True])
def test_what_is_overwritten_before_it_could_be_sent_is_an_error_as_it_is_in_torch(last: bool) -> None:
    network = nn.Sequential(*(nn.Sequential(nn.Linear(32, 32), nn.ReLU()) for _ in range(2)))
    ActivationOffload(LateCopies()).apply(network, ["0", "1"])
    hidden = network[0](torch.ones(64, 32, requires_grad=True))
    with torch.no_grad():
        hidden.mul_(2)
    with pytest.raises(RuntimeError, match="changed in place after it was kept"):
        (hidden if last else network[1](hidden)).sum().backward()


@pytest.mark.parametrize(("least", "sent"), [(0, ["out 2"]), (64 * 32 * 4 + 1, [])])
def test_parameters_small_tensors_and_what_an_evaluation_computes_stay(least: int, sent: list[str]) -> None:
    copies = LateCopies(least)
    network = nn.Sequential(nn.Sequential(nn.Linear(32, 32), nn.Tanh()), nn.Linear(32, 32))
    ActivationOffload(copies).apply(network, ["0", "1"])
    network(torch.ones(64, 32)).sum().backward()
    assert [one for one in copies.log if one.startswith("out")] == sent  # x and what tanh gives; no weight.t()
    copies.log.clear()
    with torch.no_grad():
        network(torch.ones(64, 32))
    assert copies.log == []


def offloading(launch: Any, place: Path, words: list[str]) -> tuple[int, str, list[str]]:
    """A run on a rank whose device has a host: its exit code and screen, and what it has copied."""
    copies, context = LateCopies(), pytest.MonkeyPatch()
    with context.context() as patch:
        patch.setattr("trainer.strategies.rank_context.make_host_copies", lambda device: copies)
        code, screen = type_words(launch, place, words, {})
    gc.collect()
    return code, screen, [*copies.log, f"held {copies.held}"]


UNITS = "strategy.activation_checkpointing=units"
SPREAD: list[tuple[int, list[str]]] = [
    (2, ["strategy=ddp"]),
    (2, ["strategy=fsdp", UNITS, "strategy.cpu_offload=true"]),
    (4, ["strategy=fsdp_tp", UNITS]),
    (2, ["strategy=pp", "strategy.schedule=GPipe", "loop.micro_batches=4"]),
]


@pytest.mark.long
@pytest.mark.parametrize(("ranks", "words"), SPREAD, ids=str)
def test_under_every_strategy_the_run_has_the_same_bits(
    processes: Processes, tmp_path: Path, ranks: int, words: list[str]
) -> None:
    words = [*TRANSFORMER, "model.depth=4", "model.dropout=0.1", "loop.steps=4", "loop.log_every=1", *words]
    words += ["loop.global_batch=24", "loop.eval_every=2"]
    plain = run([*words, "run.dir=plain"], ranks, "group", place=tmp_path)
    asked = [*words, "strategy.activation_offload=true", "run.dir=offloading"]
    for code, screen, log in processes.run(ranks, offloading, tmp_path, asked):
        assert code == 0, screen
        assert log[-1] == "held 0"
        assert any("back" in line for line in log) or "strategy=pp" in words
    other = run([*asked, "loop.steps=4"], ranks, "group", place=tmp_path)  # complete
    for key in ("loss_hex", "grad_norm"):
        assert other.curve(key) == plain.curve(key)
    assert equal(saved(other.folder), saved(plain.folder))


def test_on_a_cpu_the_run_says_that_there_is_nothing_to_offload(tmp_path: Path) -> None:
    words = [*SMALL, "loop.steps=3", "loop.eval_every=null"]
    plain = run([*words, "run.dir=plain"], place=tmp_path)
    asked = run([*words, "strategy.activation_offload=true", "run.dir=offloading"], place=tmp_path)
    said = (asked.folder / "logs/rank-0.log").read_text()
    assert "nothing to offload on cpu, which has one memory" in said
    assert asked.curve("loss_hex") == plain.curve("loss_hex")


@pytest.mark.gpu
def test_on_a_gpu_bits_stay_and_memory_falls() -> None:
    device, ends = torch.device("cuda", 0), []
    for asked in (False, True):
        torch.manual_seed(0)
        layer = partial(nn.Sequential, nn.Linear(1024, 4096), nn.GELU(), nn.Linear(4096, 1024))
        network = nn.Sequential(*(layer() for _ in range(12))).to(device)
        if asked:
            ActivationOffload(HostCopies(device)).apply(network, [str(number) for number in range(12)])
        torch.cuda.reset_peak_memory_stats()
        losses = []
        for step in range(4):
            torch.manual_seed(step)
            loss = network(torch.randn(8192, 1024, device=device)).square().mean()
            loss.backward()
            losses.append(loss.item())
        # on the host: the memory of these would count in the peak of the next network
        gradients = {name: one.grad.cpu() for name, one in network.named_parameters() if one.grad is not None}
        ends.append((losses, gradients, torch.cuda.max_memory_allocated()))
    (losses, gradients, peak), (same, others, lower) = ends
    assert losses == same
    assert equal(gradients, others)
    assert lower < 0.6 * peak
