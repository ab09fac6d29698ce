"""Who listens where while a run goes on; and several runs that begin at the same moment."""

from __future__ import annotations

import os
import signal
from collections.abc import Iterable
from ipaddress import IPv4Address, IPv6Address, ip_address
from pathlib import Path

import pytest

from tests.run import SMALL, curve, start

WORDS = (*SMALL, "strategy=ddp", "device=cpu", "loop.global_batch=120", "loop.eval_every=null", "run.dir=run")


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


@pytest.mark.skipif(not Path("/proc/net/tcp").exists(), reason="needs Linux' tables of sockets and processes")
def test_what_processes_n_starts_is_for_this_user_on_this_machine_alone(tmp_path: Path) -> None:
    command = start([*WORDS, "loop.steps=1000000", "log=[tensorboard]"], 2, place=tmp_path)
    command.wait_for_step(tmp_path / "run", 3)
    places = listening(command.members())
    (stored,) = command.temporary.glob("trainer-*/attempt_0/store")
    private = next(parent for parent in stored.parents if parent.name.startswith("trainer-"))
    # what the ranks agree on is in a file that is nobody else's
    assert stored.stat().st_size > 0
    assert (private.stat().st_mode & 0o777, private.stat().st_uid) == (0o700, os.getuid())
    assert len(places) >= 2  # gloo, of each rank
    assert [str(address) for address, _ in places if not address.is_loopback] == []
    os.kill(command.pid, signal.SIGTERM)
    assert command.end().code == 75
    assert not private.exists()


@pytest.mark.long
def test_runs_that_begin_at_the_same_moment_do_not_meet(tmp_path: Path) -> None:
    places = [tmp_path / str(number) for number in range(4)]
    words = [*WORDS, "loop.steps=40", "loop.save_every=10"]
    ways = ("torchrun", "torchrun", "torchrun", "process")
    commands = [start(words, 2, how, place=place) for how, place in zip(ways, places, strict=True)]  # type: ignore[arg-type]
    ended = [command.end() for command in commands]
    assert [(one.code, one.left) for one in ended] == [(0, [])] * 4, [one.out for one in ended]
    curves = [curve(place / "run", "loss_hex") for place in places]
    assert curves == [curves[0]] * 4
    assert len(curves[0]) == 40
