"""`Launch`: which process of a launch this is, of how many; and the store where the processes of one round meet.

A round is one start of all processes. Under torchrun several rounds share a store: a restarted attempt, and with
`--nnodes=1:2` every change of the machines, which does not even change the attempt's number; a shared file outlives
runs. A rank that reads a dead round's keys connects to the dead (pytorch/pytorch#135712: torch's own rendezvous does).
So keys are read only under a nonce, a random number of rank 0 for this round:

1. rank 0 writes its nonce where all look;
2. every other rank greets it there with a token of its own;
3. rank 0 answers each with its token. A rank that does not get its own has greeted a dead round's nonce, and looks
   again: the living rank 0 will have replaced it by then.
"""

from __future__ import annotations

import contextlib
import errno
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
# of each rank to rank 0: four to the store, its own and those of the threads that watch and listen; one of gloo, as the
# main rank gathers
_CONNECTIONS = 5
_OWN_FILES = 512  # beside them: data, logs, checkpoints, other ranks
ANSWER_TIMEOUT = timedelta(seconds=10)  # in which a store that listens answers, however busy its machine is
PORT_ADVICE = "end that program, or give all ranks another MASTER_PORT (or another port in distributed.init_method)"


def open_file_store(path: str, patience: timedelta) -> Store:
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


def serve_tcp_store(host: str, port: int, size: int, patience: timedelta) -> Store:
    """The store that this process serves to `size` processes. Refusal where the port is not free."""
    from torch.distributed import TCPStore

    allow_open_files(_CONNECTIONS * size + _OWN_FILES)
    try:
        # torch itself would listen on all interfaces, and the store asks for no password. All ranks may come at once:
        # who finds the queue full (128 by default) comes again after seconds
        queue = _CONNECTIONS * size
        listener = socket.create_server((host, port), backlog=queue).detach() if host == LOOPBACK else None
        return TCPStore(
            host, port, size, True, patience, wait_for_workers=False, multi_tenant=True, master_listen_fd=listener
        )
    except (RuntimeError, OSError) as error:  # of torch a DistNetworkError
        taken = "EADDRINUSE" in str(error) or getattr(error, "errno", None) == errno.EADDRINUSE
        why = f"port {port} of this machine is in use" if taken else first_line(error)
        raise Refusal(f"cannot serve the store at {host}:{port}: {why}; {PORT_ADVICE}") from error


def connect_tcp_store(host: str, port: int, size: int, patience: timedelta) -> Store:
    """The store that another process serves, once somebody listens there. Refusal where that is no store."""
    from torch.distributed import TCPStore

    if poll(lambda: _is_listening(host, port), patience.total_seconds()) is None:
        raise Refusal(f"cannot reach the store at {host}:{port}: nobody listens there")
    # where another program takes the connection and says nothing, torch waits whatever its timeout is
    store = partial(TCPStore, host, port, size, False, ANSWER_TIMEOUT, wait_for_workers=False, multi_tenant=True)
    try:
        answer = with_timeout(1.5 * ANSWER_TIMEOUT.total_seconds(), store)
    except (RuntimeError, TimeoutError) as error:
        why = f"what listens there is another program ({first_line(error)})"
        raise Refusal(f"cannot reach the store at {host}:{port}: {why}; {PORT_ADVICE}") from error
    answer.set_timeout(patience)
    return answer


def _is_listening(host: str, port: int) -> bool | None:
    try:
        with socket.create_connection((host, port), timeout=5):
            return True
    except OSError:  # not yet, or the host has no name yet
        return None


def allow_open_files(count: int) -> None:
    """Let this process open so many files and connections. Refusal where the system does not allow that."""
    import resource  # Windows has none

    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    most = count if hard == resource.RLIM_INFINITY else hard
    if count > most:
        raise Refusal(
            f"rank 0 serves the store and needs {count:,} open files and connections; this system allows a process"
            f" {hard:,} (ulimit -Hn). Raise that limit, or start with torchrun, which serves the store itself"
        )
    if soft != resource.RLIM_INFINITY and soft < count:
        resource.setrlimit(resource.RLIMIT_NOFILE, (count, hard))


STORE_TIMEOUT = timedelta(minutes=30)  # how long a process waits at the store for another, which may still download
_LOOKS_A_SECOND = 1024  # of all ranks together, while they wait for the last one
_FAREWELL_TIMEOUT = 5.0  # seconds that rank 0 waits for the others to leave; one that was killed does not say so


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
    launcher_serves_store: bool = False  # otherwise rank 0 does
    # of `processes=N` or of a sweep: it has started this process and waits for it; once it is gone, this one stops
    waiting_parent: int | None = None
    from_launcher: bool = field(default=False, compare=False)  # the environment says who it is, be it the only one
    owns_process: bool = False  # `python -m trainer`: the process is the run's own, and may be ended with it
    timeout: timedelta = field(default=STORE_TIMEOUT, compare=False)

    @property
    def is_main(self) -> bool:
        """Is this rank 0, which prints and decides?"""
        return self.rank == 0

    @property
    def is_local_child(self) -> bool:
        """Is this a rank of `processes=N`? The parent sets RANK for it; a sweep, a parent too, does not."""
        return self.waiting_parent is not None and self.from_launcher

    @property
    def restarted_by_launcher(self) -> bool:
        """Does a launcher restart every process that does not exit with 0? Then a stop as asked must exit with 0."""
        return bool(self.run_id)

    @property
    def rank0_serves_store(self) -> bool:
        """Does rank 0 serve the store? Then nothing of an earlier round is in it."""
        return not self.launcher_serves_store and not self.address.startswith("file://")

    @property
    def requeued(self) -> bool:
        """Has a scheduler, or the parent of `processes=N`, run this very command before? Then its run is continued."""
        return self.attempt > 0 and not self.restarted_by_launcher

    def store(self, timeout: timedelta | None = None) -> Store | None:
        """The key-value store of this round's processes alone; None where there is none. Waits for all, the first time.

        Refusal that names the ranks that did not come in time.
        """
        if not self.address:
            return None
        if self not in _joined_rounds:
            seconds = (timeout or self.timeout).total_seconds()
            try:
                _joined_rounds[self] = (_host_round if self.is_main else _join_round)(self, seconds)
            except RuntimeError as error:  # the launcher went with its store; a file that is none of a store's
                raise Refusal(f"cannot meet at {self.address}: {first_line(error)}") from error
        return _joined_rounds[self]

    def launcher_store(self) -> Store | None:
        """The store that the launcher keeps for all its rounds, restarts included; None where it keeps none."""
        return connect_store(self) if self.launcher_serves_store else None


_joined_rounds: dict[Launch, Store] = {}  # of this process


@lru_cache(maxsize=1)
def connect_store(launch: Launch) -> Store:
    """The store with all keys that other rounds have left in it. Refusal where it cannot be reached."""
    if launch.address.startswith("file://"):
        return open_file_store(launch.address.removeprefix("file://"), launch.timeout)
    host, port = launch.address.rsplit(":", 1)
    # torch does not wait here for all workers: too few of a dead round would come, and the greetings tell who is there
    open_store = serve_tcp_store if launch.is_main and not launch.launcher_serves_store else connect_tcp_store
    return open_store(host, int(port), launch.world_size, launch.timeout)


def say_goodbye() -> None:
    """Leave the rounds that this process was in. Where rank 0 serves the store, it stays until the others have left.

    Otherwise they would lose it while they still read what was decided last: a refusal, that nothing is left to do.
    """
    for launch, store in _joined_rounds.items():
        if launch.world_size > 1 and not launch.launcher_serves_store:
            with contextlib.suppress(RuntimeError):  # the store is gone already
                leave_store(store, launch)
    _joined_rounds.clear()


def leave_store(store: Store, launch: Launch) -> None:
    """Say goodbye there; rank 0 waits a while for the others."""
    if launch.is_main:
        poll(lambda: store.add("byes", 0) == launch.world_size - 1 or None, _FAREWELL_TIMEOUT)
    else:
        store.add("byes", 1)


def _host_round(launch: Launch, seconds: float) -> Store:
    """Rank 0: draw the nonce, wait for every greeting, answer each."""
    from torch.distributed import PrefixStore

    nonce, store = secrets.token_hex(8), connect_store(launch)
    meeting = PrefixStore(_round_prefix(launch, nonce), store)
    greetings = [f"hello/{rank}" for rank in range(1, launch.world_size)]
    store.set(_nonce_key(launch), nonce)
    # a number first: to look for each of a thousand keys ten times a second would take the store's time
    if not poll(lambda: (meeting.add("hellos", 0) >= len(greetings) and meeting.check(greetings)) or None, seconds):
        missing = [rank for rank, key in enumerate(greetings, 1) if not meeting.check([key])]
        ranks = ", ".join(map(str, missing[:16])) + (" …" if len(missing) > 16 else "")
        raise Refusal(f"rank {ranks} of {launch.world_size} did not come to {launch.address} in time")
    # two requests for all, and each rank reads its own answer alone
    if greetings:
        answers = [_answer_key(rank) for rank in range(1, launch.world_size)]
        meeting.multi_set(answers, meeting.multi_get(greetings))  # type: ignore[attr-defined]  # torch's stubs lack it
    return meeting


def _join_round(launch: Launch, seconds: float) -> Store:
    """Any other rank: greet the nonce that stands there, until an answer repeats this rank's own token."""
    from torch.distributed import DistStoreError, PrefixStore

    token, store, greeted = secrets.token_hex(8), connect_store(launch), b""
    answer = _answer_key(launch.rank)
    taken = f"another run, or another program of torch, meets at {launch.address} already; {PORT_ADVICE}"
    # a rank 0 that serves the store writes its nonce at once
    if (
        launch.rank0_serves_store
        and poll(lambda: store.check([_nonce_key(launch)]) or None, ANSWER_TIMEOUT.total_seconds()) is None
    ):
        raise Refusal(taken)

    def look() -> Store | None:
        nonlocal greeted
        if not store.check([_nonce_key(launch)]):
            return None
        nonce = store.get(_nonce_key(launch))
        meeting = PrefixStore(_round_prefix(launch, nonce.decode()), store)
        # a nonce that is new: of a dead round before, or of this one
        if nonce != greeted:
            meeting.set(f"hello/{launch.rank}", token)
            meeting.add("hellos", 1)
            greeted = nonce
            if launch.rank0_serves_store:  # no dead round is in it: this greeting is answered, or none
                with contextlib.suppress(DistStoreError):  # the time is up
                    meeting.wait([answer], timedelta(seconds=seconds))
        if not meeting.check([answer]):
            return None
        if meeting.get(answer).decode() == token:
            return meeting
        # an answer without this token was given to a dead process; in a store that is as young as the round, to a
        # living one
        if launch.rank0_serves_store:
            raise Refusal(taken)
        return None

    # so many ranks that look ten times a second would keep the store busy with nothing else
    meeting = poll(look, seconds, most=max(0.1, launch.world_size / _LOOKS_A_SECOND))
    if meeting is None:
        why = "its call was never answered" if greeted else "it did not come"
        raise Refusal(f"rank {launch.rank} of {launch.world_size} waited for rank 0 at {launch.address}: {why}")
    return meeting


def _answer_key(rank: int) -> str:
    """Where rank 0 answers this rank."""
    return f"go/{rank}"


def _nonce_key(launch: Launch) -> str:
    """The key of the nonce. What is known to differ between rounds is in it, so that few ranks read a dead one."""
    return f"trainer/{launch.run_id}/attempt-{launch.attempt}/{launch.world_size}-processes"


def _round_prefix(launch: Launch, nonce: str) -> str:
    return f"trainer/{launch.run_id}/{nonce}"
