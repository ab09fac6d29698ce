"""What a run changes in the process around it, put back afterwards: for a run inside a program of somebody's own."""

from __future__ import annotations

import logging
import os
import random
import sys
import threading
import warnings
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager, suppress
from typing import Any

from trainer.messages import Refusal

Restore = Callable[[], None]
_one_run = threading.Lock()  # one run at a time: another one would take this one's changes for what was there before


@contextmanager
def preserve_process_state() -> Iterator[None]:
    """Inside, this thread alone may change what belongs to the whole process; outside again all is as it was.

    Refusal where another one is inside.
    """
    if not _one_run.acquire(blocking=False):
        raise Refusal(
            "trainer.run is at work in this process already: two runs in one process would share their random numbers,"
            " their locks and their process group. Wait until it has returned, or start this one in a process of its"
            " own: python -m trainer …, or trainer.run(…, processes=2)"
        )
    # restored in reverse order; the lock is released last
    with ExitStack() as at_the_end:
        at_the_end.callback(_one_run.release)
        for keep in (
            _save_environment,
            _save_logging,
            _save_warnings,
            _save_excepthook,
            _save_rng,
            _save_torch_settings,
            _save_tf32,
        ):
            at_the_end.callback(keep())
        yield


def _save_environment() -> Restore:
    """The variables of the environment: of network interfaces, of cuBLAS, of the profiler."""
    before = dict(os.environ)

    def put_back() -> None:
        for name in os.environ.keys() - before.keys():
            del os.environ[name]
        os.environ.update({name: value for name, value in before.items() if os.environ.get(name) != value})

    return put_back


def _save_logging() -> Restore:
    """Where Python's logging goes."""
    root = logging.getLogger()
    handlers, level = root.handlers[:], root.level

    def put_back() -> None:
        for handler in set(root.handlers) - set(handlers):
            with suppress(OSError):  # its last words, on a full disk
                handler.close()
        root.handlers[:] = handlers
        root.setLevel(level)

    return put_back


def _save_warnings() -> Restore:
    """Who shows warnings: Python, its logging, a notebook."""
    shown = warnings.showwarning

    def put_back() -> None:
        if warnings.showwarning is not shown:
            logging.captureWarnings(False)  # or logging would believe that it still has them
            warnings.showwarning = shown

    return put_back


def _save_excepthook() -> Restore:
    """Who shows an error that nobody catches: torch puts itself in between with each process group."""
    shown = sys.excepthook

    def put_back() -> None:
        sys.excepthook = shown

    return put_back


def _save_rng() -> Restore:
    """The global generators of Python, of NumPy and of torch, on every device that is in use."""
    import torch

    python, numpy = random.getstate(), sys.modules.get("numpy")
    drawn = numpy.random.get_state() if numpy else None
    cpu, seed, device = torch.get_rng_state(), torch.initial_seed(), _accelerator_module()
    there = device.get_rng_state_all() if device and device.is_initialized() else None

    def put_back() -> None:
        random.setstate(python)
        if numpy:
            numpy.random.set_state(drawn)
        torch.set_rng_state(cpu)
        if there is not None:
            device.set_rng_state_all(there)
        elif device and device.is_initialized():  # by the run: as if the program had come to use it by itself
            device.manual_seed_all(seed)

    return put_back


def _accelerator_module() -> Any:
    """torch.cuda, or the same of another kind of accelerator; None where there is none."""
    import torch

    # MPS is one device with one generator, and says nothing of either
    kind = torch.accelerator.current_accelerator(check_available=True)
    return None if kind is None or kind.type == "mps" else torch.get_device_module(kind)


def _save_torch_settings() -> Restore:
    """How torch computes: the type of new tensors, threads, the device, deterministic algorithms, cuDNN."""
    import torch

    cudnn, device = torch.backends.cudnn, _accelerator_module()
    dtype, threads, strict = torch.get_default_dtype(), torch.get_num_threads(), torch.get_deterministic_debug_mode()
    chosen = cudnn.enabled, cudnn.benchmark, cudnn.deterministic
    index = device.current_device() if device and device.is_initialized() else None

    def put_back() -> None:
        torch.set_default_dtype(dtype)
        torch.set_num_threads(threads)
        torch.set_deterministic_debug_mode(strict)
        cudnn.enabled, cudnn.benchmark, cudnn.deterministic = chosen
        if index is not None:
            device.set_device(index)

    return put_back


def _save_tf32() -> Restore:
    """With how many bits fp32 is multiplied, by the names of torch 2.9 and by the older ones."""
    import torch

    backends: Any = torch.backends  # torch's own stubs lack cudnn.conv
    places = (backends.cuda.matmul, backends.cudnn.conv, backends.cudnn.rnn, backends.mkldnn.matmul)
    precisions = [place.fp32_precision for place in places]
    # who uses the new names cannot be asked for the old ones, and does not need them
    matmul, convolutions = None, None
    with suppress(RuntimeError):
        matmul = torch.get_float32_matmul_precision()
    with suppress(RuntimeError):
        convolutions = backends.cudnn.allow_tf32

    def put_back() -> None:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", UserWarning)  # torch 2.9 and some after it recommend the new names
            if matmul is not None:
                torch.set_float32_matmul_precision(matmul)
            if convolutions is not None:
                backends.cudnn.allow_tf32 = convolutions
        for place, precision in zip(places, precisions, strict=True):
            place.fp32_precision = precision

    return put_back
