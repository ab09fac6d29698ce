"""The memory of a run: does glibc keep what was freed, and which keys help where a host or device has none left."""

from __future__ import annotations

import ctypes
import errno
import re
from collections.abc import Callable
from contextlib import suppress
from dataclasses import replace
from traceback import walk_tb
from typing import Any

from trainer.data.sampler import dataset_size
from trainer.jobs.batch_sizes import evaluation_batch_size, more_micro_batches
from trainer.jobs.plan_comparison import planned_row
from trainer.jobs.run_parts import PreparedRun
from trainer.launch.devices import available_memory_per_rank
from trainer.launch.failure import error_chain
from trainer.loop.evaluation import evaluate, trial_evaluation
from trainer.loop.trainer import Trainer
from trainer.messages import Refusal, format_count
from trainer.records.checkpoint.writer import AsyncSaver

_TRIM_THRESHOLD, _MMAP_THRESHOLD = -1, -3  # mallopt(3): M_TRIM_THRESHOLD, M_MMAP_THRESHOLD
_NEVER, _LARGE = 2**30, 2**20  # bytes: 1 GiB stands for no limit, 1 MiB for a gathered parameter
_TIGHT = 0.5  # of what a rank can have: where more was planned, freed memory is given back
# The words of torch's allocators, of the CUDA driver, and of cuBLAS and cuDNN, which ask it for memory themselves.
_NO_MEMORY = re.compile(r"can't allocate memory|(CUDA error:|MPS backend) out of memory|STATUS_ALLOC_FAILED")
# the words of torch's shared memory, and of a worker process that wrote where there was no more of it
_NO_SHARED_MEMORY = re.compile(r"shared memory|</torch_\d.*No space left")
_SPREAD = "strategy=fsdp, tp or pp hold a part of the network on each device"


def keep_freed_memory() -> bool:
    """Tell glibc not to give freed memory back to the kernel; False where the C library is another one.

    For a network that is whole on its rank: every step asks for the sizes that the last one freed, and fresh pages
    cost faults. Measured on the CPU with the cnn on 28×28 images: 3,000 page faults a step become 30, and a step 3 to
    10 % shorter. What does not fit the next request stays beside it: a ViT of 57 million parameters takes 1,071 MiB
    instead of 885.
    """
    return _mallopt(_TRIM_THRESHOLD, _NEVER) and _mallopt(_MMAP_THRESHOLD, _NEVER)


def is_memory_tight(run: PreparedRun) -> bool:
    """Was so much planned on a CPU that pieces of freed memory, which stay in the heap, might be what is missing?"""
    planned = planned_row(run)
    if planned is None or run.machine.on_gpu:
        return False
    available = available_memory_per_rank(run.machine.torch_device, run.machine.launch.local_world_size)
    return planned["peak"] > _TIGHT * available


def give_back_freed_memory() -> bool:
    """Tell glibc to give every larger block back as soon as it is freed; False where the C library is another one.

    For ranks that hold shards: they gather parameters and free them all the time, and what is kept lies in pieces that
    do not fit the next request. Measured with fsdp on 2 processes and 100 million parameters: a peak of 871 MiB
    instead of 2,151.
    """
    return _mallopt(_MMAP_THRESHOLD, _LARGE)


def _mallopt(parameter: int, value: int) -> bool:
    try:
        return bool(ctypes.CDLL(None).mallopt(parameter, value))  # None: the C library that Python runs with
    except (OSError, AttributeError):
        return False


def memory_advice(error: BaseException, run: PreparedRun) -> str:
    """In what the memory ran out, and what to try; empty where it did not. The traceback knows where it was."""
    if any(_is_out_of_shared_memory(cause) for cause in error_chain(error)):
        return (
            "Worker processes hand over batches in shared memory, and /dev/shm is too small: docker run --shm-size=8g"
            " (on Kubernetes an emptyDir with medium: Memory), or loader.workers=0."
        )
    # the error that arrives may have followed from the one that counts
    if not any(_is_out_of_memory(cause) for cause in error_chain(error)):
        return ""
    if _happened_in(error, AsyncSaver.snapshot):
        return "The host's memory ran out for a copy of the state. checkpoint.asynchronous=false saves without one."
    if _happened_in(error, trial_evaluation, evaluate):
        return _evaluation_advice(run)
    if _happened_in(error, Trainer.train_step):
        return f"The device's memory ran out with {run.batches}. {_step_advice(run)}"
    return f"The device's memory ran out, and not for the size of a batch; {_SPREAD}."


def _evaluation_advice(run: PreparedRun) -> str:
    """A smaller evaluation batch changes nothing that is learned, so it comes before more micro-batches."""
    ranks, count = run.batches.ranks, run.batches.micro_batches
    whole, samples = evaluation_batch_size(run.settings.loop), dataset_size(run.evaluation)
    largest = min(-(-whole // (ranks * count)), -(-samples // ranks))  # samples of a rank in one forward
    divided = f"{format_count(ranks, 'data rank')} / {format_count(count, 'micro-batch')}"
    at_once = f"{format_count(largest, 'sample')} at once (evaluation batch {whole} / {divided})"
    advice = f"Try loop.eval_batch={largest // 2 * ranks * count}." if largest > 1 else f"There is no less; {_SPREAD}."
    return f"The device's memory ran out in an evaluation, with {at_once}. {advice}"


def _step_advice(run: PreparedRun) -> str:
    """The next smaller micro-batches that the strategy can run, in the key that the user has set."""
    loop, batches = run.settings.loop, run.batches
    # not the first that comes out whole: a pipeline, for one, wants a micro-batch for each stage
    while (more := more_micro_batches(batches)) is not None:
        batches = replace(batches, micro_batches=more)
        with suppress(Refusal):
            world_size, rank_batch = run.machine.launch.world_size, batches.total // batches.ranks
            run.strategy.refuse_shares(world_size, rank_batch, more, batches.uneven)
            return f"Try loop.micro_batch{f'es={more}' if loop.micro_batch is None else f'={batches.largest}'}."
    return f"There are no smaller micro-batches; {_SPREAD}."


def _is_out_of_memory(error: BaseException) -> bool:
    by_class = isinstance(error, MemoryError) or type(error).__name__ == "OutOfMemoryError"  # torch's, of any device
    return by_class or _NO_MEMORY.search(str(error)) is not None


def _is_out_of_shared_memory(error: BaseException) -> bool:
    # the locks of multiprocessing lie there, too
    is_lock = any(
        frame.f_globals.get("__name__") == "multiprocessing.synchronize" for frame, _ in walk_tb(error.__traceback__)
    )
    is_full = isinstance(error, OSError) and error.errno == errno.ENOSPC
    return _NO_SHARED_MEMORY.search(str(error)) is not None or (is_lock and is_full)


def _happened_in(error: BaseException, *functions: Callable[..., Any]) -> bool:
    """Did it happen in one of these, or in what they called?"""
    # frames of the traceback hold the code of the functions that were running
    codes = {function.__code__ for function in functions}
    return any(frame.f_code in codes for frame, _ in walk_tb(error.__traceback__))
