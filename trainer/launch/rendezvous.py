"""Which process of a launch this is, of how many, and the store where all of one round meet.

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
import errno
import json
import secrets
import socket
from dataclasses import dataclass, field
from datetime import timedelta
from functools import lru_cache, partial
from typing import TYPE_CHECKING

from trainer.launch.polling import poll, with_timeout
from trainer.messages import Refusal, first_line

if TYPE_CHECKING:
    from torch.distributed import Store


LOOPBACK = "127.0.0.1"  # where nobody else's machine gets in
ANSWER = timedelta(seconds=10)  # in which a store that listens answers, however busy its machine is
ELSEWHERE = "end that program, or give all ranks another MASTER_PORT (or another port in distributed.init_method)"


def in_file(path: str, patience: timedelta) -> Store:
    """The store in a file that all processes see. Refusal where there can be none."""
    from torch.distributed import FileStore

    try:
        with open(path, "ab"):  # in a folder that is not there torch itself would try for as long as it may
            pass
    except OSError as error:
        raise Refusal(
            f"distributed.init_method=file://{path}: {error.strerror}; give a file in a folder that all processes share"
        ) from None
    store = FileStore(path, -1)  # -1: nobody counts its users and removes it
    store.set_timeout(patience)
    return store


def served(host: str, port: int, size: int, patience: timedelta) -> Store:
    """The store that this process serves to `size` processes. Refusal where the port is not free."""
    from torch.distributed import TCPStore

    try:
        # torch itself would listen on all interfaces, and the store asks for no password
        door = socket.create_server((host, port)).detach() if host == LOOPBACK else None
        return TCPStore(
            host, port, size, True, patience, wait_for_workers=False, multi_tenant=True, master_listen_fd=door
        )
    except (RuntimeError, OSError) as error:  # of torch a DistNetworkError
        taken = "EADDRINUSE" in str(error) or getattr(error, "errno", None) == errno.EADDRINUSE
        why = f"port {port} of this machine is in use" if taken else first_line(error)
        raise Refusal(f"cannot serve the store at {host}:{port}: {why}; {ELSEWHERE}") from error


def reached(host: str, port: int, size: int, patience: timedelta) -> Store:
    """The store that another process serves, once somebody listens there. Refusal where that is no store."""
    from torch.distributed import TCPStore

    if poll(lambda: _listens(host, port), patience.total_seconds()) is None:
        raise Refusal(f"cannot reach the store at {host}:{port}: nobody listens there")
    # where another program takes the connection and says nothing, torch waits whatever its timeout is
    store = partial(TCPStore, host, port, size, False, ANSWER, wait_for_workers=False, multi_tenant=True)
    try:
        answer = with_timeout(1.5 * ANSWER.total_seconds(), store)
    except (RuntimeError, TimeoutError) as error:
        why = f"what listens there is another program ({first_line(error)})"
        raise Refusal(f"cannot reach the store at {host}:{port}: {why}; {ELSEWHERE}") from error
    answer.set_timeout(patience)
    return answer


def _listens(host: str, port: int) -> bool | None:
    try:
        with socket.create_connection((host, port), timeout=5):
            return True
    except OSError:  # nobody does yet, or the host has no name yet
        return None


PATIENCE = timedelta(minutes=30)  # how long one process waits at the store for another that still imports or downloads
_PARTING = 5.0  # seconds that rank 0 waits for the others to leave; one that was killed does not say so


@dataclass(frozen=True)
class Launch:
    """One process of a launch. The defaults are a process that was started alone."""

    rank: int = 0
    world_size: int = 1
    local_rank: int = 0
    local_world_size: int = 1
    attempt: int = 0  # how often torchrun or `processes=N` has started the ranks again, or Slurm requeued the job
    run_id: str = ""  # of torchrun, the same for all its restarts; empty: nothing restarts this process
    address: str = ""  # host:port of the store, or file:///path; empty: there is none
    hosted: bool = False  # the launcher serves the store; otherwise rank 0 does
    watched: bool = False  # `processes=N` or a sweep has started it and waits for it: once that is gone, it stops
    told: bool = field(default=False, compare=False)  # the environment says who it is, be it the only one
    ours: bool = False  # `python -m trainer`: the process is the run's own, and may be ended with it
    patience: timedelta = field(default=PATIENCE, compare=False)

    @property
    def is_main(self) -> bool:
        """Is this the one process that prints and decides?"""
        return self.rank == 0

    @property
    def local(self) -> bool:
        """Is this one of the processes of `processes=N`? Their parent tells each who it is, a sweep does not."""
        return self.watched and self.told

    @property
    def restarts(self) -> bool:
        """Does a launcher restart whatever does not exit with 0? A stop that was asked for must exit with 0 there."""
        return bool(self.run_id)

    @property
    def own_store(self) -> bool:
        """Does rank 0 serve the store? Then nothing of an earlier round is in it."""
        return not self.hosted and not self.address.startswith("file://")

    @property
    def requeued(self) -> bool:
        """Has a scheduler, or who started the ranks, run this very command before? Then that is to be continued."""
        return self.attempt > 0 and not self.restarts

    def store(self, patience: timedelta | None = None) -> Store | None:
        """The key-value store of this round's processes alone; None where there is none. Waits for all, the first time.

        Refusal that names who did not come within the patience.
        """
        if not self.address:
            return None
        if self not in _rounds:
            seconds = (patience or self.patience).total_seconds()
            try:
                _rounds[self] = (_call if self.is_main else _answer)(self, seconds)
            except RuntimeError as error:  # the launcher went with its store; a file that is none of a store's
                raise Refusal(f"cannot meet at {self.address}: {first_line(error)}") from error
        return _rounds[self]

    def lasting_store(self) -> Store | None:
        """The store that the launcher keeps over all its rounds, restarts included; None where it keeps none."""
        return connected(self) if self.hosted else None


_rounds: dict[Launch, Store] = {}  # those that this process has met in


@lru_cache(maxsize=1)
def connected(launch: Launch) -> Store:
    """The store as it is, with all that other rounds have left in it. Refusal where it cannot be reached."""
    if launch.address.startswith("file://"):
        return in_file(launch.address.removeprefix("file://"), launch.patience)
    host, port = launch.address.rsplit(":", 1)
    # nobody is waited for here: of a dead round's processes too few would come, and the nonce tells who is there
    get = served if launch.is_main and not launch.hosted else reached
    return get(host, int(port), launch.world_size, launch.patience)


def say_goodbye() -> None:
    """Leave the rounds that this process was in. Where rank 0 serves the store, it stays until the others have left.

    Otherwise they would lose it while they still read what was decided last: a refusal, that nothing is left to do.
    """
    for launch, store in _rounds.items():
        if launch.world_size > 1 and not launch.hosted:
            with contextlib.suppress(RuntimeError):  # it is gone already
                _wave(store, launch)
    _rounds.clear()


def _wave(store: Store, launch: Launch) -> None:
    if launch.is_main:
        others = [f"bye-{rank}" for rank in range(1, launch.world_size)]
        poll(lambda: store.check(others) or None, _PARTING)
    else:
        store.set(f"bye-{launch.rank}", "")


def _call(launch: Launch, seconds: float) -> Store:
    """Rank 0: draw the nonce, wait for every greeting, answer with all tokens."""
    from torch.distributed import PrefixStore

    nonce, store = secrets.token_hex(8), connected(launch)
    meeting = PrefixStore(_round(launch, nonce), store)
    greetings = [f"hello/{rank}" for rank in range(1, launch.world_size)]
    store.set(_place(launch), nonce)
    if not poll(lambda: not greetings or meeting.check(greetings) or None, seconds):
        missing = [rank for rank, key in enumerate(greetings, 1) if not meeting.check([key])]
        shown = ", ".join(map(str, missing[:16])) + (" …" if len(missing) > 16 else "")
        raise Refusal(f"rank {shown} of {launch.world_size} did not come to {launch.address} in time")
    tokens = [token.decode() for token in meeting.multi_get(greetings)] if greetings else []
    meeting.set("go", json.dumps(tokens))
    return meeting


def _answer(launch: Launch, seconds: float) -> Store:
    """Any other rank: greet the nonce that stands there, until an answer repeats this rank's own token."""
    from torch.distributed import PrefixStore

    token, store, greeted = secrets.token_hex(8), connected(launch), b""
    taken = f"another run, or another program of torch, meets at {launch.address} already; {ELSEWHERE}"
    # who serves the store writes there at once
    if launch.own_store and poll(lambda: store.check([_place(launch)]) or None, ANSWER.total_seconds()) is None:
        raise Refusal(taken)

    def look() -> Store | None:
        nonlocal greeted
        if not store.check([_place(launch)]):
            return None
        nonce = store.get(_place(launch))
        meeting = PrefixStore(_round(launch, nonce.decode()), store)
        # a nonce that is new: of a dead round before, or of this one
        if nonce != greeted:
            meeting.set(f"hello/{launch.rank}", token)
            greeted = nonce
        if not meeting.check(["go"]):
            return None
        if json.loads(meeting.get("go"))[launch.rank - 1] == token:
            return meeting
        # an answer without this token was given to a dead process; in a store that is as young as the round, to a
        # living one
        if launch.own_store:
            raise Refusal(taken)
        return None

    meeting = poll(look, seconds)
    if meeting is None:
        said = "its call was never answered" if greeted else "it did not come"
        raise Refusal(f"rank {launch.rank} of {launch.world_size} waited for rank 0 at {launch.address}: {said}")
    return meeting


def _place(launch: Launch) -> str:
    """Where all look. What is known to differ between rounds is in the name, so that fewer are mistaken."""
    return f"trainer/{launch.run_id}/attempt-{launch.attempt}/{launch.world_size}-processes"


def _round(launch: Launch, nonce: str) -> str:
    return f"trainer/{launch.run_id}/{nonce}"
