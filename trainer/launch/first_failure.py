"""Who failed first: claimed in the store, where the first claim stays, so that one rank alone gives the account."""

from __future__ import annotations

import json
import time
from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING

from trainer.launch.rendezvous import Launch

if TYPE_CHECKING:
    from torch.distributed import Store


@dataclass(frozen=True)
class Failure:
    """Who failed first, when (seconds since the epoch of the clock) and why, in one line."""

    rank: int | None  # None: nobody knows which
    time: float
    reason: str
    teller: int  # the rank that claimed it and gives the account: who hangs cannot


def claim(store: Store | None, launch: Launch, reason: str) -> Failure:
    """Claim to be the first that failed; what is returned is the failure that was first."""
    return accuse(store, launch, reason, launch.rank)


def accuse(store: Store | None, launch: Launch, reason: str, rank: int | None) -> Failure:
    """Claim that this rank was the first that failed; what is returned is the failure that was first."""
    mine = Failure(rank, time.time(), reason[:500], launch.rank)
    if store is None:
        return mine
    return Failure(**json.loads(store.compare_set("failure", "", json.dumps(asdict(mine)))))


def claimed(store: Store | None) -> Failure | None:
    """The failure that was claimed in this round, if any. Never waits."""
    if store is None or not store.check(["failure"]):
        return None
    return Failure(**json.loads(store.get("failure")))
