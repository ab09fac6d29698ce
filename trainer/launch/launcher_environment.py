"""Reads from the environment which process of a launch this is: of torchrun, Open MPI, MPICH, Intel MPI or Slurm.

Variables of the others are translated into those of torchrun. The launcher that is nearest to the process counts: a
torchrun that srun started leaves both kinds of variables, and so does a mpirun inside an allocation of Slurm. Nothing
here needs torch.
"""

from __future__ import annotations

import os
import re
from collections.abc import Mapping
from dataclasses import replace
from datetime import timedelta
from urllib.parse import unquote

from trainer.launch.rendezvous import STORE_TIMEOUT, Launch
from trainer.messages import Refusal

_OPEN_MPI = [f"OMPI_COMM_WORLD_{name}" for name in ("RANK", "SIZE", "LOCAL_RANK", "LOCAL_SIZE")]
_MPICH = ["PMI_RANK", "PMI_SIZE", "MPI_LOCALRANKID", "MPI_LOCALNRANKS"]
_TORCHRUN = ["RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE"]
# how the names of launchers' variables begin
_LAUNCHER_PREFIXES = (
    "MASTER_",
    "TORCHELASTIC_",
    "TRAINER_",
    "OMPI_",
    "PMIX_",
    "PMI_",
    "MPI_",
    "SLURM_",
)
_SLURM_TASKS = "SLURM_STEP_NUM_TASKS"
_SPECIAL_STEPS = 0xFFFFFFF0  # of Slurm: the batch script, the shell of salloc
_INIT_METHOD = re.compile(
    r"env://|(tcp://\[?(?P<host>[^][/?]+)\]?:(?P<port>[0-9]+)/?|file://(?P<path>/[^?]*[^/?]))"
    r"(\?rank=(?P<rank>[0-9]+)&world_size=(?P<size>[0-9]+))?"
)


def read_launch(env: Mapping[str, str] = os.environ) -> Launch:
    """Which process of a launch this is: its rank, how many there are, where they meet. Alone it is the only one.

    Refusal where the environment is incomplete or makes no sense.
    """
    variables = _to_torchrun_variables(env)
    # read for a single process as well: Slurm may have requeued its job
    attempt = _read_whole_number(variables, "TORCHELASTIC_RESTART_COUNT", 0)
    missing = [key for key in ("RANK", "WORLD_SIZE") if not variables.get(key)]
    parent = _waiting_parent(env)
    if len(missing) == 2:
        return Launch(attempt=attempt, waiting_parent=parent)
    if missing:
        raise Refusal(f"the launcher's environment is incomplete: {missing[0]} missing; start with torchrun")
    rank, world_size = _read_whole_number(variables, "RANK"), _read_whole_number(variables, "WORLD_SIZE")
    if rank >= world_size:
        raise Refusal(f"RANK={rank} WORLD_SIZE={world_size}: ranks count from 0, so the last is {world_size - 1}")
    # where rank 0 serves a store, or where torchrun serves one
    host, port = variables.get("MASTER_ADDR"), variables.get("MASTER_PORT")
    # of `processes=N`; one that was started from inside of such a process has another launcher
    stored = f"file://{env['TRAINER_STORE']}" if parent is not None and env.get("TRAINER_STORE") else ""
    return Launch(
        rank,
        world_size,
        # where nothing is said about machines, all processes are on one
        _read_whole_number(variables, "LOCAL_RANK", rank),
        _read_whole_number(variables, "LOCAL_WORLD_SIZE", world_size),
        attempt,
        run_id=variables.get("TORCHELASTIC_RUN_ID", ""),
        waiting_parent=parent,
        from_launcher=True,
        # init_method may say it instead
        address=stored or (f"{host}:{_read_whole_number(variables, 'MASTER_PORT')}" if host and port else ""),
        launcher_serves_store=variables.get("TORCHELASTIC_USE_AGENT_STORE") == "True",
    )


def without_launcher_variables(env: Mapping[str, str]) -> dict[str, str]:
    """The environment without the variables of launchers: a process that is started with it is the only one."""
    return {
        name: value for name, value in env.items() if name not in _TORCHRUN and not name.startswith(_LAUNCHER_PREFIXES)
    }


def _waiting_parent(env: Mapping[str, str]) -> int | None:
    """The process of `processes=N` or of a sweep that started this one, if any. Refusal where it is gone already."""
    parent = env.get("TRAINER_PARENT")
    if parent is None:
        return None
    if parent == str(os.getppid()):
        return int(parent)
    # started by somebody else, who has the variable from further up; or the parent was killed just now
    try:
        os.kill(int(parent), 0)
    except ProcessLookupError:
        raise Refusal(f"the command that started this one (process {parent}) is gone") from None
    except PermissionError:  # another user's
        pass
    return None


def apply_init_method(launch: Launch, init_method: str, patience: timedelta = STORE_TIMEOUT) -> Launch:
    """The same process, meeting the others at `env://` (as the launcher says), `tcp://…` or `file://…`.

    Refusal where nothing says where to meet.
    """
    address, query = read_init_method(init_method)
    # who was started by hand has no launcher to ask; where there is one, it knows better than what is behind a `?`
    if query and launch.world_size == 1:
        rank, size = map(str, query)
        launch = read_launch({"LOCAL_RANK": rank, **os.environ, "RANK": rank, "WORLD_SIZE": size})
    if launch.world_size > 1 and not (address or launch.address):
        raise Refusal(
            f"{launch.world_size} processes, and nothing says where they meet: set MASTER_ADDR (the host of rank 0) "
            "and MASTER_PORT for all of them, or give distributed.init_method=tcp://host:port or file:///path"
        )
    # a place of one's own is not the launcher's store; one process needs none
    if launch.world_size > 1 and address:
        launch = replace(launch, address=address, launcher_serves_store=False)
    return replace(launch, timeout=patience)


def read_init_method(written: str) -> tuple[str, tuple[int, int] | None]:
    """Read `env://`, `tcp://host:port` or `file:///path`, the latter two also with `?rank=R&world_size=W`.

    The address, empty where the environment has it, and rank and size if they are said. Refusal with what was expected.
    """
    match = _INIT_METHOD.fullmatch(written)
    if match is None or int(match["port"] or 0) > 65535:
        raise Refusal("env://, tcp://host:port or file:///path, the latter two also with ?rank=R&world_size=W")
    query = (int(match["rank"]), int(match["size"])) if match["rank"] else None
    if match["host"]:
        return f"{match['host']}:{match['port']}", query
    return f"file://{unquote(match['path'])}" if match["path"] else "", query


def _to_torchrun_variables(env: Mapping[str, str]) -> Mapping[str, str]:
    """What the nearest launcher left, in torchrun's words (which PyTorchJob and shell scripts speak, too)."""
    # `srun --mpi=pmi2` sets MPICH's variables, and Slurm's own say more
    by_slurm = env.get("PMI_RANK") == env.get("SLURM_PROCID") and env.get("PMI_SIZE") == env.get(_SLURM_TASKS)
    if "RANK" in env or "WORLD_SIZE" in env:
        return env
    for names in (_OPEN_MPI, _MPICH):
        if names[1] in env and not (names is _MPICH and by_slurm):
            known = {word: env[name] for word, name in zip(_TORCHRUN, names, strict=True) if name in env}
            return known | {word: env[word] for word in ("MASTER_ADDR", "MASTER_PORT") if word in env}
    return _slurm_task_variables(env)


def _slurm_task_variables(env: Mapping[str, str]) -> dict[str, str]:
    """A task of srun. Only srun numbers its steps from 0: a batch script merely has the numbers of its allocation.

    Nor is the shell of `srun --pty` or salloc one task of several. A job that was requeued runs its command again.
    """
    # the numbers of an allocation are in the environment of whatever stands in it
    step = env.get("SLURM_STEP_ID", "")
    if "SLURM_PROCID" not in env or "SLURM_PTY_PORT" in env or not step.isdecimal() or int(step) >= _SPECIAL_STEPS:
        return {}
    again = {"TORCHELASTIC_RESTART_COUNT": env.get("SLURM_RESTART_COUNT", "0")}
    # a single task needs no others to meet
    tasks = env.get(_SLURM_TASKS) or env.get("SLURM_NTASKS", "1")
    if tasks == "1":
        return again
    counts = tasks_per_node(env.get("SLURM_STEP_TASKS_PER_NODE") or env.get("SLURM_TASKS_PER_NODE") or tasks)
    # a step that is all on one machine needs no name to be looked up; else rank 0 is on the first of the list
    alone = (env.get("SLURM_STEP_NUM_NODES") or env.get("SLURM_NNODES")) == "1"
    hosts = env.get("SLURM_STEP_NODELIST") or env.get("SLURM_JOB_NODELIST") or env.get("SLURM_NODELIST") or ""
    # a port that all tasks can work out; those from 20000 to 29999 lie below what Linux hands out by itself
    port = 20000 + (_read_whole_number(env, "SLURM_JOB_ID", 0) * 7 + int(step)) % 10000
    return again | {
        "RANK": env["SLURM_PROCID"],
        "WORLD_SIZE": tasks,
        "LOCAL_RANK": env.get("SLURM_LOCALID") or env["SLURM_PROCID"],
        "LOCAL_WORLD_SIZE": str(counts[min(_read_whole_number(env, "SLURM_NODEID", 0), len(counts) - 1)]),
        "MASTER_ADDR": env.get("MASTER_ADDR") or ("127.0.0.1" if alone else first_host(hosts)),
        "MASTER_PORT": env.get("MASTER_PORT") or str(port),
    }


def first_host(hosts: str) -> str:
    """The first host of a list as Slurm writes it: `node[01-04,7],login` begins with node01."""
    first = re.match(r"(?:\[[^\]]*\]|[^,\[\]])+", hosts.strip())
    return re.sub(r"\[([^\],-]+)[^\]]*\]", r"\1", first[0]) if first else ""


def tasks_per_node(counts: str) -> list[int]:
    """Slurm's `2(x3),1` spelt out: 2, 2, 2, 1."""
    return [int(tasks) for tasks, times in re.findall(r"(\d+)(?:\(x(\d+)\))?", counts) for _ in range(int(times or 1))]


def _read_whole_number(env: Mapping[str, str], key: str, default: int = 0) -> int:
    """A number of the environment, from 0 on."""
    text = env.get(key, str(default)).strip()
    if not (text.isascii() and text.isdecimal()):
        raise Refusal(
            f"{key}={env[key]}: the launcher's environment should hold a whole number there; start with torchrun"
        )
    return int(text)
