"""What processes agree on before there is a process group: through the store of the launch, in words."""

from __future__ import annotations

import json
import socket
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

from trainer.launch.launch import Launch
from trainer.refusal import Refusal

if TYPE_CHECKING:
    from torch.distributed import Store

T = TypeVar("T")


def decided_by_main(launch: Launch, what: str, decide: Callable[[], Any]) -> Any:
    """The JSON value that the main rank decides, on every rank; where it refuses, all refuse with its sentence."""
    return _said(launch, what, speaker=0, decide=decide)


def everywhere(launch: Launch, what: str, act: Callable[[], T]) -> T:
    """Run `act` on every rank; where it refuses on one, all refuse with its sentence, and nobody waits for the gone."""
    store = launch.store()
    if store is None:
        return act()
    try:
        value = act()
    except BaseException as error:
        _check_in(store, launch, what, _sentence(error, launch))
        raise
    if problem := _check_in(store, launch, what, ""):
        raise Refusal(problem)
    return value


def first_on_node(launch: Launch, what: str, prepare: Callable[[], T]) -> T:
    """Run `prepare` on one process of each machine (downloads, caches), then on the others, which find it done.

    The first to come does it. Ranks need not be dealt to machines in order: Slurm and MPI can be told otherwise.
    Where it refuses on one machine, all refuse.
    """
    return everywhere(launch, f"{what}-everywhere", lambda: _first_here(launch, what, prepare))


def _first_here(launch: Launch, what: str, prepare: Callable[[], T]) -> T:
    store = launch.store()
    if store is None:
        return prepare()
    key = f"{what}-on-{_machine()}"
    speaker = int(store.compare_set(f"{key}-by", "", str(launch.rank)))
    prepared: list[T] = []

    def once() -> None:
        prepared.append(prepare())

    _said(launch, key, speaker, once)
    return prepared[0] if prepared else prepare()


def _check_in(store: Store, launch: Launch, what: str, problem: str) -> str:
    """Leave word of this rank; the main one reads all and says what is wrong. Who has a problem does not wait."""
    if not launch.is_main:
        store.set(f"{what}-{launch.rank}", problem)
        return problem or store.get(f"{what}-all").decode()
    others = [f"{what}-{rank}" for rank in range(1, launch.world_size)]
    said = [problem] if problem or not others else [word.decode() for word in store.multi_get(others)]
    first = next((word for word in said if word), "")
    store.set(f"{what}-all", first)
    return first


def _sentence(error: BaseException, launch: Launch) -> str:
    said = str(error) if isinstance(error, Refusal) else f"rank {launch.rank} failed: {type(error).__name__}: {error}"
    return said if launch.rank == launch.local_rank else f"{socket.gethostname()}: {said}"


def _machine() -> str:
    """What processes on one machine have in common: names may repeat (containers), and so may kernels (them again)."""
    boot = Path("/proc/sys/kernel/random/boot_id")
    return f"{socket.gethostname()}-{boot.read_text().strip() if boot.is_file() else ''}"


def _said(launch: Launch, key: str, speaker: int, decide: Callable[[], Any]) -> Any:
    """One rank decides and says so; the others listen. A failure is said, too, so that nobody waits for the dead."""
    store = launch.store()
    if store is None:
        return decide()
    if launch.rank == speaker:
        try:
            value = decide()
        except BaseException as error:
            store.set(key, json.dumps({"refusal": _sentence(error, launch)}))
            raise
        store.set(key, json.dumps({"value": value}))
        return value
    answer = json.loads(store.get(key))
    if "refusal" in answer:
        raise Refusal(answer["refusal"])
    return answer["value"]
