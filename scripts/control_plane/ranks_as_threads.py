"""Ranks as threads of one process: each runs the whole program, `python -m trainer …` without its process.

torch can give each thread a world of its own (its tests do so), in which the program's process group is a real one of
gloo; so all that ranks say to each other goes through real sockets, and through a real store. Only the import of torch
and the composition of the configuration are done once for all. What a process has once is left out: signals, the files
for its output.
"""

from __future__ import annotations

import importlib
import resource
import socket
import threading
import traceback
from collections.abc import Callable, Sequence
from contextlib import ExitStack, nullcontext
from functools import lru_cache
from typing import Any
from unittest.mock import patch

import torch

from scripts.control_plane.counting import Ledger, count_collectives, count_store, make_repeatable
from trainer.api import build_decided_run
from trainer.configuration.compose import compose
from trainer.launch import rendezvous
from trainer.launch.rendezvous import Launch
from trainer.launch.stop_signals import StopRequest

# how torch's own tests have ranks as threads; nothing of it is public
threaded = importlib.import_module("torch.testing._internal.distributed.multi_threaded_pg")
c10d = importlib.import_module("torch._C._distributed_c10d")


_CONNECTING = threading.Lock()


def run_as_threads(size: int, words: Sequence[str], ledger: Ledger) -> list[Any]:
    """Run the program on so many ranks; each one's exit code, or its error."""
    become_many_ranks(ledger)
    words = [*words]
    cfg, address = compose(words), free_address()
    answers: list[Any] = [None] * size

    def run(rank: int) -> None:
        launch = Launch(rank, size, rank, size, address=address)
        try:
            parts = build_decided_run(words, launch, cfg)
            answers[rank] = parts.job(parts)
            if (store := launch.store()) is not None:
                rendezvous.leave_store(store, launch)  # as the process would, which ends
        except BaseException as error:  # of a thread nobody else would hear
            traceback.print_exc()
            answers[rank] = repr(error)

    with ExitStack() as patches:
        for name in ("trainer.jobs.fit.keep_freed_memory", "trainer.jobs.fit.rank_output.redirect_output"):
            patches.enter_context(patch(name))
        patches.enter_context(patch.object(StopRequest, "__enter__", connect_without_signals))
        patches.enter_context(patch.object(StopRequest, "__exit__"))
        in_threads(size, run)
    return answers


def in_threads(size: int, act: Callable[[int], None]) -> None:
    """Call `act` for each rank in a thread of its own; wait for all."""
    threads = [threading.Thread(target=act, args=(rank,), name=f"rank {rank}") for rank in range(size)]
    for thread in threads:
        threaded.ThreadLocalWorld._world.__dict__.pop("world", None)  # each rank begins with a world of its own
        thread.start()
    for thread in threads:
        thread.join()


def become_many_ranks(ledger: Ledger) -> None:
    """Make this process one that can be many ranks, and count what they send."""
    torch.set_num_threads(1)
    most = resource.getrlimit(resource.RLIMIT_NOFILE)[1]
    resource.setrlimit(resource.RLIMIT_NOFILE, (most, most))
    count_store(ledger)
    count_collectives(ledger)
    make_repeatable()
    connect = rendezvous.connect_store.__wrapped__

    def connect_in_turn(launch: Launch) -> Any:
        # torch opens a connection with the interpreter's lock held; of 256 at a time the last ones would give up
        with nullcontext() if launch.is_main else _CONNECTING:
            return connect(launch)

    # each rank has its own connection
    rendezvous.connect_store = lru_cache(maxsize=None)(connect_in_turn)
    c10d._set_thread_isolation_mode(True)  # a group's name is known in its thread alone
    threaded._install_threaded_pg()
    setattr(threading.Thread, "start", _start_in_same_world)  # noqa: B010


_start = threading.Thread.start


def _start_in_same_world(thread: threading.Thread) -> None:
    """A rank's threads (its watchdog, what writes a checkpoint) belong to its world."""
    world, run = threaded.ThreadLocalWorld()._get_world(), thread.run

    def run_there() -> None:
        threaded.ThreadLocalWorld._world.world = world
        run()

    thread.run = run_there  # type: ignore[method-assign]
    _start(thread)


def connect_without_signals(self: StopRequest) -> StopRequest:
    """Enter a request to stop in a thread that is not the main one: it hears no signals, but has its connection."""
    store = self._launch.store()
    with _CONNECTING:
        self._store = store.clone() if store is not None else None
    return self


def free_address() -> str:
    """Where a store of this machine can be served."""
    with socket.create_server(("127.0.0.1", 0)) as free:
        return f"127.0.0.1:{free.getsockname()[1]}"
