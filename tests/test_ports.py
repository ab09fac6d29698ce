"""Who listens where while a run goes on; and several runs that begin at the same moment."""

from __future__ import annotations

import os
import re
import signal
import time
from collections.abc import Iterable
from concurrent.futures import ThreadPoolExecutor
from datetime import timedelta
from ipaddress import IPv4Address, IPv6Address, ip_address
from pathlib import Path
from unittest.mock import patch

import pytest

from tests.commands import PATIENCE, SMALL, Command, curve, files_below, lines, single, status, torchrun
from trainer.launch import rendezvous
from trainer.messages import Refusal

WORDS = (*SMALL, "strategy=ddp", "device=cpu", "loop.global_batch=120", "loop.eval_every=null")


def listening(processes: Iterable[int]) -> set[tuple[IPv4Address | IPv6Address, int]]:
    """Addresses and ports at which these processes listen, as the kernel's tables say."""
    found = {}
    for name in ("tcp", "tcp6"):
        for line in Path("/proc/net", name).read_text().splitlines()[1:]:
            _, local, _, state, *_, inode = line.split()[:10]
            if state == "0A":
                address, port = local.split(":")
                # words of four bytes, each in this machine's order
                data = b"".join(bytes.fromhex(address[at : at + 8])[::-1] for at in range(0, len(address), 8))
                found[f"socket:[{inode}]"] = ip_address(data), int(port, 16)
    files = [file for pid in processes for file in Path(f"/proc/{pid}/fd").iterdir()]
    return {found[name] for file in files if file.is_symlink() and (name := os.readlink(file)) in found}


@pytest.mark.long
@pytest.mark.slow
@pytest.mark.skipif(not Path("/proc/net/tcp").exists(), reason="needs Linux' tables of sockets")
def test_what_processes_n_starts_listens_on_this_machine_alone(tmp_path: Path) -> None:
    folder = tmp_path / "run"
    words = [*WORDS, "processes=2", "loop.steps=1000000", "log=[tensorboard]", f"run.dir={folder}"]
    command = Command(single(*words), tmp_path)
    command.wait_for_step(folder, 3)
    places = listening(command.members())
    with ThreadPoolExecutor() as pool, patch.object(rendezvous, "ANSWER_TIMEOUT", timedelta(seconds=2)):
        served = [place for place, answers in zip(places, pool.map(is_store, places), strict=True) if answers]
    os.kill(command.pid, signal.SIGTERM)
    assert command.end().code == 75
    assert len(places) >= 2  # gloo, of each rank
    assert [str(address) for address, _ in places if not address.is_loopback] == []
    assert served == []  # what the ranks agree on is in a file that is nobody else's


def is_store(place: tuple[IPv4Address | IPv6Address, int]) -> bool:
    """Does a store of torch answer there, as it does to anybody?"""
    try:
        rendezvous.connect_tcp_store(str(place[0]), place[1], 2, timedelta(seconds=2)).check(["anything"])
    except Refusal:
        return False
    return True


@pytest.mark.skipif(not Path("/proc/self/environ").exists(), reason="needs Linux' table of processes")
def test_the_store_of_processes_n_is_a_file_of_this_user_alone_and_goes_with_the_run(tmp_path: Path) -> None:
    folder = tmp_path / "run"
    command = Command(single(*WORDS, "processes=2", "loop.steps=1000000", f"run.dir={folder}"), tmp_path)
    command.wait_for_step(folder, 1)
    (stored,) = command.temporary.glob("trainer-*/attempt_0/store")
    private = next(parent for parent in stored.parents if parent.name.startswith("trainer-"))
    assert stored.stat().st_size > 0
    assert (private.stat().st_mode & 0o777, private.stat().st_uid) == (0o700, os.getuid())
    os.kill(command.pid, signal.SIGTERM)
    assert command.end().code == 75
    assert not private.exists()


@pytest.mark.long
@pytest.mark.slow
def test_runs_that_begin_at_the_same_moment_do_not_meet(tmp_path: Path) -> None:
    words = [*WORDS, "loop.steps=40", "loop.save_every=10"]
    launchers = [torchrun, torchrun, torchrun, lambda count, *more: single(f"processes={count}", *more)]
    commands = [
        Command(launcher(2, *words, f"run.dir={tmp_path / str(number)}"), tmp_path)
        for number, launcher in enumerate(launchers)
    ]
    ended = [command.end() for command in commands]
    assert [(one.code, one.left) for one in ended] == [(0, [])] * 4, [one.screen for one in ended]
    curves = [curve(tmp_path / str(number), "loss_hex") for number in range(4)]
    assert curves == [curves[0]] * 4
    assert len(curves[0]) == 40


@pytest.mark.long
@pytest.mark.slow
def test_of_runs_that_begin_at_the_same_moment_in_one_folder_one_trains(tmp_path: Path) -> None:
    words = [*WORDS, "loop.steps=1000000", "run.dir=run"]
    commands = [Command(single(*words), tmp_path) for _ in range(4)]
    until = time.monotonic() + PATIENCE
    while len(under_way := [one for one in commands if one.process.poll() is None]) > 1:
        assert time.monotonic() < until
        time.sleep(0.05)
    (winner,) = under_way
    for other in commands:
        if other is not winner:
            ended = other.end()
            assert (ended.code, ended.left) == (2, []), ended.screen
            assert re.search(rf"run is in use by another run \(host .*, pid {winner.pid}\)", ended.screen), ended.screen
    winner.wait_for_step(tmp_path / "run", 3)
    os.kill(winner.pid, signal.SIGTERM)
    assert winner.end().code == 75
    assert len(curve(tmp_path / "run")) == status(tmp_path / "run")["step"]
    assert {line["kind"] for line in lines(tmp_path / "run")} == {"train"}
    assert [path for path in files_below(tmp_path) if path.parts[0] != "run"] == []
