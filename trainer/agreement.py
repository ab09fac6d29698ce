"""What processes agree on before there is a process group: through the store of the launch, in words."""

from __future__ import annotations

import json
from collections.abc import Callable
from typing import Any, TypeVar

from trainer.launch import Launch
from trainer.refusal import Refusal

T = TypeVar("T")


def decided_by_main(launch: Launch, what: str, decide: Callable[[], Any]) -> Any:
    """The JSON value that the main rank decides, on every rank; where it refuses, all refuse with its sentence."""
    return _said(launch, what, speaker=0, decide=decide)


def first_on_node(launch: Launch, what: str, prepare: Callable[[], T]) -> T:
    """Run `prepare` on one process of each machine (downloads, caches), then on the others, which find it done."""
    speaker = launch.rank - launch.local_rank
    prepared: list[T] = []

    def once() -> None:
        prepared.append(prepare())

    _said(launch, f"{what}-{speaker}", speaker, once)
    return prepared[0] if prepared else prepare()


def _said(launch: Launch, what: str, speaker: int, decide: Callable[[], Any]) -> Any:
    """One rank decides and says so; the others listen. A failure is said, too, so that nobody waits for the dead."""
    store = launch.store()
    if store is None:
        return decide()
    key = launch.once(what)
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
