"""How the processes of one round meet at a store, and get a part of it that no other round has written to.

A round is one start of all processes. Under torchrun several rounds share a store: a restarted attempt, and with
`--nnodes=1:2` every change of the machines, which does not even change the attempt's number; a shared file outlives
runs. Whoever reads a dead round's keys connects to the dead (pytorch/pytorch#135712: torch's own rendezvous does so).
So nothing is read but under a nonce that rank 0 has drawn for this round:

1. rank 0 writes its nonce where all look;
2. every other rank greets it there with a token of its own;
3. rank 0 answers with all tokens. Who does not find its own in the answer has greeted a dead round's nonce, and looks
   again: the living rank 0 will have replaced it by then.
"""

from __future__ import annotations

import contextlib
import json
import secrets
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from datetime import timedelta
from functools import lru_cache
from typing import TYPE_CHECKING, TypeVar

from trainer.launch.address import shared_file
from trainer.refusal import Refusal

if TYPE_CHECKING:
    from torch.distributed import Store


T = TypeVar("T")
_LOOK = 0.1  # seconds between two looks at the store, at most; the first follow one another faster
_PARTING = 5.0  # seconds that rank 0 waits for the others to leave; one that was killed does not say so


@dataclass(frozen=True)
class Rendezvous:
    """Which process of how many comes to which store, and how often they were started before."""

    rank: int
    world_size: int
    attempt: int
    run_id: str
    address: str  # host:port, or file:///path
    hosted: bool  # the launcher serves the store; otherwise rank 0 does
    patience: timedelta = field(compare=False)  # for a process that still imports or downloads

    @property
    def is_main(self) -> bool:
        """Is this rank 0, which draws the nonce?"""
        return self.rank == 0


_rounds: dict[Rendezvous, Store] = {}  # those that this process has met in


@lru_cache(maxsize=1)
def connected(own: Rendezvous) -> Store:
    """The store as it is, with all that other rounds have left in it. Refusal where it cannot be reached."""
    from torch.distributed import FileStore, TCPStore

    path = shared_file(own.address)
    if path is not None:
        store = FileStore(str(path), -1)  # -1: nobody counts its users and removes it
        store.set_timeout(own.patience)
        return store
    host, port = own.address.rsplit(":", 1)
    serves = own.is_main and not own.hosted
    try:
        return TCPStore(
            host, int(port), own.world_size, serves, own.patience, wait_for_workers=False, multi_tenant=True
        )
    except RuntimeError as error:  # DistNetworkError: port taken, host unknown, nobody answers
        what = "serve" if serves else "reach"
        raise Refusal(f"cannot {what} the store at {own.address}: {str(error).splitlines()[0]}") from error


def store_of_round(own: Rendezvous, patience: timedelta) -> Store:
    """The part of the store that belongs to this round; waits for all processes where they have not met yet.

    Refusal that names who did not come within the patience.
    """
    from torch.distributed import PrefixStore

    known = _rounds.get(own)
    if known is None:
        store = connected(own)
        try:
            nonce = (_call if own.is_main else _answer)(store, own, time.monotonic() + patience.total_seconds())
        except RuntimeError as error:  # the launcher went with its store; a file that is none of a store's
            raise Refusal(f"cannot meet at {own.address}: {str(error).splitlines()[0]}") from error
        known = _rounds[own] = PrefixStore(_round(own, nonce), store)
    return known


def say_goodbye() -> None:
    """Leave the rounds that this process was in. Where rank 0 serves the store, it stays until the others have left.

    Otherwise they would lose it while they still read what was decided last: a refusal, that nothing is left to do.
    """
    for own, store in _rounds.items():
        with contextlib.suppress(RuntimeError):  # it is gone already
            if own.world_size > 1 and not own.hosted:
                _wave(store, own)
    _rounds.clear()


def _wave(store: Store, own: Rendezvous) -> None:
    if own.is_main:
        others = [f"bye-{rank}" for rank in range(1, own.world_size)]
        _until(lambda: store.check(others) or None, time.monotonic() + _PARTING)
    else:
        store.set(f"bye-{own.rank}", "")


def _call(store: Store, own: Rendezvous, deadline: float) -> str:
    """Rank 0: draw the nonce, wait for every greeting, answer with all tokens."""
    nonce = secrets.token_hex(8)
    greetings = [_greeting(own, nonce, rank) for rank in range(1, own.world_size)]
    store.set(_nonce(own), nonce)
    if not _until(lambda: not greetings or store.check(greetings) or None, deadline):
        missing = [rank for rank, key in enumerate(greetings, 1) if not store.check([key])]
        shown = ", ".join(map(str, missing[:16])) + (" …" if len(missing) > 16 else "")
        raise Refusal(f"rank {shown} of {own.world_size} did not come to {own.address} in time")
    tokens = [token.decode() for token in store.multi_get(greetings)] if greetings else []
    store.set(f"{_round(own, nonce)}/go", json.dumps(tokens))
    return nonce


def _answer(store: Store, own: Rendezvous, deadline: float) -> str:
    """Any other rank: greet the nonce that stands there, until an answer repeats this rank's own token."""
    token, greeted = secrets.token_hex(8), ""

    def look() -> str | None:
        nonlocal greeted
        if not store.check([_nonce(own)]):
            return None
        nonce = store.get(_nonce(own)).decode()
        if nonce != greeted:
            store.set(_greeting(own, nonce, own.rank), token)
            greeted = nonce
        go = f"{_round(own, nonce)}/go"
        return nonce if store.check([go]) and json.loads(store.get(go))[own.rank - 1] == token else None

    nonce = _until(look, deadline)
    if nonce is None:
        said = "its call was never answered" if greeted else "it did not come"
        raise Refusal(f"rank {own.rank} of {own.world_size} waited for rank 0 at {own.address}: {said}")
    return nonce


def _nonce(own: Rendezvous) -> str:
    """Where all look. What is known to differ between rounds is in the name, so that fewer are mistaken."""
    return f"trainer/{own.run_id}/attempt-{own.attempt}/{own.world_size}-processes"


def _round(own: Rendezvous, nonce: str) -> str:
    return f"trainer/{own.run_id}/{nonce}"


def _greeting(own: Rendezvous, nonce: str, rank: int) -> str:
    return f"{_round(own, nonce)}/hello/{rank}"


def _until(look: Callable[[], T | None], deadline: float) -> T | None:
    """Look again and again. Not the store's own waiting: its timeouts leave warnings, and two keys are watched here."""
    pause = 0.001
    while (found := look()) is None and time.monotonic() < deadline:
        time.sleep(pause)
        pause = min(_LOOK, 1.5 * pause)
    return found
