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
from datetime import timedelta
from functools import lru_cache
from typing import TYPE_CHECKING, TypeVar

from trainer.meeting import shared_file
from trainer.refusal import Refusal

if TYPE_CHECKING:
    from torch.distributed import Store

    from trainer.launch import Launch

T = TypeVar("T")
_LOOK = 0.1  # seconds between two looks at the store, at most; the first follow one another faster
_PARTING = 5.0  # seconds that rank 0 waits for the others to leave; one that was killed does not say so
_rounds: dict[Launch, Store] = {}  # those that this process has met in


@lru_cache(maxsize=1)
def connected(launch: Launch) -> Store:
    """The store as it is, with all that other rounds have left in it. Refusal where it cannot be reached."""
    from torch.distributed import FileStore, TCPStore

    path = shared_file(launch.address)
    if path is not None:
        store = FileStore(str(path), -1)  # -1: nobody counts its users and removes it
        store.set_timeout(launch.patience)
        return store
    host, port = launch.address.rsplit(":", 1)
    serves = launch.is_main and not launch.hosted
    try:
        return TCPStore(
            host, int(port), launch.world_size, serves, launch.patience, wait_for_workers=False, multi_tenant=True
        )
    except RuntimeError as error:  # DistNetworkError: port taken, host unknown, nobody answers
        what = "serve" if serves else "reach"
        raise Refusal(f"cannot {what} the store at {launch.address}: {str(error).splitlines()[0]}") from error


def store_of_round(launch: Launch, patience: timedelta) -> Store:
    """The part of the store that belongs to this round; waits for all processes where they have not met yet.

    Refusal that names who did not come within the patience.
    """
    from torch.distributed import PrefixStore

    known = _rounds.get(launch)
    if known is None:
        store = connected(launch)
        try:
            nonce = (_call if launch.is_main else _answer)(store, launch, time.monotonic() + patience.total_seconds())
        except RuntimeError as error:  # the launcher went with its store; a file that is none of a store's
            raise Refusal(f"cannot meet at {launch.address}: {str(error).splitlines()[0]}") from error
        known = _rounds[launch] = PrefixStore(_round(launch, nonce), store)
    return known


def part() -> None:
    """Leave the rounds that this process was in. Where rank 0 serves the store, it stays until the others have left.

    Otherwise they would lose it while they still read what was decided last: a refusal, that nothing is left to do.
    """
    for launch, store in _rounds.items():
        with contextlib.suppress(RuntimeError):  # it is gone already
            if launch.world_size > 1 and not launch.hosted:
                _say_goodbye(store, launch)
    _rounds.clear()


def _say_goodbye(store: Store, launch: Launch) -> None:
    if launch.is_main:
        others = [f"bye-{rank}" for rank in range(1, launch.world_size)]
        _until(lambda: store.check(others) or None, time.monotonic() + _PARTING)
    else:
        store.set(f"bye-{launch.rank}", "")


def _call(store: Store, launch: Launch, deadline: float) -> str:
    """Rank 0: draw the nonce, wait for every greeting, answer with all tokens."""
    nonce = secrets.token_hex(8)
    greetings = [_greeting(launch, nonce, rank) for rank in range(1, launch.world_size)]
    store.set(_nonce(launch), nonce)
    if not _until(lambda: not greetings or store.check(greetings) or None, deadline):
        missing = [rank for rank, key in enumerate(greetings, 1) if not store.check([key])]
        shown = ", ".join(map(str, missing[:16])) + (" …" if len(missing) > 16 else "")
        raise Refusal(f"rank {shown} of {launch.world_size} did not come to {launch.address} in time")
    tokens = [token.decode() for token in store.multi_get(greetings)] if greetings else []
    store.set(f"{_round(launch, nonce)}/go", json.dumps(tokens))
    return nonce


def _answer(store: Store, launch: Launch, deadline: float) -> str:
    """Any other rank: greet the nonce that stands there, until an answer repeats this rank's own token."""
    token, greeted = secrets.token_hex(8), ""

    def look() -> str | None:
        nonlocal greeted
        if not store.check([_nonce(launch)]):
            return None
        nonce = store.get(_nonce(launch)).decode()
        if nonce != greeted:
            store.set(_greeting(launch, nonce, launch.rank), token)
            greeted = nonce
        go = f"{_round(launch, nonce)}/go"
        return nonce if store.check([go]) and json.loads(store.get(go))[launch.rank - 1] == token else None

    nonce = _until(look, deadline)
    if nonce is None:
        said = "its call was never answered" if greeted else "it did not come"
        raise Refusal(f"rank {launch.rank} of {launch.world_size} waited for rank 0 at {launch.address}: {said}")
    return nonce


def _nonce(launch: Launch) -> str:
    """Where all look. What is known to differ between rounds is in the name, so that fewer are mistaken."""
    return f"trainer/{launch.run_id}/attempt-{launch.attempt}/{launch.world_size}-processes"


def _round(launch: Launch, nonce: str) -> str:
    return f"trainer/{launch.run_id}/{nonce}"


def _greeting(launch: Launch, nonce: str, rank: int) -> str:
    return f"{_round(launch, nonce)}/hello/{rank}"


def _until(look: Callable[[], T | None], deadline: float) -> T | None:
    """Look again and again. Not the store's own waiting: its timeouts leave warnings, and two keys are watched here."""
    pause = 0.001
    while (found := look()) is None and time.monotonic() < deadline:
        time.sleep(pause)
        pause = min(_LOOK, 1.5 * pause)
    return found
