"""What processes agree on before there is a process group: through the store of the launch, in words."""

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
    """The JSON value that the main rank decides, on every rank; where it refuses, all refuse with its sentence."""
    store = launch.store()
    if store is None:
        return decide()
    if launch.is_main:
        with _report_outcome(store, what, launch):
            value = decide()
            store.set(f"{what}-value", json.dumps(value))
        return value
    _wait_for_outcome(store, what)
    return json.loads(store.get(f"{what}-value"))


def run_on_all_ranks(launch: Launch, what: str, act: Callable[[], T]) -> T:
    """Run `act` on every rank; where it refuses on one, all refuse with its sentence, and nobody waits for the gone."""
    store = launch.store()
    if store is None:
        return act()
    if launch.is_main:
        # the main rank's word is that of all: it has heard the others, unless its own problem is enough
        with _report_outcome(store, f"{what}-everywhere", launch):
            value = act()
            for rank in range(1, launch.world_size):
                _wait_for_outcome(store, f"{what}-{rank}")
        return value
    with _report_outcome(store, f"{what}-{launch.rank}", launch):
        value = act()
    _wait_for_outcome(store, f"{what}-everywhere")
    return value


def run_one_per_node_first(launch: Launch, what: str, prepare: Callable[[], T]) -> T:
    """Run `prepare` on one process of each machine (downloads, caches), then on the others, which find it done.

    The first to come does it. Ranks need not be dealt to machines in order: Slurm and MPI can be told otherwise.
    Where it refuses on one machine, all refuse.
    """
    store, key = launch.store(), f"{what}-on-{machine_id()}"

    def in_turn() -> T:
        if store is not None and store.add(f"{key}-comers", 1) == 1:
            with _report_outcome(store, key, launch):
                return prepare()
        if store is not None:
            _wait_for_outcome(store, key)
        return prepare()

    # the others of a machine hear a refusal from its first, those of other machines hear it here
    return run_on_all_ranks(launch, what, in_turn)


@contextmanager
def _report_outcome(store: Store, key: str, launch: Launch) -> Iterator[None]:
    """Leave word under this key that what is inside went well, or why not, so that nobody waits for the dead."""
    try:
        yield
    except BaseException as error:
        store.set(key, _describe_problem(error, launch))
        raise
    store.set(key, "")


def _wait_for_outcome(store: Store, key: str) -> None:
    """Wait for another rank's word; Refusal where it went wrong there."""
    if problem := store.get(key).decode():
        raise Refusal(problem)


def _describe_problem(error: BaseException, launch: Launch) -> str:
    said = str(error) if isinstance(error, Refusal) else f"rank {launch.rank} failed: {type(error).__name__}: {error}"
    return said if launch.rank == launch.local_rank else f"{socket.gethostname()}: {said}"


def machine_id() -> str:
    """What processes on one machine have in common: names may repeat (containers), and so may kernels (them again)."""
    boot = Path("/proc/sys/kernel/random/boot_id")
    return f"{socket.gethostname()}-{boot.read_text().strip() if boot.is_file() else ''}"
