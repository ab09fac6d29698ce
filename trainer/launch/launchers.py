"""What each launcher leaves in the environment: torchrun, Open MPI, Slurm's srun, MPICH and Intel MPI.

The launcher that stands nearest to the process is asked first: a torchrun that srun started leaves both kinds of
variables, and so does a mpirun inside an allocation of Slurm.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import NamedTuple

from trainer.refusal import Refusal

_TASKS = "SLURM_STEP_NUM_TASKS"
_COUNTS = re.compile(r"(^|_)(RANK|WORLD_SIZE|LOCAL_SIZE|PROCID|LOCALID|STEP_NUM_TASKS|LOCALRANKID|PMI_SIZE)$")
_SPECIAL_STEPS = 0xFFFFFFF0  # of Slurm: the batch script, the shell of salloc


class ProcessPlace(NamedTuple):
    """Which process this is, of how many, and where they meet."""

    rank: int = 0
    world_size: int = 1
    local_rank: int = 0
    local_world_size: int = 1
    attempt: int = 0
    run_id: str = ""
    address: str = ""
    hosted: bool = False


def place(env: Mapping[str, str]) -> ProcessPlace:
    """This process's place in its launch; a process that was started alone has the only one.

    Refusal where the environment is incomplete or makes no sense.
    """
    for variable, read in _READERS.items():
        if variable in env and (found := read(env)) is not None:
            return _sound(found, env)
    return ProcessPlace()


def _torchrun(env: Mapping[str, str]) -> ProcessPlace:
    """torchrun, and whatever else speaks its variables (PyTorchJob, a shell script)."""
    missing = [key for key in ("RANK", "WORLD_SIZE") if not env.get(key)]
    if missing:
        raise Refusal(f"the launcher's environment is incomplete: {', '.join(missing)} missing; start with torchrun")
    rank, world_size = _whole(env, "RANK"), _whole(env, "WORLD_SIZE")
    return ProcessPlace(
        rank=rank,
        world_size=world_size,
        local_rank=_whole(env, "LOCAL_RANK", rank),
        local_world_size=_whole(env, "LOCAL_WORLD_SIZE", world_size),
        attempt=_whole(env, "TORCHELASTIC_RESTART_COUNT", 0),
        run_id=env.get("TORCHELASTIC_RUN_ID", ""),
        address=_address(env),
        hosted=env.get("TORCHELASTIC_USE_AGENT_STORE") == "True",
    )


def _open_mpi(env: Mapping[str, str]) -> ProcessPlace:
    return _numbered(env, *(f"OMPI_COMM_WORLD_{name}" for name in ("RANK", "SIZE", "LOCAL_RANK", "LOCAL_SIZE")))


def _mpich(env: Mapping[str, str]) -> ProcessPlace | None:
    """MPICH and Intel MPI. `srun --mpi=pmi2` sets these, too, and Slurm's own variables then say more."""
    if all(env.get(f"PMI_{one}") == env.get(other) for one, other in (("RANK", "SLURM_PROCID"), ("SIZE", _TASKS))):
        return None
    return _numbered(env, "PMI_RANK", "PMI_SIZE", "MPI_LOCALRANKID", "MPI_LOCALNRANKS")


def _numbered(env: Mapping[str, str], rank: str, size: str, local_rank: str, local_size: str) -> ProcessPlace:
    """What variables of these names say; where there are no local ones, all processes are on one machine."""
    number, count = _whole(env, rank), _whole(env, size)
    return ProcessPlace(
        rank=number,
        world_size=count,
        local_rank=_whole(env, local_rank, number),
        local_world_size=_whole(env, local_size, count),
        address=_address(env),
    )


def _slurm(env: Mapping[str, str]) -> ProcessPlace | None:
    """A task of srun. Only srun numbers its steps from 0: a batch script merely has the numbers of its allocation.

    Nor is the shell of `srun --pty` or salloc one task of several. A job that was requeued runs its command again.
    """
    step = env.get("SLURM_STEP_ID", "")
    if "SLURM_PROCID" not in env or "SLURM_PTY_PORT" in env or not step.isdecimal() or int(step) >= _SPECIAL_STEPS:
        return None
    attempt = _whole(env, "SLURM_RESTART_COUNT", 0)
    world_size = _whole(env, _TASKS if _TASKS in env else "SLURM_NTASKS", 1)
    if world_size == 1:
        return ProcessPlace(attempt=attempt)
    node, rank = _whole(env, "SLURM_NODEID", 0), _whole(env, "SLURM_PROCID")
    counts = tasks_per_node(env.get("SLURM_STEP_TASKS_PER_NODE") or env.get("SLURM_TASKS_PER_NODE") or str(world_size))
    return ProcessPlace(
        rank=rank,
        world_size=world_size,
        local_rank=_whole(env, "SLURM_LOCALID", rank),
        local_world_size=counts[min(node, len(counts) - 1)],
        attempt=attempt,
        address=_slurm_address(env),
    )


_READERS = {  # the variable that tells a launcher → its reader; nearest launcher first
    "RANK": _torchrun,
    "WORLD_SIZE": _torchrun,
    "OMPI_COMM_WORLD_SIZE": _open_mpi,
    "PMI_SIZE": _mpich,
    "SLURM_STEP_ID": _slurm,
}


def first_host(hosts: str) -> str:
    """The first host of a list as Slurm writes it: `node[01-04,7],login` begins with node01."""
    first = re.match(r"(?:\[[^\]]*\]|[^,\[\]])+", hosts.strip())
    return re.sub(r"\[([^\],-]+)[^\]]*\]", r"\1", first[0]) if first else ""


def tasks_per_node(counts: str) -> list[int]:
    """Slurm's `2(x3),1` spelt out: 2, 2, 2, 1. Refusal where it is nothing of the kind."""
    spelt: list[int] = []
    for machines in counts.split(","):
        match = re.fullmatch(r"\s*(\d+)(?:\(x(\d+)\))?\s*", machines)
        if match is None:
            raise Refusal(f"SLURM_STEP_TASKS_PER_NODE={counts}: expected counts such as 4(x2),1")
        spelt += [int(match[1])] * int(match[2] or 1)
    return spelt


def _slurm_address(env: Mapping[str, str]) -> str:
    """Where rank 0 serves the store: its host is the step's first, its port follows from the numbers of job and step.

    Ports from 20000 to 29999 lie below those that Linux hands out by itself (32768 to 60999).
    """
    if env.get("MASTER_ADDR") and env.get("MASTER_PORT"):
        return _address(env)
    hosts = env.get("SLURM_STEP_NODELIST") or env.get("SLURM_JOB_NODELIST") or env.get("SLURM_NODELIST") or ""
    alone = (env.get("SLURM_STEP_NUM_NODES") or env.get("SLURM_NNODES")) == "1"
    host = env.get("MASTER_ADDR") or ("127.0.0.1" if alone else first_host(hosts))
    if not host:
        raise Refusal(
            "Slurm's environment is incomplete: SLURM_STEP_NODELIST missing; set MASTER_ADDR to rank 0's host"
        )
    job, step = _whole(env, "SLURM_JOB_ID", 0), _whole(env, "SLURM_STEP_ID", 0)
    return f"{host}:{env.get('MASTER_PORT') or 20000 + (job * 7 + step) % 10000}"


def _address(env: Mapping[str, str]) -> str:
    """MASTER_ADDR and MASTER_PORT; empty where neither is there, then distributed.init_method must say it."""
    host, port = env.get("MASTER_ADDR"), env.get("MASTER_PORT")
    if not host and not port:
        return ""
    if not (host and port):
        missing = "MASTER_PORT" if host else "MASTER_ADDR"
        raise Refusal(f"the launcher's environment is incomplete: {missing} missing; start with torchrun, or set both")
    if not 0 < _whole(env, "MASTER_PORT") < 65536:
        raise Refusal(f"MASTER_PORT={port}: a port is a number from 1 to 65535")
    return f"{host}:{port}"


def _whole(env: Mapping[str, str], key: str, default: int | None = None) -> int:
    """A number of the environment, from 0 on."""
    if key not in env and default is not None:
        return default
    text = env.get(key, "").strip()
    if not text.isascii() or not text.isdecimal():
        said = f"{key}={env[key]}" if key in env else f"{key} is missing"
        raise Refusal(f"{said}: the launcher's environment should hold a whole number there; start with torchrun")
    return int(text)


def _sound(found: ProcessPlace, env: Mapping[str, str]) -> ProcessPlace:
    """The same place, if it can be one."""
    machine = (found.local_rank, found.local_world_size, "on this machine")
    for rank, size, what in ((found.rank, found.world_size, "processes"), machine):
        if rank >= size:
            shown = ", ".join(sorted(f"{key}={value}" for key, value in env.items() if _COUNTS.search(key))[:6])
            raise Refusal(
                f"the environment contradicts itself: this is process {rank} of {size} {what}, and they count from 0; "
                f"it says {shown}"
            )
    return found
