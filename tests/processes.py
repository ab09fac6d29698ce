"""Four processes that stay, so that a test of a strategy costs a rendezvous and not a launch."""

from __future__ import annotations

import faulthandler
import gc
import multiprocessing
import resource
import traceback
from collections.abc import Callable
from datetime import timedelta
from itertools import count
from multiprocessing.connection import Connection, wait
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.tensor import DTensor, _redistribute
from torch.distributed.tensor._collective_utils import MeshTopoInfo
from torch.distributed.tensor.debug import _clear_sharding_prop_cache

from tests.compositions import remembered
from trainer.launch.rendezvous import Launch, connect_store, say_goodbye

MOST = 4
ONCE = ("torch._dynamo", "trainer.api", "tests.strategies.toys")  # what nearly every case imports
PATIENCE = 300.0  # seconds until a group that does not answer is given up
KEPT = 8  # cases until all meshes go: to find out anew how DTensors are spread costs as much as a case with shards
PARTING = 30.0  # the same, once a rank has failed: the others may wait for it in a collective
TRACE_AFTER = 200.0  # seconds until a rank that has not ended its case, and tidied up, writes on stderr where it is


class Processes:
    """Runs a function on 1 to 4 ranks and returns what each of them returned."""

    def __init__(self) -> None:
        context = multiprocessing.get_context("forkserver")
        context.set_forkserver_preload([__name__, *ONCE])  # imported once, for all of them
        self._pipes: list[Connection] = []
        self._members = []
        self._cases = count()
        for rank in range(MOST):
            ours, theirs = context.Pipe()
            member = context.Process(target=_serve, args=(theirs, rank == 0), daemon=True)
            member.start()
            self._pipes.append(ours)
            self._members.append(member)
        self._port = self._pipes[0].recv()

    def run(self, size: int, function: Callable[..., Any], *args: Any) -> list[Any]:
        """Call `function(launch, *args)` on so many ranks; the results in rank order; AssertionError if one fails."""
        case = f"case-{next(self._cases)}"
        for rank in range(size):
            launch = Launch(rank, size, rank, size, 0, case, f"127.0.0.1:{self._port}", launcher_serves_store=True)
            self._pipes[rank].send((launch, function, args))
        answers: dict[int, Any] = {}
        while len(answers) < size:
            patience = PATIENCE if all(fine for fine, _ in answers.values()) else PARTING
            ready = wait([pipe for rank, pipe in enumerate(self._pipes[:size]) if rank not in answers], patience)
            missing = sorted(set(range(size)) - answers.keys())
            assert ready, f"ranks {missing} of {function.__name__} did not answer\n{_failures(answers)}"
            for rank, pipe in enumerate(self._pipes):
                if pipe not in ready:
                    continue
                try:
                    answers[rank] = pipe.recv()
                except EOFError:
                    answers[rank] = (False, "the process is gone; what it said last stands on stderr")
        assert not (failed := _failures(answers)), failed
        return [answers[rank][1] for rank in range(size)]

    def close(self) -> None:
        """End the processes."""
        for pipe in self._pipes:
            pipe.send(None)
        for member in self._members:
            member.join(10)
            if member.is_alive():
                member.kill()


def _serve(pipe: Connection, first: bool) -> None:
    torch.set_num_threads(1)
    remembered.start()
    if first:  # not the tests' own process: meshes and DTensors live on in torch's caches, and with them connections
        most = resource.getrlimit(resource.RLIMIT_NOFILE)[1]
        resource.setrlimit(resource.RLIMIT_NOFILE, (most, most))
        store = dist.TCPStore("127.0.0.1", 0, None, True, timedelta(seconds=60), wait_for_workers=False)
        pipe.send(store.port)
    for case in count():
        if (job := pipe.recv()) is None:
            return
        launch, function, args = job
        faulthandler.dump_traceback_later(TRACE_AFTER)
        try:
            pipe.send((True, function(launch, *args)))
        except BaseException:
            pipe.send((False, traceback.format_exc()))
        finally:
            if dist.is_initialized():  # an error inside `with strategy` leaves the group to the end of the process
                dist.destroy_process_group()
            _forget_meshes(wholly=case % KEPT == 0)
            say_goodbye()  # or every case would leave a connection to the store open, in both processes
            connect_store.cache_clear()
            gc.collect()
            if case == 0:
                gc.freeze()  # modules: looking at them again after every case costs more than most cases
            faulthandler.cancel_dump_traceback_later()


def _forget_meshes(wholly: bool) -> None:
    """Empty torch's caches of DTensor: they keep every mesh, and a mesh its groups, whose threads wake all the time."""
    propagator: Any = DTensor._op_dispatcher.sharding_propagator
    propagator.propagate_op_sharding.cache_clear()
    propagator._propagate_tensor_meta_cached.cache_clear()
    _redistribute._gen_transform_infos.cache_clear()
    _redistribute._planner_cache.clear()
    if not wholly:
        return
    MeshTopoInfo.build_from_mesh.cache_clear()
    _clear_sharding_prop_cache()


def _failures(answers: dict[int, Any]) -> str:
    """What the ranks that failed said."""
    return "\n".join(f"rank {rank}:\n{answer}" for rank, (fine, answer) in sorted(answers.items()) if not fine)
