"""A thousand ranks at one store: each is a thread that does what a rank does there, by the program's own functions.

They meet, agree as a start does, watch each other, and hear of a failure or find the rank that hangs. There is no
training and no process group, so a thousand ranks fit into one process. Its figures are those of all ranks together,
and they share two processors: on real machines each rank has its own.
"""

from __future__ import annotations

import os
import threading
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any
from unittest.mock import patch

from scripts.control_plane.counting import Ledger
from scripts.control_plane.ranks_as_threads import become_many_ranks, connect_without_signals, free_address, in_threads
from trainer.launch import failure
from trainer.launch.hang_detection import RankWatchdog
from trainer.launch.main_thread_watchdog import RankProgress
from trainer.launch.rendezvous import Launch
from trainer.launch.stop_signals import StopRequest
from trainer.launch.store_collectives import broadcast_from_main, run_on_all_ranks, run_one_per_node_first

NODE = 8  # ranks of a machine
BROKEN = 3  # the rank that fails, or hangs
_PATIENCE = 4.0  # seconds that a simulated step may take
_GIVEN_UP = 120.0  # seconds


def run_at_store(size: int, folder: Path, ledger: Ledger, hangs: bool) -> dict[str, Any]:
    """Start so many ranks; rank 3 fails, or hangs. When each phase was done on all, in seconds, and what was found."""
    become_many_ranks(ledger)
    address, everybody, began = free_address(), threading.Barrier(size + 1, timeout=_GIVEN_UP), time.monotonic()
    heard: dict[int, tuple[float, str]] = {}  # rank → when it heard how the run ends, and what
    broken = threading.Event()

    def run(rank: int) -> None:
        launch = Launch(rank, size, rank % NODE, NODE, address=address)
        start_run(launch)
        request = connect_without_signals(StopRequest(launch, folder))
        with HearingWatchdog(launch, folder, request, partial(_progress, rank, broken if hangs else None), heard):
            everybody.wait()
            broken.wait()
            if rank == BROKEN and not hangs:
                failure.claim_first_failure(launch.store(), launch, "an error", rank)
            _wait_until(lambda: rank in heard)

    with patch.object(failure, "exit_after"), patch.object(failure, "report_failure"):
        ranks = threading.Thread(target=in_threads, args=(size, run))
        ranks.start()
        everybody.wait()
        started, files = time.monotonic(), len(os.listdir("/proc/self/fd"))
        time.sleep(5.0)  # the watch as it is while a run trains
        broke = time.monotonic()
        broken.set()
        _wait_until(lambda: len(heard) == size)
    known = max(when for when, _ in heard.values())
    return {
        "ranks": size,
        "start_s": round(started - began, 2),
        "known_s": round(known - broke - (_PATIENCE if hangs else 0.0), 2),
        "known_by": len(heard),
        "reason": heard[0][1],
        "open_files": files,
    }


def start_run(launch: Launch) -> None:
    """What all ranks agree on before there is a process group, as a training does."""
    launch.store()
    broadcast_from_main(launch, "run-folder", lambda: "runs/first")
    broadcast_from_main(launch, "place", lambda: None)
    with patch("trainer.launch.store_collectives.machine_id", lambda: f"node-{launch.rank // NODE}"):
        run_one_per_node_first(launch, "data", lambda: None)
    broadcast_from_main(launch, "folder", lambda: {"path": "runs/first", "holder": "node-0 1"})
    run_on_all_ranks(launch, "folder-seen", lambda: None)
    broadcast_from_main(launch, "resume", lambda: ["fp32", None, []])


class HearingWatchdog(RankWatchdog):
    """The watchdog of a rank that is a thread: it notes what it would end its process with."""

    def __init__(
        self, launch: Launch, folder: Path, request: StopRequest, progress: Any, heard: dict[int, Any]
    ) -> None:
        super().__init__(launch, folder, request, progress)
        self._heard = heard

    def _run_failure(self) -> failure.Failure | None:
        first = super()._run_failure()
        if first is not None:
            self._heard.setdefault(self._launch.rank, (time.monotonic(), first.reason))
            self._over.set()
        return first

    def _log_stacks(self, occasion: str) -> str:
        return "a line"  # the threads of this process are those of all ranks

    def _leave(self, first: failure.Failure, roll_call: Any) -> Any:
        self._heard.setdefault(self._launch.rank, (time.monotonic(), first.reason))
        self._over.set()


def _progress(rank: int, hung: threading.Event | None) -> RankProgress:
    """How far a rank is: all do a step each second; once it hangs, the others wait in the step that it does not do."""
    step = int(time.monotonic()) if hung is None or not hung.is_set() else 0 if rank == BROKEN else 1
    return RankProgress(step, step, _PATIENCE, 60.0)


def _wait_until(condition: Callable[[], bool]) -> None:
    until = time.monotonic() + _GIVEN_UP
    while not condition() and time.monotonic() < until:
        time.sleep(0.1)
