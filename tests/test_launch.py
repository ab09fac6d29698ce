"""What launchers leave in the environment, where processes meet, and that no round reads what another one left."""

from __future__ import annotations

import os
import socket
import subprocess
import threading
from collections.abc import Callable
from dataclasses import replace
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest
import torch.distributed as dist

from tests.ranks import Processes
from tests.run import Finished, run, start, status
from trainer import Refusal
from trainer.launch.launcher_environment import apply_init_method, first_host, read_init_method, read_launch
from trainer.launch.rendezvous import Launch

# -------------------------------------------------------------------------------------------------------- environments

TORCHRUN = {"RANK": 3, "WORLD_SIZE": 4, "LOCAL_RANK": 1, "LOCAL_WORLD_SIZE": 2, "MASTER_ADDR": "a", "MASTER_PORT": 7}
ELASTIC = {"TORCHELASTIC_RUN_ID": "id", "TORCHELASTIC_RESTART_COUNT": 2, "TORCHELASTIC_USE_AGENT_STORE": "True"}
BATCH = {"SLURM_JOB_ID": 1234, "SLURM_NTASKS": 8, "SLURM_PROCID": 0, "SLURM_NODEID": 0, "SLURM_JOB_NODELIST": "n[1-2]"}
STEP = BATCH | {"SLURM_STEP_ID": 0, "SLURM_STEP_NUM_TASKS": 7, "SLURM_PROCID": 6, "SLURM_LOCALID": 2, "SLURM_NODEID": 1}
STEP |= {"SLURM_STEP_NUM_NODES": 2, "SLURM_STEP_TASKS_PER_NODE": "4,3", "SLURM_STEP_NODELIST": "node[01-04,7]"}
OPEN_MPI = {"OMPI_COMM_WORLD_RANK": 5, "OMPI_COMM_WORLD_SIZE": 8}
OPEN_MPI |= {"OMPI_COMM_WORLD_LOCAL_RANK": 1, "OMPI_COMM_WORLD_LOCAL_SIZE": 4}
MPICH = {"PMI_RANK": 5, "PMI_SIZE": 8, "MPI_LOCALRANKID": 1, "MPI_LOCALNRANKS": 4}
MEET = {"MASTER_ADDR": "a", "MASTER_PORT": 7}
FIVE, SIX = Launch(5, 8, 1, 4), Launch(6, 7, 2, 3, address="node01:28638")


def read(*environments: dict[str, Any]) -> Launch:
    return read_launch({key: str(value) for one in environments for key, value in one.items()})


@pytest.mark.parametrize(
    ("environments", "launch"),
    [
        ([], Launch()),
        ([TORCHRUN], Launch(3, 4, 1, 2, address="a:7")),
        ([TORCHRUN, ELASTIC], Launch(3, 4, 1, 2, 2, "id", "a:7", launcher_serves_store=True)),
        ([{"RANK": 1, "WORLD_SIZE": 2}, MEET], Launch(1, 2, 1, 2, address="a:7")),
        ([STEP], SIX),
        ([STEP, {"SLURM_RESTART_COUNT": 1}], replace(SIX, attempt=1)),
        ([STEP, {"SLURM_STEP_NUM_NODES": 1}], replace(SIX, address="127.0.0.1:28638")),
        ([STEP, MEET], replace(SIX, address="a:7")),
        ([STEP, {"MASTER_PORT": 7}], replace(SIX, address="node01:7")),
        ([STEP, {"SLURM_STEP_TASKS_PER_NODE": "3(x2),1", "SLURM_NODEID": 2}], replace(SIX, local_world_size=1)),
        ([STEP, {"SLURM_STEP_NUM_TASKS": 1}], Launch()),
        ([OPEN_MPI], FIVE),
        ([OPEN_MPI, MEET], replace(FIVE, address="a:7")),
        ([MPICH], FIVE),
        # What merely stands in an allocation of Slurm is no launch; nor is a shell.
        ([BATCH], Launch()),
        ([BATCH, {"SLURM_STEP_ID": 0xFFFFFFFB}], Launch()),
        ([STEP, {"SLURM_PTY_PORT": 4000}], Launch()),
        # The nearest launcher counts: torchrun in a step, mpirun and mpiexec in an allocation; srun that speaks PMI.
        ([STEP, TORCHRUN], Launch(3, 4, 1, 2, address="a:7")),
        ([STEP, OPEN_MPI], FIVE),
        ([STEP, MPICH], FIVE),
        ([STEP, {"PMI_RANK": 6, "PMI_SIZE": 7}], SIX),
    ],
)
def test_every_launcher_is_understood(environments: list[dict[str, Any]], launch: Launch) -> None:
    assert read(*environments) == launch


@pytest.mark.parametrize(
    ("environment", "sentence"),
    [
        ({"RANK": 1}, "incomplete: WORLD_SIZE missing"),
        ({"WORLD_SIZE": 1}, "incomplete: RANK missing"),
        ({"RANK": "x", "WORLD_SIZE": 2}, "RANK=x: the launcher's environment should hold a whole number"),
        ({"RANK": -1, "WORLD_SIZE": 2}, "RANK=-1"),
        ({"RANK": 2, "WORLD_SIZE": 2}, "RANK=2 WORLD_SIZE=2: ranks count from 0, so the last is 1"),
        (TORCHRUN | {"MASTER_PORT": "http"}, "MASTER_PORT=http"),
        (STEP | {"SLURM_PROCID": 7}, "RANK=7 WORLD_SIZE=7: ranks count from 0, so the last is 6"),
        ({"OMPI_COMM_WORLD_SIZE": 2}, "incomplete: RANK missing"),
    ],
)
def test_half_an_environment_and_nonsense_are_refused(environment: dict[str, Any], sentence: str) -> None:
    with pytest.raises(Refusal) as caught:
        read(environment)
    assert sentence in str(caught.value)


@pytest.mark.parametrize(
    ("hosts", "first"),
    [("node1,node2", "node1"), ("rack[2,4]node[3-5]-ib", "rack2node3-ib"), ("a-b-[007]", "a-b-007")],
)
def test_the_first_host_of_slurms_lists(hosts: str, first: str) -> None:
    assert first_host(hosts) == first


def test_who_has_started_a_process_is_known_and_missed() -> None:
    assert read({"TRAINER_PARENT": os.getppid()}).waiting_parent == os.getppid()
    assert read({"TRAINER_PARENT": os.getpid()}).waiting_parent is None  # from further up
    env = TORCHRUN | {"TRAINER_STORE": "/private/store"}
    assert read(env | {"TRAINER_PARENT": os.getppid()}).address == "file:///private/store"
    assert read(env | {"TRAINER_PARENT": os.getpid()}).address == "a:7"  # torchrun inside of such a process
    gone = subprocess.Popen(["true"])
    gone.wait()
    with pytest.raises(Refusal, match="is gone"):
        read({"TRAINER_PARENT": gone.pid})
    again = read(STEP, {"SLURM_RESTART_COUNT": 1})
    assert (again.requeued, again.restarted_by_launcher, read(TORCHRUN, ELASTIC).requeued) == (True, False, False)


# --------------------------------------------------------------------------------------------------------- init_method


@pytest.mark.parametrize(
    ("written", "address", "query"),
    [
        ("env://", "", None),
        ("tcp://10.0.0.1:29500", "10.0.0.1:29500", None),
        ("tcp://[fe80::1]:29500", "fe80::1:29500", None),
        ("tcp://host:29500?rank=1&world_size=4", "host:29500", (1, 4)),
        ("file:///shared/a%20b", "file:///shared/a b", None),
        ("file:///shared/a?rank=0&world_size=2", "file:///shared/a", (0, 2)),
    ],
)
def test_where_processes_meet(written: str, address: str, query: tuple[int, int] | None) -> None:
    assert read_init_method(written) == (address, query)


@pytest.mark.parametrize(
    "written",
    [
        *("files:///a", "a:29500", "env://a", "tcp://a", "tcp://:1", "tcp://a:99999", "tcp://a:1/b"),
        *("tcp://a:1?rank=1", "tcp://a:1?rank=x&world_size=2", "file://a/b", "file:///"),
    ],
)
def test_other_places_are_refused_with_those_that_work(tmp_path: Path, written: str) -> None:
    refused = run(["model=mlp", f"distributed.init_method='{written}'"], place=tmp_path, code=2)
    assert refused.out == (
        f"distributed.init_method={written}: expected env://, tcp://host:port or file:///path, "
        "the latter two also with ?rank=R&world_size=W\n"
    )


def test_the_query_or_the_environment_says_who_this_is(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("LOCAL_RANK", "LOCAL_WORLD_SIZE"):
        monkeypatch.delenv(name, raising=False)
    assert apply_init_method(Launch(), "env://") == Launch()
    assert apply_init_method(Launch(), "tcp://a:1") == Launch()  # one process needs no place to meet
    assert apply_init_method(Launch(), "tcp://a:1?rank=1&world_size=2") == Launch(1, 2, 1, 2, address="a:1")
    for written in ("tcp://a:1", "tcp://a:1?rank=0&world_size=2"):  # the launcher knows better
        assert apply_init_method(FIVE, written) == replace(FIVE, address="a:1")
    elastic = read(TORCHRUN, ELASTIC)
    assert apply_init_method(elastic, "env://") == elastic
    assert not apply_init_method(elastic, "tcp://a:1").launcher_serves_store  # torchrun's store is another one
    monkeypatch.setenv("LOCAL_RANK", "0")
    monkeypatch.setenv("LOCAL_WORLD_SIZE", "1")
    assert apply_init_method(Launch(), "tcp://a:1?rank=1&world_size=2") == Launch(1, 2, 0, 1, address="a:1")
    nowhere = STEP | {"SLURM_STEP_NODELIST": "", "SLURM_JOB_NODELIST": ""}
    for launch in (FIVE, read(TORCHRUN | {"MASTER_PORT": ""}), read(TORCHRUN | {"MASTER_ADDR": ""}), read(nowhere)):
        with pytest.raises(Refusal, match="processes, and nothing says where they meet: set MASTER_ADDR"):
            apply_init_method(launch, "env://")


# -------------------------------------------------------------------------------------------------------------- rounds


def at_once(*calls: Callable[[], Any]) -> list[Any]:
    """The results of calls that wait for each other, each in a thread."""
    results: list[Any] = [None] * len(calls)

    def do(number: int) -> None:
        try:
            results[number] = calls[number]()
        except Exception as error:
            results[number] = error

    threads = [threading.Thread(target=do, args=(number,)) for number in range(len(calls))]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
    return results


def meet(launch: Launch, address: str, size: int) -> None:
    """A round at this address: every rank sees what the others write, and nothing else."""
    store = Launch(launch.rank, size, launch.rank, size, 0, "run", address, "://" not in address).store()
    assert store is not None
    assert not store.check(["left"])
    store.set(f"from-{launch.rank}", str(launch.rank))
    assert [store.get(f"from-{rank}") for rank in range(size)] == [b"%d" % rank for rank in range(size)]
    store.add("met", 1)
    while store.add("met", 0) < size:
        pass
    store.set("left", "by this round")


@pytest.fixture
def server() -> dist.TCPStore:
    return dist.TCPStore("127.0.0.1", 0, None, True, timedelta(seconds=60), wait_for_workers=False)


def test_no_round_sees_what_another_left(processes: Processes, server: dist.TCPStore, tmp_path: Path) -> None:
    for address in (f"127.0.0.1:{server.port}", f"file://{tmp_path}/meeting"):
        for size in (3, 3, 2, 2):
            processes.run(size, meet, address, size)


@pytest.mark.filterwarnings("ignore:.*multi-threaded.*fork:DeprecationWarning")
def test_a_rank_that_greeted_a_dead_round_finds_the_living_one(server: dist.TCPStore) -> None:
    first = Launch(0, 2, 0, 2, run_id="run", address=f"127.0.0.1:{server.port}", launcher_serves_store=True)
    with pytest.raises(Refusal, match="rank 1 of 2 did not come to 127"):
        replace(first, local_rank=1).store(timedelta(milliseconds=100))  # it dies; what it has written stays
    keys = server.num_keys()

    def late() -> Any:
        while server.num_keys() == keys:  # the other has come, and has greeted the dead
            pass
        return first.store()

    stores = at_once(late, replace(first, rank=1, local_rank=1).store)
    stores[0].set("key", "value")
    assert stores[1].get("key") == b"value"
    with pytest.raises(Refusal, match=r"rank 2 of 4 waited for rank 0 at .*: it did not come"):
        replace(first, rank=2, world_size=4).store(timedelta(milliseconds=100))


@pytest.mark.long  # ranks look for ten seconds
def test_at_a_port_that_somebody_else_has_nobody_waits() -> None:
    with socket.create_server(("127.0.0.1", 0)) as mute:  # it takes connections, and never says anything
        place = f"127.0.0.1:{mute.getsockname()[1]}"
        main, other = at_once(*[Launch(rank, 2, rank, 2, address=place).store for rank in range(2)])
    port, instead = place.rpartition(":")[2], "give all ranks another MASTER_PORT"
    assert str(main).startswith(f"cannot serve the store at {place}: port {port} of this machine is in use; ")
    assert str(other).startswith(f"cannot reach the store at {place}: what listens there is another program")
    assert (type(main), type(other), instead in str(main), instead in str(other)) == (Refusal, Refusal, True, True)
    with socket.create_server(("127.0.0.1", 0)) as free:
        place = f"127.0.0.1:{free.getsockname()[1]}"
    first, second = [Launch(rank, 2, rank, 2, address=place) for rank in range(2)]
    met = at_once(first.store, second.store)
    assert all(isinstance(store, dist.Store) for store in met), met
    # three processes beside it: by now no rank 0 of theirs can be there
    with pytest.raises(Refusal, match=f"another run, .* meets at {place} already; .* another MASTER_PORT"):
        Launch(1, 3, 1, 3, address=place).store()


# ------------------------------------------------------------------------------------------ without torchrun, for real

SMALL = ("model=mlp", "device=cpu", "strategy=ddp", "log=[]", "loop.steps=3", "loop.eval_every=null", "run.dir=run")


@pytest.mark.long
def test_processes_started_by_hand_meet_in_a_file_again_and_again(tmp_path: Path) -> None:
    def by_hand() -> list[Finished]:
        place = f"distributed.init_method='file://{tmp_path}/meeting?rank=%d&world_size=2'"
        return [one.end() for one in [start([*SMALL, place % rank], place=tmp_path) for rank in range(2)]]

    first = by_hand()
    assert [(one.code, one.left) for one in first] == [(0, [])] * 2, first[0].out + first[1].out
    assert (status(tmp_path / "run")["state"], status(tmp_path / "run")["world_size"]) == ("completed", 2)
    again = by_hand()  # the file is a dead run's now
    assert [one.code for one in again] == [0, 0], again[0].out + again[1].out
    assert [one.out.count("this run is complete") for one in again] == [1, 0]


@pytest.mark.long
def test_the_tasks_of_srun_meet_at_rank_0_and_refuse_with_one_voice(tmp_path: Path) -> None:
    def srun(word: str) -> list[Finished]:
        step = {"SLURM_JOB_ID": "7", "SLURM_STEP_ID": "0", "SLURM_STEP_NUM_TASKS": "2", "SLURM_STEP_NUM_NODES": "1"}
        with socket.create_server(("127.0.0.1", 0)) as one:
            step["MASTER_PORT"] = str(one.getsockname()[1])
        tasks = [{**step, "SLURM_PROCID": str(rank), "SLURM_LOCALID": str(rank)} for rank in range(2)]
        commands = [start([*SMALL, word], place=tmp_path, environment=task) for task in tasks]
        return [one.end() for one in commands]

    first = srun("run.stop_after=0.001")
    assert [one.code for one in first] == [75, 75], first[0].out + first[1].out  # nothing restarts them
    refused = srun("seed=7")
    assert [one.code for one in refused] == [2, 2]
    assert ("seed" in refused[0].out, refused[1].out) == (True, "")
