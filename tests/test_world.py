"""A process group: which interface it uses, and how long a collective may take."""

from __future__ import annotations

import os
from datetime import timedelta
from typing import Any

import pytest
import torch
import torch.distributed as dist

from tests.commands import SMALL
from tests.inside import here
from trainer.configuration.compose import compose
from trainer.jobs.run_parts import assemble
from trainer.launch.rendezvous import Launch
from trainer.messages import Refusal
from trainer.parallel.process_group import join_group, leave_group, set_timeouts
from trainer.parallel.ranks import Group
from trainer.records.checkpoint.manager import CheckpointManager
from trainer.strategies.ddp import DDP
from trainer.strategies.machine import Machine
from trainer.strategies.parallel_model import ParallelModel
from trainer.strategies.rank_context import WATCHDOG_MARGIN

CPU = torch.device("cpu")
LONG, SHORT = timedelta(minutes=30), timedelta(seconds=1)


@pytest.mark.parametrize(
    ("backend", "used", "bound"),
    [(None, "cpu:gloo,cuda:nccl", True), ("nccl", "cpu:gloo,cuda:nccl", True), ("gloo", "gloo", False)],
)
def test_on_a_gpu_nccl_alone_is_bound_to_the_device(monkeypatch, backend, used, bound):
    asked: dict[str, Any] = {}
    init = dist.init_process_group

    def without_nccl(backend, device_id, **words):
        asked.update(backend=backend, device=device_id)
        init(backend="gloo", **words)

    monkeypatch.setattr(dist, "init_process_group", without_nccl)
    gpu = torch.device("cuda", 0)
    leave_group(join_group(Launch(), gpu, backend, LONG), clean=True)
    assert asked == {"backend": used, "device": gpu if bound else None}  # gloo that is bound makes no sub-groups


# ------------------------------------------------------------------------------------------------------------ timeouts


def nobody_joins(launch: Launch) -> dict[str, Any]:
    """After `set_timeouts`, a collective that rank 1 never joins; before it, one that rank 1 joins late."""
    world = join_group(launch, CPU, None, LONG)
    store = launch.store()
    late: Any = dist.new_group(timeout=LONG)
    plain: Any = dist.new_group(timeout=LONG)
    under_way = torch.ones(1)
    vote, unheard = None, ""
    if launch.rank == 0:
        vote = Group(plain).vote((True,), SHORT)
        try:
            vote.read()
        except RuntimeError as caught:
            unheard = str(caught)
        work = dist.all_reduce(under_way, group=late, async_op=True)
    set_timeouts([world.group, late], SHORT)
    error = ""
    if launch.rank == 0:
        try:
            dist.all_reduce(torch.ones(1), group=world.group)
        except RuntimeError as caught:
            error = str(caught)
        store.set("given up", "yes")
    store.wait(["given up"])
    if launch.rank == 1:
        work = dist.all_reduce(under_way, group=late, async_op=True)
    work.wait()
    voted = (vote or Group(plain).vote((False,), SHORT)).read()  # those who come late still join
    dist.all_reduce(whole := torch.ones(1), group=plain)
    store.set(f"done-{launch.rank}", "yes")
    store.wait([f"done-{rank}" for rank in range(2)])
    return {
        "unheard": unheard,
        "voted": voted,
        "error": error,
        "under way": under_way.item(),
        "other group": whole.item(),
    }


def test_a_collective_that_nobody_joins_fails_after_the_short_time(processes):
    first, second = processes.run(2, nobody_joins)
    assert "1000ms" in first["error"]
    assert second["error"] == ""
    assert "timed out" in first["unheard"]  # its group would have waited for 30 minutes, as NCCL does
    assert first["voted"] == second["voted"] == [True]
    assert first["under way"] == second["under way"] == 2  # it was given 30 minutes, and still has them
    assert first["other group"] == second["other group"] == 2


def given(group: Any) -> timedelta:
    return group._get_backend(CPU).options._timeout


def times_of_groups(launch: Launch, *words: str) -> tuple[set[timedelta], set[timedelta], int]:
    words = (*words, "device=cpu", "distributed.timeout=7min", "distributed.step_timeout=40s")
    with assemble(compose(words), words, [], launch).strategy as strategy:
        groups = strategy.groups()
        first = {given(group) for group in groups}
        strategy.use_step_timeout()
        return first, {given(group) for group in groups}, len(groups)


@pytest.mark.parametrize(
    ("size", "words", "groups"),
    [
        (4, ("strategy=hsdp", "strategy.replicate=2"), 4),  # all, the data ranks, two axes
        (2, ("strategy=zero1",), 2),  # all, and all again for what owners send
    ],
)
def test_the_times_reach_every_group(processes, size, words, groups):
    # torch is later than the watchdog, which can say who hangs
    wanted = ({timedelta(minutes=7) + WATCHDOG_MARGIN}, {timedelta(seconds=40) + WATCHDOG_MARGIN}, groups)
    assert processes.run(size, times_of_groups, *words) == [wanted] * size


def test_an_evaluation_and_a_save_have_the_time_of_the_first_step(tmp_path, monkeypatch):
    seen: dict[str, list[timedelta]] = {"forward_backward": [], "evaluate": [], "save": []}

    def note(owner: Any, name: str) -> None:
        before = getattr(owner, name)

        def noting(*args: Any, **words: Any) -> Any:
            seen[name].append(given(dist.group.WORLD))
            return before(*args, **words)

        monkeypatch.setattr(owner, name, noting)

    note(ParallelModel, "forward_backward")
    note(ParallelModel, "evaluate")
    note(CheckpointManager, "save")
    words = ("strategy=ddp", f"run.dir={tmp_path}", "loop.steps=5", "loop.eval_every=3")
    assert here(*SMALL, *words, "distributed.timeout=7min", "distributed.step_timeout=40s") == 0
    long, short = timedelta(minutes=7) + WATCHDOG_MARGIN, timedelta(seconds=40) + WATCHDOG_MARGIN
    assert seen["forward_backward"] == [long, short, short, long, short]
    assert set(seen["evaluate"]) == set(seen["save"]) == {long}


def test_the_time_of_a_step_is_never_longer_than_the_first():
    def times(*words: str) -> tuple[timedelta, timedelta]:
        machine = assemble(compose(words), words, [], Launch()).machine
        return machine.timeout, machine.step_timeout

    assert times() == (LONG, timedelta(minutes=10))
    assert times("distributed.timeout=1min") == (timedelta(minutes=1), timedelta(minutes=1))
    assert times("distributed.step_timeout=20s") == (LONG, timedelta(seconds=20))


# ---------------------------------------------------------------------------------------------------------- interfaces


def test_an_interface_that_is_not_there_is_refused_with_those_that_are():
    with pytest.raises(Refusal, match=r"distributed\.interface=eth77: .* has no such network interface; it has .*lo\b"):
        Machine(interface="eth77").check()


def test_the_interface_is_left_where_gloo_and_nccl_look(monkeypatch):
    names = ("GLOO_SOCKET_IFNAME", "NCCL_SOCKET_IFNAME")
    for name in names:
        monkeypatch.setenv(name, "as it was")
    Machine(device="cpu").claim_device()
    assert [os.environ[name] for name in names] == ["as it was"] * 2
    machine = Machine(device="cpu", interface="lo")
    machine.check()
    machine.claim_device()
    assert [os.environ[name] for name in names] == ["lo", "=lo"]
    world = join_group(Launch(), CPU, None, LONG)
    world.barrier()
    leave_group(world, clean=True)


def test_after_an_error_a_group_of_one_leaves_room_for_the_next():
    for _ in range(2):  # a notebook's cell that is run again
        with pytest.raises(KeyError), DDP(machine=Machine(device="cpu")):
            raise KeyError
    assert not dist.is_initialized()
