"""Which rank failed first: it claims the failure in the store of its round, so that the others can stay silent."""

from __future__ import annotations

import json
import time
from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING

from trainer.launch.launch import Launch

if TYPE_CHECKING:
    from torch.distributed import Store


@dataclass(frozen=True)
class Failure:
    """Who failed, when (seconds since the epoch of the clock) and why, in one line."""

    rank: int
    time: float
    reason: str


def claim(store: Store | None, launch: Launch, reason: str) -> Failure:
    """Claim to be the first that failed; what is returned is the failure that was first."""
    mine = Failure(launch.rank, time.time(), reason[:500])
    if store is None:
        return mine
    return _parsed(store.compare_set("failure", "", json.dumps(asdict(mine))))


def claimed(store: Store | None) -> Failure | None:
    """The failure that was claimed in this round, if any. Never waits."""
    if store is None or not store.check(["failure"]):
        return None
    return _parsed(store.get("failure"))


def tell(store: Store | None) -> None:
    """Say that the first failure has been printed in full."""
    if store is not None:
        store.set("failure-told", "yes")


def told(store: Store | None) -> bool:
    """Has the first failure been printed in full? Never waits."""
    return store is None or store.check(["failure-told"])


def _parsed(said: bytes) -> Failure:
    return Failure(**json.loads(said))
