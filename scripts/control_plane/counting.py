"""Counts what ranks send: requests to the store, and the collectives of control messages, each by phase and kind.

Nothing of the program is changed for it. `CountingStore` stands in front of torch's store and passes everything on;
gloo asks it from C++ as well. `count_collectives` puts a counter in front of torch's functions, so that those are seen
that torch calls itself, as it sends a Python value. Not seen is what torch sends from C++: the gradients of a step.

Who asks is read from the stack: the innermost function of the program that is no mere carrier is the purpose, the
outermost one that is known here is the phase.
"""

from __future__ import annotations

import os
import sys
import threading
from collections import Counter, defaultdict
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from datetime import timedelta
from functools import partial
from pathlib import Path
from time import perf_counter
from types import FrameType
from typing import Any, NamedTuple

import torch.distributed as dist

import trainer
from trainer.launch import rendezvous
from trainer.loop.trainer import Trainer
from trainer.strategies import rank_context

_ROOT = str(Path(trainer.__file__).parent)
# carry what others want to say
_CARRIERS = ("ranks.py", "buckets.py", "store_collectives.py", "polling.py", "rank_context.py", "process_group.py")
# a function of the program → the phase of a run that it is; the innermost counts
PHASES = {
    "rendezvous.store": "launch",
    "store_collectives.broadcast_from_main": "agreement",
    "store_collectives.run_on_all_ranks": "agreement",
    "store_collectives.gather_to_main": "agreement",
    "process_group.join_group": "joining",
    "multi_process.__enter__": "joining",
    "build_trainer.make_checkpoints": "joining",
    "hang_detection.register": "joining",
    "fit.record_start": "joining",
    "manager.newest": "resume",
    "trainer.resume": "resume",
    "build_trainer.make_trainer": "rehearsal",
    "evaluation.trial_evaluation": "rehearsal",
    "trainer.begin": "rehearsal",
    "trainer.evaluate": "evaluation",
    "rank_context.ask": "votes",
    "rank_context.now": "votes",
    "train_metrics.begin": "line",
    "replica_check._start": "copies",
    "replica_check.__init__": "rehearsal",
    "trainer.train_step": "step",
    "trainer.save": "save",
    "manager._write": "save",
    "trainer.fit": "save",
    "fit.record_end": "end",
    "process_group.leave_group": "end",
    "rendezvous.leave_store": "end",
    "hang_detection._listen": "watch",
    "hang_detection._call_roll": "hang",
    "hang_detection._answer": "hang",
    "hang_detection._leave": "end",
    "failure._report_or_follow": "failure",
}


class Kind(NamedTuple):
    """What a message is for, and how it travels."""

    phase: str
    purpose: str  # module.function of the program that sends it
    way: str  # store: set, get …; or the collective


class Traffic(NamedTuple):
    """Messages and their bytes."""

    messages: int = 0
    nbytes: int = 0


class Ledger:
    """What was counted in this process, of all its ranks."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self.messages: Counter[Kind] = Counter()
        self.nbytes: Counter[Kind] = Counter()
        self.seconds: defaultdict[Kind, float] = defaultdict(float)  # of rank 0, with its waiting
        self.connections = self.open_files = 0

    @contextmanager
    def time(self) -> Iterator[list[float]]:
        """What is done inside takes so long; nothing where another rank does it."""
        clock, began = [0.0], perf_counter()
        yield clock
        if threading.current_thread().name in ("rank 0", "MainThread"):
            clock[0] = perf_counter() - began

    def add(self, way: str, messages: int, nbytes: int, clock: Sequence[float] = (0.0,)) -> None:
        """Count what the calling thread sends at this moment."""
        kind = Kind(*_who_asks(), way)
        with self._lock:
            self.messages[kind] += messages
            self.nbytes[kind] += nbytes
            self.seconds[kind] += clock[0]
            if messages and kind.phase == "votes":
                self.open_files = max(self.open_files, len(os.listdir("/proc/self/fd")))

    def to_json(self) -> dict[str, Any]:
        """As plain values."""
        rows = [[*kind, n, self.nbytes[kind], self.seconds[kind]] for kind, n in sorted(self.messages.items())]
        return {"rows": rows, "connections": self.connections, "open_files": self.open_files}

    def merge(self, counted: dict[str, Any]) -> None:
        """Add what another process has counted."""
        for *kind, count, nbytes, seconds in counted["rows"]:
            self.messages[Kind(*kind)] += count
            self.nbytes[Kind(*kind)] += nbytes
            self.seconds[Kind(*kind)] += seconds
        self.connections += counted["connections"]


def _who_asks() -> tuple[str, str]:
    """Phase and purpose of what the calling thread sends. gloo has a call of its own: then it joins, or connects."""
    phase, purpose = "", ""
    for file, function in _stack():
        name = f"{Path(file).stem}.{function}"
        purpose = purpose or ("" if file.endswith(_CARRIERS) else name)
        phase = phase or PHASES.get(name, "")
    return phase or "joining", purpose or "gloo"


def _stack() -> Iterator[tuple[str, str]]:
    """File and function of the program's frames, the innermost first."""
    frame: FrameType | None = sys._getframe(2)
    while frame is not None:
        if frame.f_code.co_filename.startswith(_ROOT):
            yield frame.f_code.co_filename, frame.f_code.co_name
        frame = frame.f_back


class CountingStore(dist.Store):
    """A store in front of another one: counts each request, with the bytes of keys and values both ways."""

    def __init__(self, store: dist.Store, ledger: Ledger) -> None:
        super().__init__()
        self.inner: Any = store  # torch's stubs lack some of its methods
        self.ledger = ledger
        ledger.connections += 1

    def _ask(self, way: str, *words: Any) -> Any:
        with self.ledger.time() as clock:
            answer = getattr(self.inner, way)(*words)
        self.ledger.add(way, 1, _size(words) + _size(answer), clock)
        return answer

    def set(self, key: str, value: Any) -> None:
        self._ask("set", key, value)

    def get(self, key: str) -> Any:
        return self._ask("get", key)

    def compare_set(self, key: str, expected: Any, desired: Any) -> Any:
        return self._ask("compare_set", key, expected, desired)

    def add(self, key: str, amount: int) -> Any:
        return self._ask("add", key, amount)

    def check(self, keys: list[str]) -> Any:
        return self._ask("check", keys)

    def wait(self, keys: list[str], timeout: timedelta | None = None) -> None:
        self._ask("wait", keys, *([] if timeout is None else [timeout]))

    def multi_get(self, keys: list[str]) -> Any:
        return self._ask("multi_get", keys)

    def multi_set(self, keys: list[str], values: list[Any]) -> None:
        self._ask("multi_set", keys, values)

    def delete_key(self, key: str) -> Any:
        return self._ask("delete_key", key)

    def has_extended_api(self) -> bool:
        return bool(self.inner.has_extended_api())

    def set_timeout(self, timeout: timedelta) -> None:
        self.inner.set_timeout(timeout)

    def clone(self) -> CountingStore:
        return _keep(CountingStore(self.inner.clone(), self.ledger))


def _size(value: Any) -> int:
    """The bytes of what is sent: texts as they are, numbers as 8."""
    if isinstance(value, list | tuple):
        return sum(map(_size, value))
    return len(value) if isinstance(value, str | bytes) else 8 if isinstance(value, int) else 0


_kept: list[CountingStore] = []


def _keep(store: CountingStore) -> CountingStore:
    _kept.append(store)  # torch's C++ keeps no reference to the Python object
    return store


# What gloo sends for a collective of `size` ranks, over all of them, as its source has it: of a tensor of so many bytes
# in so many elements the messages, and how often each byte travels.


def _ring(size: int, nbytes: int, elements: int) -> Traffic:
    """All-reduce: each segment goes round twice. A tensor has 2 x size of them, if it has so many elements."""
    return Traffic(min(max(1, elements), 2 * size) * 2 * (size - 1), nbytes * 2 * (size - 1))


def _tree(size: int, nbytes: int, elements: int) -> Traffic:
    """Broadcast, gather to one: every rank but one gets it, or sends it, once."""
    return Traffic(size - 1, nbytes * (size - 1))


def _all_to_all(size: int, nbytes: int, elements: int) -> Traffic:
    """All-gather: the tensor of each rank comes to each other one."""
    return Traffic(size * (size - 1), nbytes * size * (size - 1))


# torch's function → which argument is the tensor of this rank, and what gloo sends
_WAYS = {
    "all_reduce": (0, _ring),
    "broadcast": (0, _tree),
    "gather": (0, _tree),
    "all_gather": (1, _all_to_all),
    "all_gather_into_tensor": (1, _all_to_all),
    "all_gather_single": (1, _all_to_all),  # the new name of the same
}


def count_collectives(ledger: Ledger) -> None:
    """From now on count what this process' ranks send by torch's functions; a group's first rank counts for all."""
    for name, (position, formula) in _WAYS.items():
        if hasattr(dist, name):
            _replace(name, _counted(name, position, formula, ledger))
    _replace("isend", _counted_send(dist.isend, ledger))  # torch's `send` calls it


def _counted_send(act: Any, ledger: Ledger) -> Any:
    def counted(tensor: Any, *args: Any, **options: Any) -> Any:
        ledger.add("send", 1, tensor.nbytes)
        return act(tensor, *args, **options)

    return counted


def _counted(name: str, position: int, formula: Any, ledger: Ledger) -> Any:
    act = getattr(dist, name)

    def counted(*args: Any, **options: Any) -> Any:
        with ledger.time() as clock:
            answer = act(*args, **options)
        group = options.get("group")
        tensor = args[position] if len(args) > position else options["tensor"]
        size, first = dist.get_world_size(group), dist.get_rank(group) == 0
        messages, nbytes = formula(size, tensor.nbytes, tensor.numel()) if first else (0, 0)
        ledger.add(name, messages, nbytes, clock)
        return answer

    return counted


def _replace(name: str, function: Any) -> None:
    for module in (dist, dist.distributed_c10d):
        setattr(module, name, function)


def count_store(ledger: Ledger) -> None:
    """From now on the program's stores are counted ones; each rank of this process keeps its own."""
    for name in ("serve_tcp_store", "connect_tcp_store"):
        setattr(rendezvous, name, partial(_open_counted, getattr(rendezvous, name), ledger))


def _open_counted(open_store: Any, ledger: Ledger, *args: Any) -> CountingStore:
    return _keep(CountingStore(open_store(*args), ledger))


def make_repeatable(stop_step: int | None = None) -> None:
    """A vote at each step, as beside a GPU, whatever a step takes. stop_step: there rank 1 is asked to stop."""
    os.environ["TORCH_GLOO_LAZY_INIT"] = "1"  # as runs of more than eight ranks have it
    rank_context.VOTE_INTERVAL = 0.0
    if stop_step is not None:

        def should_stop(self: Trainer) -> bool:
            return self.strategy.world.rank == 1 and self.progress.step >= stop_step

        setattr(Trainer, "_should_stop", should_stop)  # noqa: B010
