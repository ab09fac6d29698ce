"""A real Slurm of two nodes on this machine: munged, slurmctld and two slurmds, in a folder, on ports of their own."""

from __future__ import annotations

import os
import re
import shutil
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import TypeVar

from tests.run import ROOT

T = TypeVar("T")
PATIENCE = 240.0  # seconds for anything; nearly all takes less than 20
DAEMONS = ("munged", "slurmctld", "slurmd")
NODES = ("127.0.0.1", "127.0.0.2")  # names that need no file of hosts
GPUS = 2  # of each node, as far as Slurm knows

# Two nodes are one machine, so nothing is tracked or bound by cgroups. What is preempted has a minute.
CONF = """
ClusterName=tests
SlurmctldHost=localhost(127.0.0.1)
SlurmctldPort={ports[0]}
SlurmUser=root
SlurmdUser=root
AuthType=auth/munge
AuthInfo=socket={folder}/munge.socket,cred_expire=5
CommunicationParameters=NoInAddrAny,NoCtldInAddrAny
SlurmctldPidFile={folder}/slurmctld.pid
SlurmdPidFile={folder}/slurmd-%n.pid
SlurmctldLogFile={folder}/slurmctld.log
SlurmdLogFile={folder}/slurmd-%n.log
StateSaveLocation={folder}/state
SlurmdSpoolDir={folder}/spool-%n
SlurmdParameters=config_overrides
ProctrackType=proctrack/linuxproc
TaskPlugin=task/none
MpiDefault=none
SwitchType=switch/none
SelectType=select/cons_tres
SelectTypeParameters=CR_Core
SchedulerType=sched/builtin
SchedulerParameters=sched_interval=1,batch_sched_delay=1
JobRequeue=1
PreemptType=preempt/partition_prio
PreemptMode=REQUEUE
ReturnToService=2
KillWait=30
GresTypes=gpu
NodeName={nodes[0]} NodeHostname=localhost NodeAddr=127.0.0.1 Port={ports[1]} CPUs=8 RealMemory=16000 Gres=gpu:{gpus}
NodeName={nodes[1]} NodeHostname=localhost NodeAddr=127.0.0.1 Port={ports[2]} CPUs=8 RealMemory=16000 Gres=gpu:{gpus}
PartitionName=low Nodes=ALL Default=YES PriorityTier=1 GraceTime=60
PartitionName=high Nodes=ALL PriorityTier=10 PreemptMode=OFF
"""


def missing() -> str:
    """Why there can be no cluster here; empty: there can be one."""
    away = [name for name in (*DAEMONS, "setpriv") if shutil.which(name) is None]
    if away:
        return f"{' and '.join(away)} not installed (Debian: apt-get install slurm-wlm munge)"
    return "" if os.geteuid() == 0 else "the daemons of Slurm are started as root"


class Cluster:
    """The daemons, and what a user does with them. They end with the tests, even if those are killed."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self._daemons: list[subprocess.Popen[bytes]] = []
        for name in ("state", "devices", *(f"spool-{node}" for node in NODES)):
            (folder / name).mkdir()
        key = folder / "munge.key"
        key.write_bytes(os.urandom(128))
        key.chmod(0o400)
        words = {"folder": folder, "nodes": NODES, "ports": _free_ports(3), "gpus": GPUS}
        (folder / "slurm.conf").write_text(CONF.format(**words))
        # to Slurm a GPU is a file of a device: one that swallows everything
        for number in range(GPUS):
            os.mknod(folder / "devices" / f"nvidia{number}", 0o20666, os.makedev(1, 3))
        (folder / "gres.conf").write_text(f"Name=gpu File={folder}/devices/nvidia[0-{GPUS - 1}]\n")
        self.env = {
            **{name: value for name, value in os.environ.items() if not name.startswith("SLURM_")},
            "SLURM_CONF": str(folder / "slurm.conf"),
            "VENV": sys.prefix,
            "PATH": os.pathsep.join([str(Path(sys.executable).parent), os.environ["PATH"]]),
            "PYTHONPATH": str(ROOT),
        }
        files = {name: f"--{name}-file={folder / 'munge'}.{name}" for name in ("key", "pid", "log", "seed")}
        self._start("munged", "--force", "--foreground", f"--socket={folder / 'munge.socket'}", *files.values())
        wait_for((folder / "munge.socket").exists)
        self._start("slurmctld", "-D")
        for node in NODES:
            self._start("slurmd", "-D", "-N", node)
        wait_for(self.rests)

    def _start(self, name: str, *words: str) -> None:
        # should the tests be killed, the daemons are killed, too
        command = ["setpriv", "--pdeathsig", "KILL", name, *words]
        with (self.folder / f"{name}.screen").open("ab") as screen:
            own = subprocess.Popen(command, env=self.env, stdout=screen, stderr=screen, start_new_session=True)
        self._daemons.append(own)

    def rests(self) -> bool:
        """Are both nodes up, with nothing to do?"""
        states = self.ask("sinfo", "--noheader", "--Node", "--partition=low", "--format=%T").split()
        return states == ["idle"] * len(NODES)

    def ask(self, *command: str) -> str:
        """What a command of Slurm answers; nothing while nobody is there to answer."""
        return subprocess.run(command, env=self.env, capture_output=True, text=True, timeout=PATIENCE).stdout

    def submit(self, cwd: Path, *words: str, **env: str) -> str:
        """`sbatch …` in a folder; the number of the job."""
        ended = subprocess.run(
            ["sbatch", "--parsable", *words],
            cwd=cwd,
            env={**self.env, **env},
            capture_output=True,
            text=True,
            timeout=60,
        )
        assert ended.returncode == 0, ended.stderr
        return ended.stdout.strip()

    def job(self, number: str) -> dict[str, str]:
        """What Slurm knows of a job."""
        return dict(re.findall(r"(\w+)=(\S*)", self.ask("scontrol", "show", "job", "-o", number)))

    def ended(self, number: str) -> dict[str, str]:
        """The same of a job that is over; waits for that."""

        def over() -> dict[str, str] | None:
            job = self.job(number)
            return None if job.get("JobState") in (None, "PENDING", "RUNNING", "COMPLETING") else job

        return wait_for(over)

    def again(self, number: str, times: int = 1) -> dict[str, str]:
        """A job that Slurm is to run again, or runs again; waits for that."""

        def requeued() -> dict[str, str] | None:
            job = self.job(number)
            assert job["JobState"] not in ("FAILED", "COMPLETED", "CANCELLED"), job
            return job if int(job["Restarts"]) == times else None

        return wait_for(requeued)

    def clear(self) -> None:
        """End all jobs."""
        self.ask("scancel", "--user=root")
        wait_for(lambda: not self.ask("squeue", "--noheader") and self.rests())

    def close(self) -> None:
        """End all jobs, then the daemons."""
        with suppress(AssertionError):
            self.clear()
        for pid in _with_environment(f"SLURM_CONF={self.env['SLURM_CONF']}".encode()):
            if pid not in {daemon.pid for daemon in self._daemons}:
                _kill(pid)
        for daemon in self._daemons:
            os.killpg(daemon.pid, signal.SIGKILL)  # nothing of theirs is needed any more
            daemon.wait()


def wait_for(ready: Callable[[], T | None], seconds: float = PATIENCE) -> T:
    """Look until there is something true."""
    until = time.monotonic() + seconds
    while not (value := ready()):
        assert time.monotonic() < until, f"not in {seconds:g} s"
        time.sleep(0.2)
    return value


def _free_ports(count: int) -> list[int]:
    sockets = [socket.socket() for _ in range(count)]
    for each in sockets:
        each.bind(("127.0.0.1", 0))
    ports = [each.getsockname()[1] for each in sockets]
    for each in sockets:
        each.close()
    return ports


def _with_environment(wanted: bytes) -> list[int]:
    """Every process with this variable."""
    return [int(each.name) for each in Path("/proc").glob("[0-9]*") if wanted in _environment(each)]


def _environment(process: Path) -> list[bytes]:
    try:
        return (process / "environ").read_bytes().split(b"\0")
    except OSError:  # it has ended
        return []


def _kill(pid: int) -> None:
    if pid > 1 and pid != os.getpid():
        with suppress(ProcessLookupError):
            os.kill(pid, signal.SIGKILL)
