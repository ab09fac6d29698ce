"""What launchers leave in the environment, where processes meet, and that no round reads what another one left."""

from __future__ import annotations

import os
import socket
import subprocess
import sys
import threading
from collections.abc import Callable
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest
import torch.distributed as dist

from tests.commands import Command, Ended, single, status
from trainer.launch import rendezvous as launching
from trainer.launch.launcher_environment import (
    apply_init_method,
    first_host,
    read_init_method,
    read_launch,
    tasks_per_node,
)
from trainer.launch.rendezvous import Launch
from trainer.launch.store_collectives import run_on_all_ranks, run_one_per_node_first
from trainer.messages import Refusal

ROOT = Path(__file__).parents[1]
MOMENT = timedelta(milliseconds=300)

# -------------------------------------------------------------------------------------------------------- environments

TORCHRUN = {"RANK": 3, "WORLD_SIZE": 4, "LOCAL_RANK": 1, "LOCAL_WORLD_SIZE": 2, "MASTER_ADDR": "a", "MASTER_PORT": 7}
ELASTIC = {"TORCHELASTIC_RUN_ID": "id", "TORCHELASTIC_RESTART_COUNT": 2, "TORCHELASTIC_USE_AGENT_STORE": "True"}
BATCH = {"SLURM_JOB_ID": 1234, "SLURM_NTASKS": 8, "SLURM_PROCID": 0, "SLURM_NODEID": 0, "SLURM_JOB_NODELIST": "n[1-2]"}
STEP = BATCH | {
    "SLURM_STEP_ID": 0,
    "SLURM_STEP_NUM_TASKS": 7,
    "SLURM_PROCID": 6,
    "SLURM_LOCALID": 2,
    "SLURM_NODEID": 1,
    "SLURM_STEP_NUM_NODES": 2,
    "SLURM_STEP_TASKS_PER_NODE": "4,3",
    "SLURM_STEP_NODELIST": "node[01-04,7]",
}
OPEN_MPI = {
    "OMPI_COMM_WORLD_RANK": 5,
    "OMPI_COMM_WORLD_SIZE": 8,
    "OMPI_COMM_WORLD_LOCAL_RANK": 1,
    "OMPI_COMM_WORLD_LOCAL_SIZE": 4,
}
MPICH = {"PMI_RANK": 5, "PMI_SIZE": 8, "MPI_LOCALRANKID": 1, "MPI_LOCALNRANKS": 4}
MEET = {"MASTER_ADDR": "a", "MASTER_PORT": 7}
FIVE = Launch(5, 8, 1, 4)


def read(*environments: dict[str, Any]) -> Launch:
    return read_launch({key: str(value) for one in environments for key, value in one.items()})


@pytest.mark.parametrize(
    ("environments", "launch"),
    [
        ([], Launch()),
        ([TORCHRUN], Launch(3, 4, 1, 2, address="a:7")),
        ([TORCHRUN, ELASTIC], Launch(3, 4, 1, 2, 2, "id", "a:7", launcher_serves_store=True)),
        ([{"RANK": 1, "WORLD_SIZE": 2}, MEET], Launch(1, 2, 1, 2, address="a:7")),
        ([STEP], Launch(6, 7, 2, 3, address="node01:28638")),
        ([STEP, {"SLURM_RESTART_COUNT": 1}], Launch(6, 7, 2, 3, 1, address="node01:28638")),
        ([STEP, {"SLURM_STEP_NUM_NODES": 1}], Launch(6, 7, 2, 3, address="127.0.0.1:28638")),
        ([STEP, MEET], Launch(6, 7, 2, 3, address="a:7")),
        ([STEP, {"MASTER_PORT": 7}], Launch(6, 7, 2, 3, address="node01:7")),
        ([STEP, {"SLURM_STEP_NUM_TASKS": 1}], Launch()),
        ([OPEN_MPI], FIVE),
        ([OPEN_MPI, MEET], Launch(5, 8, 1, 4, address="a:7")),
        ([MPICH], FIVE),
        # What merely stands in an allocation of Slurm is no launch; nor is a shell.
        ([BATCH], Launch()),
        ([BATCH, {"SLURM_STEP_ID": 0xFFFFFFFB}], Launch()),
        ([STEP, {"SLURM_PTY_PORT": 4000}], Launch()),
        # The nearest launcher counts: torchrun in a step, mpirun and mpiexec in an allocation; srun that speaks PMI.
        ([STEP, TORCHRUN], Launch(3, 4, 1, 2, address="a:7")),
        ([STEP, OPEN_MPI], FIVE),
        ([STEP, MPICH], FIVE),
        ([STEP, {"PMI_RANK": 6, "PMI_SIZE": 7}], Launch(6, 7, 2, 3, address="node01:28638")),
    ],
)
def test_every_launcher_is_understood(environments, launch):
    assert read(*environments) == launch


@pytest.mark.parametrize(
    ("environment", "sentence"),
    [
        ({"RANK": 1}, "incomplete: WORLD_SIZE missing"),
        ({"WORLD_SIZE": 1}, "incomplete: RANK missing"),
        ({"RANK": "x", "WORLD_SIZE": 2}, "RANK=x: the launcher's environment should hold a whole number"),
        ({"RANK": "²", "WORLD_SIZE": 2}, "RANK=²"),
        ({"RANK": -1, "WORLD_SIZE": 2}, "RANK=-1"),
        ({"RANK": 2, "WORLD_SIZE": 2}, "RANK=2 WORLD_SIZE=2: ranks count from 0, so the last is 1"),
        (TORCHRUN | {"MASTER_PORT": "http"}, "MASTER_PORT=http"),
        (STEP | {"SLURM_PROCID": 7}, "RANK=7 WORLD_SIZE=7: ranks count from 0, so the last is 6"),
        ({"OMPI_COMM_WORLD_SIZE": 2}, "incomplete: RANK missing"),
    ],
)
def test_half_an_environment_and_nonsense_are_refused(environment, sentence):
    with pytest.raises(Refusal) as caught:
        read(environment)
    assert sentence in str(caught.value)


@pytest.mark.parametrize(
    ("hosts", "first"),
    [
        ("node1", "node1"),
        ("node1,node2", "node1"),
        ("node[01-04,7],login", "node01"),
        ("rack[2,4]node[3-5]-ib", "rack2node3-ib"),
        ("a-b-[007]", "a-b-007"),
    ],
)
def test_the_first_host_of_slurms_lists(hosts, first):
    assert first_host(hosts) == first


def test_the_tasks_of_slurms_nodes():
    assert tasks_per_node("2(x3),1") == [2, 2, 2, 1]


def test_who_has_started_a_process_is_known_and_missed():
    assert read({"TRAINER_PARENT": os.getppid()}).waiting_parent == os.getppid()
    assert read({"TRAINER_PARENT": os.getpid()}).waiting_parent is None  # from further up
    env = TORCHRUN | {"TRAINER_STORE": "/private/store"}
    assert read(env | {"TRAINER_PARENT": os.getppid()}).address == "file:///private/store"
    assert read(env | {"TRAINER_PARENT": os.getpid()}).address == "a:7"  # torchrun inside of such a process
    gone = subprocess.Popen(["true"])
    gone.wait()
    with pytest.raises(Refusal, match="is gone"):
        read({"TRAINER_PARENT": gone.pid})


def test_a_requeued_job_is_not_one_that_a_launcher_restarts():
    again = read(STEP, {"SLURM_RESTART_COUNT": 1})
    assert (again.requeued, again.restarted_by_launcher) == (True, False)
    assert not read(TORCHRUN, ELASTIC).requeued


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
def test_where_processes_meet(written, address, query):
    assert read_init_method(written) == (address, query)


@pytest.mark.parametrize(
    "written",
    [
        *("tpc://a:1", "files:///a", "http://a:1", "a:29500", "env://a", "env://?rank=0&world_size=2"),
        *("tcp://a", "tcp://:1", "tcp://a:99999", "tcp://a:1/b", "tcp://a:1?rank=1", "tcp://a:1?rank=x&world_size=2"),
        *("file://a/b", "file:///", "file:///a/"),
    ],
)
def test_other_places_are_refused_with_those_that_work(written):
    with pytest.raises(Refusal, match="env://, tcp://host:port or file:///path"):
        read_init_method(written)


def test_the_query_or_the_environment_says_who_this_is(monkeypatch):
    for name in ("LOCAL_RANK", "LOCAL_WORLD_SIZE"):
        monkeypatch.delenv(name, raising=False)
    assert apply_init_method(Launch(), "env://") == Launch()
    assert apply_init_method(Launch(), "tcp://a:1") == Launch()  # one process needs no place to meet
    assert apply_init_method(Launch(), "tcp://a:1?rank=1&world_size=2") == Launch(1, 2, 1, 2, address="a:1")
    for written in ("tcp://a:1", "tcp://a:1?rank=0&world_size=2"):  # the launcher knows better
        assert apply_init_method(FIVE, written) == Launch(5, 8, 1, 4, address="a:1")
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


def test_a_wrong_place_is_refused_on_the_command_line():
    words = [sys.executable, "-m", "trainer", "distributed.init_method=tpc://a:1"]
    done = subprocess.run(words, cwd=ROOT, env={**os.environ, "OMP_NUM_THREADS": "1"}, capture_output=True, text=True)
    assert done.returncode == 2
    assert done.stderr == (
        "distributed.init_method=tpc://a:1: expected env://, tcp://host:port or file:///path, "
        "the latter two also with ?rank=R&world_size=W\n"
    )


# -------------------------------------------------------------------------------------------------------------- rounds


@pytest.fixture
def server() -> dist.TCPStore:
    return dist.TCPStore("127.0.0.1", 0, None, True, timedelta(seconds=60), wait_for_workers=False)


def ranks(address: str, size: int, run_id: str = "run") -> list[Launch]:
    hosted = not address.startswith("file:")
    return [
        Launch(rank, size, rank, size, address=address, run_id=run_id, launcher_serves_store=hosted)
        for rank in range(size)
    ]


def at_once(*calls: Callable[[], Any]) -> list[Any]:
    """The results of calls that wait for each other, each in a thread."""
    results: list[Any] = [None] * len(calls)

    def run(number: int) -> None:
        try:
            results[number] = calls[number]()
        except Exception as error:
            results[number] = error

    threads = [threading.Thread(target=run, args=(number,)) for number in range(len(calls))]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
    return results


def meet(launches: list[Launch]) -> list[dist.Store]:
    """A round of these; every rank sees what the others write, and nothing else."""
    launching._joined_rounds.clear()
    stores = at_once(*[launch.store for launch in launches])
    for rank, store in enumerate(stores):
        assert isinstance(store, dist.Store), store
        assert not store.check(["left"])
        store.set(f"from-{rank}", str(rank))
    for store in stores:
        assert [store.get(f"from-{rank}") for rank in range(len(stores))] == [b"%d" % r for r in range(len(stores))]
    stores[0].set("left", "by this round")
    return stores


def test_no_round_sees_what_another_left(server, tmp_path):
    for address in (f"127.0.0.1:{server.port}", f"file://{tmp_path}/meeting"):
        for size in (3, 1, 3, 2, 2):
            meet(ranks(address, size))


@pytest.mark.parametrize("answered", [False, True])
def test_a_rank_that_greeted_a_dead_round_finds_the_living_one(server, answered):
    """The dead round's rank 0 had written its nonce, and perhaps its answer, before it died."""
    main, other = ranks(f"127.0.0.1:{server.port}", 2)
    server.set(launching._nonce_key(main), "dead")
    if answered:
        server.set("trainer/run/dead/go", '["of the dead rank 1"]')
        server.set("trainer/run/dead/left", "an address")

    def late() -> Any:
        server.wait(["trainer/run/dead/hello/1"])  # the other has come, and has greeted the dead
        return main.store()

    stores = at_once(late, other.store)
    stores[0].set("key", "value")
    assert stores[1].get("key") == b"value"
    assert not stores[1].check(["left"])


@pytest.mark.long
def test_who_does_not_come_is_named(server):
    first = Launch(0, 4, address=f"127.0.0.1:{server.port}", launcher_serves_store=True)
    with pytest.raises(Refusal, match="rank 1, 2, 3 of 4 did not come to 127"):
        first.store(MOMENT)
    third = Launch(2, 4, 0, 1, 1, address=first.address, launcher_serves_store=True)
    with pytest.raises(Refusal, match=r"rank 2 of 4 waited for rank 0 at .*: it did not come"):
        third.store(MOMENT)


@pytest.mark.parametrize(("name", "why"), [("none/a", "No such file"), ("folder", "Is a directory")])
def test_a_file_that_cannot_be_a_meeting_place(tmp_path, name, why):
    (tmp_path / "folder").mkdir()
    with pytest.raises(Refusal, match=why):
        Launch(0, 2, address=f"file://{tmp_path / name}").store()


def test_at_a_port_that_another_program_has_nobody_waits(monkeypatch):
    monkeypatch.setattr(launching, "ANSWER_TIMEOUT", timedelta(seconds=1))
    with socket.create_server(("127.0.0.1", 0)) as mute:  # it takes connections, and never says anything
        place = f"127.0.0.1:{mute.getsockname()[1]}"
        main, other = at_once(*[Launch(rank, 2, rank, 2, address=place).store for rank in range(2)])
    assert isinstance(main, Refusal)
    assert isinstance(other, Refusal)
    port, instead = place.rpartition(":")[2], "give all ranks another MASTER_PORT"
    assert str(main).startswith(f"cannot serve the store at {place}: port {port} of this machine is in use; ")
    assert str(other).startswith(f"cannot reach the store at {place}: what listens there is another program")
    assert instead in str(main)
    assert instead in str(other)


def test_at_a_port_where_another_run_has_met_nobody_waits(monkeypatch):
    monkeypatch.setattr(launching, "ANSWER_TIMEOUT", timedelta(seconds=1))
    with socket.create_server(("127.0.0.1", 0)) as free:
        place = f"127.0.0.1:{free.getsockname()[1]}"
    first, second = [Launch(rank, 2, rank, 2, address=place) for rank in range(2)]
    met = at_once(first.store, second.store)
    assert all(isinstance(store, dist.Store) for store in met), met
    # the same again beside it, and three processes: by now no rank 0 of theirs can be there
    for size in (2, 3):
        launching._joined_rounds.clear()
        launching.connect_store.cache_clear()
        with pytest.raises(Refusal, match=f"another run, .* meets at {place} already; .* another MASTER_PORT"):
            Launch(1, size, 1, size, address=place).store()


def test_the_first_on_a_machine_prepares_for_the_others(server):
    done: list[int] = []

    def prepare() -> int:
        done.append(len(done))
        return done[-1]

    launches = ranks(f"127.0.0.1:{server.port}", 3)
    prepared = at_once(*[lambda launch=launch: run_one_per_node_first(launch, "data", prepare) for launch in launches])
    assert sorted(prepared) == [0, 1, 2]
    assert done == [0, 1, 2]


@pytest.mark.parametrize("wrong", [0, 2])
def test_what_one_rank_refuses_all_refuse(server, wrong):
    def act(rank: int) -> int:
        if rank == wrong:
            raise Refusal("there is no GPU here")
        return rank

    launches = ranks(f"127.0.0.1:{server.port}", 3)
    calls = [lambda launch=launch: run_on_all_ranks(launch, "gpu", lambda: act(launch.rank)) for launch in launches]
    assert [(type(one), str(one)) for one in at_once(*calls)] == [(Refusal, "there is no GPU here")] * 3
    assert at_once(
        *[lambda launch=launch: run_on_all_ranks(launch, "rank", lambda: launch.rank) for launch in launches]
    ) == [
        0,
        1,
        2,
    ]


# ------------------------------------------------------------------------------------------ without torchrun, for real

SMALL = ("model=mlp", "device=cpu", "strategy=ddp", "log=[]", "loop.steps=3", "loop.eval_every=null")


def ended(place: Path, commands: list[tuple[list[str], dict[str, str]]]) -> list[Ended]:
    """Start these at once; how they ended."""
    return [one.end() for one in [Command(words, place, environment) for words, environment in commands]]


@pytest.mark.long
@pytest.mark.slow
def test_processes_started_by_hand_meet_in_a_file_again_and_again(tmp_path):
    def by_hand(*words: str) -> list[Ended]:
        meet = f"distributed.init_method='file://{tmp_path}/meeting?rank=%d&world_size=2'"
        return ended(tmp_path, [(single(*SMALL, meet % rank, *words), {}) for rank in range(2)])

    first = by_hand("run.dir=run")
    assert [(one.code, one.left) for one in first] == [(0, [])] * 2, first[0].screen + first[1].screen
    assert (status(tmp_path / "run")["state"], status(tmp_path / "run")["world_size"]) == ("completed", 2)
    again = by_hand("run.dir=run")  # the file is a dead run's now
    assert [one.code for one in again] == [0, 0], again[0].screen + again[1].screen
    assert [one.screen.count("this run is complete") for one in again] == [1, 0]


@pytest.mark.long
@pytest.mark.slow
def test_the_tasks_of_srun_meet_at_rank_0_and_refuse_with_one_voice(tmp_path):
    def srun(*words: str) -> list[Ended]:
        step = {"SLURM_JOB_ID": "7", "SLURM_STEP_ID": "0", "SLURM_STEP_NUM_TASKS": "2", "SLURM_STEP_NUM_NODES": "1"}
        tasks = [{**step, "SLURM_PROCID": str(rank), "SLURM_LOCALID": str(rank)} for rank in range(2)]
        with socket.socket() as one:
            one.bind(("", 0))
            port = {"MASTER_PORT": str(one.getsockname()[1])}
        return ended(tmp_path, [(single(*SMALL, "run.dir=run", *words), {**task, **port}) for task in tasks])

    first = srun("run.stop_after=0.001")
    assert [one.code for one in first] == [75, 75], first[0].screen + first[1].screen  # nothing restarts them
    refused = srun("seed=7")
    assert [one.code for one in refused] == [2, 2]
    assert "seed" in refused[0].screen
    assert refused[1].screen == ""
