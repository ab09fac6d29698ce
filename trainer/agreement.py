"""What processes agree on before there is a process group: through the store of the launch, in words."""

from __future__ import annotations

import json
import socket
from collections.abc import Callable
from pathlib import Path
from typing import Any, TypeVar

from trainer.launch import Launch
from trainer.refusal import Refusal

T = TypeVar("T")


def decided_by_main(launch: Launch, what: str, decide: Callable[[], Any]) -> Any:
    """The JSON value that the main rank decides, on every rank; where it refuses, all refuse with its sentence."""
    return _said(launch, what, speaker=0, decide=decide)


def first_on_node(launch: Launch, what: str, prepare: Callable[[], T]) -> T:
    """Run `prepare` on one process of each machine (downloads, caches), then on the others, which find it done.

    The first to come does it. Ranks need not be dealt to machines in order: Slurm and MPI can be told otherwise.
    """
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
        except Refusal as refusal:
            store.set(key, json.dumps({"refusal": str(refusal)}))
            raise
        except BaseException as error:
            store.set(key, json.dumps({"refusal": f"rank {speaker} failed: {type(error).__name__}: {error}"}))
            raise
        store.set(key, json.dumps({"value": value}))
        return value
    answer = json.loads(store.get(key))
    if "refusal" in answer:
        raise Refusal(answer["refusal"])
    return answer["value"]
