"""Collectives before there is a process group: values and messages between ranks through the store of the launch."""

from __future__ import annotations

import json
import socket
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

from trainer.launch.rendezvous import Launch
from trainer.messages import Refusal

if TYPE_CHECKING:
    from torch.distributed import Store

T = TypeVar("T")


def broadcast_from_main(launch: Launch, what: str, decide: Callable[[], Any]) -> Any:
    """Collective: the JSON value that the main rank decides, on every rank; where it refuses, all refuse alike."""
    store = launch.store()
    if store is None:
        return decide()
    # the main rank writes its value and then that all went well; every other rank waits for the latter
    if launch.is_main:
        with _report_outcome(store, what, launch):
            value = decide()
            store.set(f"{what}-value", json.dumps(value))
        return value
    _wait_for_outcome(store, what)
    return json.loads(store.get(f"{what}-value"))


def gather_to_main(launch: Launch, what: str, value: Any) -> list[Any]:
    """Collective: on the main rank the JSON values of all ranks in their order; on every other one only its own."""
    store = launch.store()
    if store is None:
        return [value]
    if not launch.is_main:
        store.set(f"{what}-of-{launch.rank}", json.dumps(value))
        return [value]
    # the main rank waits for all others, in one request
    keys = [f"{what}-of-{rank}" for rank in range(1, launch.world_size)]
    return [value, *map(json.loads, store.multi_get(keys) if keys else [])]


def run_on_all_ranks(launch: Launch, what: str, act: Callable[[], T]) -> T:
    """Collective: run `act` on every rank; where it refuses on one, all refuse alike, and none waits for the others."""
    store = launch.store()
    if store is None:
        return act()
    # the first that has a problem reports it for all, and otherwise who comes last that all went well: no rank does
    # more than another, however many there are
    outcome = f"{what}-everywhere"
    try:
        value = act()
    except BaseException as error:
        store.set(outcome, _describe_problem(error, launch))
        raise
    if store.add(f"{what}-done", 1) == launch.world_size:
        store.set(outcome, "")
    _wait_for_outcome(store, outcome)
    return value


def run_one_per_node_first(launch: Launch, what: str, prepare: Callable[[], T]) -> T:
    """Collective: run `prepare` on one rank of each machine (downloads, caches), then on the others.

    The first rank to come is that one. Ranks need not be numbered machine by machine: Slurm and MPI can be told
    otherwise. Where it refuses on one machine, all refuse.
    """
    store, key = launch.store(), f"{what}-on-{machine_id()}"

    def in_turn() -> T:
        if store is not None and store.add(f"{key}-comers", 1) == 1:
            with _report_outcome(store, key, launch):
                return prepare()
        if store is not None:
            _wait_for_outcome(store, key)
        return prepare()

    # a refusal reaches the other ranks of a machine from its first one, and those of other machines here
    return run_on_all_ranks(launch, what, in_turn)


@contextmanager
def _report_outcome(store: Store, key: str, launch: Launch) -> Iterator[None]:
    """Write under this key that the code inside went well, or why not, so that no rank waits for one that has gone."""
    try:
        yield
    except BaseException as error:
        store.set(key, _describe_problem(error, launch))
        raise
    store.set(key, "")


def _wait_for_outcome(store: Store, key: str) -> None:
    """Wait until another rank has written how it went; Refusal where it went wrong there."""
    if problem := store.get(key).decode():
        raise Refusal(problem)


def _describe_problem(error: BaseException, launch: Launch) -> str:
    failed = f"rank {launch.rank} failed: {type(error).__name__}: {error}"
    message = str(error) if isinstance(error, Refusal) else failed
    # of a rank on another machine than the main one: the same may be right here
    return message if launch.rank == launch.local_rank else f"{socket.gethostname()}: {message}"


def machine_id() -> str:
    """The same text in all processes on a machine, and in no others.

    Neither alone is enough: containers on two machines may have one name, and those on one machine have one kernel.
    """
    boot = Path("/proc/sys/kernel/random/boot_id")
    return f"{socket.gethostname()}-{boot.read_text().strip() if boot.is_file() else ''}"
