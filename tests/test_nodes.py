"""Two machines: network namespaces joined by a cable, a torchrun in each; one curve, whoever comes and goes."""

from __future__ import annotations

import json
import os
import shutil
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from tests.run import PATIENCE, Command, curve, far, lines, run, start, status

pytestmark = [pytest.mark.service, pytest.mark.long]

INTERFACE = "trainer0"  # at both ends of the cable, as machines of one kind have it
STEPS = 1000
WORDS = (
    *("--config-dir", "lab/conf", "data=unhurried", "model=mlp", "model.width=32", "model.depth=2"),
    *("device=cpu", "precision=fp64", "loop.global_batch=120", "schedule=constant", "log=[]"),
    *("loop.log_every=1", "loop.save_every=100", "loop.eval_every=null"),
)
# Digits that take their time while a file lies in the working folder: who comes and goes must be in time for the run.
DATA = """
import time
from pathlib import Path
from recipes.vision.digits import Digits
class Unhurried(Digits):
    def augment(self, inputs, targets, random, training):
        if training and Path("slow").exists():
            time.sleep(0.2)
        return super().augment(inputs, targets, random, training)
"""
CHOICE = "defaults: [digits, _self_]\n_target_: lab.data.Unhurried\n"


@dataclass(frozen=True)
class Host:
    """A machine: how to do something on it, and how others reach it."""

    prefix: tuple[str, ...]
    address: str
    interface: str


class Hosts(list[Host]):
    """Two machines, and why they are not even two network stacks, if so."""

    missing = ""


@pytest.fixture(scope="module")
def hosts() -> Iterator[Hosts]:
    """Two network namespaces; where those are not permitted, this machine twice."""
    names, found = [f"trainer-{os.getpid()}-{side}" for side in "ab"], Hosts()
    try:
        for name in names:
            ip("netns", "add", name)
        ip("link", "add", INTERFACE, "netns", names[0], "type", "veth", "peer", "name", INTERFACE, "netns", names[1])
        for number, name in enumerate(names, 1):
            ip("-n", name, "address", "add", f"10.99.0.{number}/24", "dev", INTERFACE)
            ip("-n", name, "link", "set", "lo", "up")
            ip("-n", name, "link", "set", INTERFACE, "up")
            found.append(Host(("ip", "netns", "exec", name), f"10.99.0.{number}", INTERFACE))
    except (OSError, subprocess.CalledProcessError) as error:
        found[:] = [Host((), "127.0.0.1", "lo")] * 2
        found.missing = f"{error}; {getattr(error, 'stderr', '') or ''}".strip("; \n")
    try:
        yield found
    finally:
        for name in names:
            subprocess.run(["ip", "netns", "delete", name], capture_output=True, check=False) if found[
                0
            ].prefix else None


def ip(*words: str) -> None:
    subprocess.run(["ip", *words], capture_output=True, text=True, check=True, timeout=20)


@pytest.fixture
def place(tmp_path: Path) -> Path:
    """A folder that both machines share, with a lab in it."""
    (tmp_path / "lab" / "conf" / "data").mkdir(parents=True)
    (tmp_path / "lab" / "__init__.py").touch()
    (tmp_path / "lab" / "data.py").write_text(DATA)
    (tmp_path / "lab" / "conf" / "data" / "unhurried.yaml").write_text(CHOICE)
    return tmp_path


@pytest.fixture
def on(hosts: Hosts, place: Path) -> Iterator[Callable[..., Command]]:
    """Starts torchrun on one of the machines; in the end nothing is left of any."""
    started: list[Command] = []

    def begin(number: int, flags: list[str], *words: str, environment: dict[str, str] | None = None) -> Command:
        host = hosts[number]
        launcher = [*host.prefix, sys.executable, "-m", "torch.distributed.run", "--nproc-per-node=1", *flags]
        own = [*WORDS, "strategy=ddp", f"distributed.interface={host.interface}", f"run.dir={place / 'run'}", *words]
        started.append(Command([*launcher, "-m", "trainer", *own], place, environment))
        return started[-1]

    yield begin
    for command in started:
        command.kill()


def c10d(hosts: Hosts, number: int, nodes: str, port: int, conf: str = "") -> list[str]:
    """A namespace does not know its own address by name: who keeps the store, and who is who, must be said."""
    said = f"is_host={int(number == 0)},join_timeout=120{conf}"
    return [
        *(f"--nnodes={nodes}", "--rdzv-backend=c10d", f"--rdzv-id=job-{port}", f"--rdzv-conf={said}"),
        *(f"--rdzv-endpoint={hosts[0].address}:{port}", f"--local-addr={hosts[number].address}"),
    ]


def static(hosts: Hosts, number: int, port: int) -> list[str]:
    return ["--nnodes=2", f"--node-rank={number}", f"--master-addr={hosts[0].address}", f"--master-port={port}"]


def free_port() -> int:
    with socket.socket() as one:
        one.bind(("", 0))
        return int(one.getsockname()[1])


def done(*commands: Command) -> None:
    for command in commands:
        ended = command.end()
        assert (ended.code, ended.left) == (0, []), ended.out[-6000:]


def wait_for(folder: Path, command: Command, **wanted: object) -> dict[str, Any]:
    """Until status.json says this, and a step was done since the run went on."""
    until = time.monotonic() + PATIENCE
    said: dict[str, Any] = {}
    while not (said and said.items() >= wanted.items() and said["step"] > said["resume_step"]):
        assert command.process.poll() is None, f"ended before {wanted}: {said}\n{command.screen[-6000:]}"
        assert time.monotonic() < until, f"never {wanted}: {said}\n{command.screen[-6000:]}"
        time.sleep(0.05)
        said = status(folder) if (folder / "status.json").is_file() else {}
    return said


def test_machines_that_come_and_go_and_one_alone_give_one_curve(hosts, place, on):
    folder, port = place / "run", free_port()
    reference = start([*WORDS, "strategy=single", f"loop.steps={STEPS}", "run.dir=alone"], place=place)

    # two machines that find each other
    done(*[on(number, c10d(hosts, number, "2", port), "loop.steps=8") for number in range(2)])
    said = status(folder)
    assert (said["state"], said["step"], said["world_size"]) == ("completed", 8, 2)
    assert {path.name for path in (folder / "logs").iterdir()} == {"rank-0.log", "rank-1.log"}

    # one process on one machine takes it up; two machines that are told who they are, too
    shutil.copytree(folder, place / "copy")
    run([*WORDS, "strategy=single", "loop.steps=16", "run.dir=copy"], how="process", place=place)
    done(*[on(number, static(hosts, number, port + 1), "loop.steps=16") for number in range(2)])
    assert (status(place / "copy")["resume_step"], status(folder)["resume_step"]) == (8, 8)

    # one machine; a second one joins, and dies
    elastic = {"TORCH_DISABLE_SHARE_RDZV_TCP_STORE": "1"}
    conf = ",last_call_timeout=1,keep_alive_interval=1"
    (place / "slow").touch()

    def join(number: int) -> Command:
        flags = [*c10d(hosts, number, "1:2", port, conf), "--max-restarts=3"]
        return on(number, flags, f"loop.steps={STEPS}", environment=elastic)

    first = join(0)
    wait_for(folder, first, world_size=1, state="running", resume_step=16)
    second = join(1)
    grown = wait_for(folder, first, world_size=2, state="running")
    os.kill(second.pid, signal.SIGKILL)
    shrunk = wait_for(folder, first, world_size=1, state="running", attempt=grown["attempt"] + 1)
    (place / "slow").unlink()
    assert second.end().code == -signal.SIGKILL
    done(first, reference)
    assert 16 < grown["resume_step"] < shrunk["resume_step"] < STEPS
    said = status(folder)
    assert (said["state"], said["world_size"], said["goodput"]) == ("completed", 1, 1.0)

    alone, until = place / "alone", shrunk["step"]
    assert far(curve(alone)[:until], curve(folder)[:until]) < 1e-5
    assert curve(alone, "sample_digest") == curve(folder, "sample_digest")
    assert far(curve(alone)[:16], curve(place / "copy")) < 1e-5
    assert len(lines(folder, "train")) == STEPS


def test_the_doctor_names_a_link_of_limited_rate(hosts, place, on):
    """Two machines whose cable passes 100 Mbit/s, though its ends say 10 Gbit/s."""
    if hosts.missing or shutil.which("tc") is None:
        pytest.skip(f"no network namespaces, or no tc: {hosts.missing}")
    words = ("job=doctor", "job.seconds=2")

    def examine(code: int) -> dict[str, Any]:
        port = free_port()
        ended = [command.end() for command in [on(number, static(hosts, number, port), *words) for number in range(2)]]
        assert [each.code for each in ended] == [code] * 2, ended[0].screen[-6000:]
        return json.loads((place / "run" / "doctor.json").read_text())

    assert examine(0)["ok"]
    (place / "run" / "doctor.json").unlink()  # it must not need to know how it was before
    limit = ("qdisc", "add", "dev", INTERFACE, "root", "tbf", "rate", "100mbit", "burst", "64kb", "latency", "400ms")
    for host in hosts:
        subprocess.run([*host.prefix, "tc", *limit], check=True, capture_output=True, timeout=20)
    try:
        data = examine(1)
    finally:
        for host in hosts:
            subprocess.run([*host.prefix, "tc", "qdisc", "delete", "dev", INTERFACE, "root"], check=False, timeout=20)
    (error,) = [finding for finding in data["findings"] if finding["level"] == "error"]
    assert error["what"].startswith("the link between rank 0 on ")
    assert all(5e6 < link["bytes_per_s"] < 1.4e7 for link in data["links"])
