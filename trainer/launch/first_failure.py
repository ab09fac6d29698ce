"""Which rank failed first; and errors that are only what other ranks see of it."""

from __future__ import annotations

import json
import re
import time
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING

from trainer.launch.rendezvous import Launch

if TYPE_CHECKING:
    from torch.distributed import Store


GONE = "Another process of the run ended without a message: it was killed, perhaps because memory ran out."
# What a rank sees when the fault is another's: gloo's, NCCL's and the store's words for a connection that broke, and
# what they say about that other one, in case it never says anything itself.
_ECHOES = {
    r"connection (was )?(closed|reset)|closed by peer|broken pipe|remote process exited": GONE,
    r"socket timeout|timed out( waiting|!)|timeout[\s\S]*NCCL|(NCCL|ProcessGroup)[\s\S]*(timed out|timeout)": (
        "Another process of the run stopped answering: it hangs, or does something else than this one."
    ),
    r"connection refused|socket closed|connectFullMesh|pair closure|NCCL|ProcessGroup|failed to (send|recv)": "",
}


def about_peer(error: BaseException) -> str | None:
    """What an error says about another rank, empty if nothing certain; None where it is this one's own."""
    texts = [str(one) for one in chain(error) if isinstance(one, RuntimeError | OSError)]
    found = (said for pattern, said in _ECHOES.items() if re.search(pattern, "\n".join(texts), re.IGNORECASE))
    return next(found, None)


def chain(error: BaseException) -> Iterator[BaseException]:
    """An error and what it followed from."""
    one: BaseException | None = error
    while one is not None:
        yield one
        one = one.__cause__ or one.__context__


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
