"""What the threads of this process are doing: where a rank stands that gets no further."""

from __future__ import annotations

import sys
import sysconfig
import threading
import traceback

_STANDARD = sysconfig.get_path("stdlib")
# Where a rank is that waits for others, or for its device: whoever hangs by itself is elsewhere.
_WAITING = ("/torch/distributed/", "/torch/autograd/", "/torch/cuda/", "/trainer/parallel/")
_OURS = ("watchdog", "stalls", "stop requests", "what may never return")  # threads that say nothing about the run
_DEBUGGERS = ("pdb", "bdb", "ipdb", "pudb", "pydevd", "_pydevd_bundle", "debugpy")


def stacks() -> str:
    """The stacks of all threads but the framework's own, innermost line last."""
    names = {thread.ident: thread.name for thread in threading.enumerate()}
    return "\n".join(
        f"thread {names.get(ident, ident)}:\n{''.join(traceback.format_stack(frame)).rstrip()}"
        for ident, frame in sys._current_frames().items()
        if names.get(ident) not in _OURS
    )


def doing(thread: int) -> tuple[str, bool]:
    """The line that tells most of what a thread is doing; and does it wait there for other ranks, or for the device?

    The innermost outside Python's own library, which would say that a queue is read, and not whose.
    """
    frame = sys._current_frames().get(thread)
    lines = traceback.extract_stack(frame) if frame is not None else []
    told = [line for line in lines if not line.filename.startswith((_STANDARD, "<")) or "-packages" in line.filename]
    if not told:
        return "nothing of Python", False
    last = told[-1]
    waits = any(folder in last.filename for folder in _WAITING)
    return f"{last.filename}:{last.lineno} in {last.name}: {last.line}".rstrip(": "), waits


def debugged(thread: int) -> bool:
    """Does the thread stand in a debugger, and wait for a person?"""
    frame = sys._current_frames().get(thread)
    while frame is not None:
        if str(frame.f_globals.get("__name__")).partition(".")[0] in _DEBUGGERS:
            return True
        frame = frame.f_back
    return False
