"""Functions that run in copies of this process, some at a time: what torch remembers stays in each."""

from __future__ import annotations

import logging
import os
import signal
import warnings
from collections.abc import Callable, Iterator, Mapping
from contextlib import suppress
from math import inf
from multiprocessing import connection, get_context, parent_process
from time import monotonic
from typing import Any, TypeVar

import torch

import trainer
from trainer.messages import FatalRunError, Refusal, error_place, first_line

# torch's names for an operator whose result depends on the values of tensors
_READS_VALUES = ("DataDependentOutputException", "DynamicOutputShapeException", "GuardOnDataDependentSymNode")
FunctionKey = TypeVar("FunctionKey")


def run_forked(
    functions: Mapping[FunctionKey, Callable[[], Any]], at_once: int, deadline: float = inf
) -> Iterator[tuple[FunctionKey, Any]]:
    """What each function returns, or the exception that it raised, as they come; so many run at a time.

    deadline: of the monotonic clock; what has not ended by then is killed, and gives nothing. A process that was killed
    otherwise gives a FatalRunError.
    """
    waiting = list(functions.items())[::-1]
    running: dict[Any, tuple[FunctionKey, Any]] = {}  # the end of a pipe → whose it is, the process
    try:
        while (running or waiting) and monotonic() < deadline:
            while waiting and len(running) < at_once:
                key, function = waiting.pop()
                pipe, process = _start(function)
                running[pipe] = key, process
            patience = None if deadline == inf else max(0.0, deadline - monotonic())
            for pipe in connection.wait(list(running), patience):  # whoever has answered, or has died
                key, process = running.pop(pipe)
                yield key, _result(pipe)
                process.join()  # after its answer: a process that still writes into a full pipe never ends
    finally:
        # it is late, or the caller has had enough: nobody reads what these would answer
        for _, process in running.values():
            _kill_group(process)
            process.join()


def _kill_group(process: Any) -> None:
    """Kill a process with those that it has started."""
    with suppress(ProcessLookupError):  # it has only just been made
        os.killpg(process.pid, signal.SIGKILL)
    process.kill()


def _start(function: Callable[[], Any]) -> tuple[Any, Any]:
    context = get_context("fork")  # what a function holds need not be sent
    pipe, other = context.Pipe(duplex=False)
    is_nested = parent_process() is not None

    def run() -> None:
        if not is_nested:
            os.setpgid(0, 0)  # a group of its own, to be killed with all that it starts
        torch.set_num_threads(1)  # threads of torch's are not copied with a process
        _hide_accelerators()
        warnings.simplefilter("ignore")  # the run itself gives them
        logging.getLogger("torch._subclasses.fake_tensor").setLevel(logging.CRITICAL)  # the error has what is needed
        try:
            answer = function()
        except Exception as error:
            # not the error itself: it may hold networks, groups and other things that cannot be sent
            answer = Refusal(str(error)) if isinstance(error, Refusal) else FatalRunError(_describe(error))
        other.send(answer)

    process = context.Process(target=run)
    process.start()
    other.close()  # this process's copy; else no end of file would come when the other process dies
    return pipe, process


def _hide_accelerators() -> None:
    """Let torch find no accelerator in this process: a driver that was asked before the fork answers with an error.

    Adam asks in each step, whatever its parameters lie on.
    """
    if accelerator := torch.accelerator.current_accelerator():
        module: Any = torch.get_device_module(accelerator)
        module.is_available = lambda: False
    torch.accelerator.current_accelerator = lambda check_available=False: None


def _describe(error: BaseException) -> str:
    """What went wrong, in one line, and where in the user's own code."""
    what = f"{type(error).__name__}: {first_line(error)}"
    if type(error).__name__ in _READS_VALUES:
        what = f"it reads values of tensors ({str(error).strip() or type(error).__name__}), which a plan does not have"
    return f"{what}, {place}" if (place := error_place(error, torch, trainer)) else what


def _result(pipe: Any) -> Any:
    try:
        return pipe.recv()
    except EOFError:
        return FatalRunError("the process that tried it was killed; is there enough memory?")
