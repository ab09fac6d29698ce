"""A watch over what a program asks of an accelerator: what makes the host wait there, or could not work at all."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from itertools import count
from typing import Any, NamedTuple
from unittest.mock import patch

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

COPIES = ("_to_copy", "copy_", "_copy_from")
# A number out of a tensor, a result whose size depends on values, a comparison whose answer is read.
READS = ("_local_scalar_dense", "item", "is_nonzero", "nonzero", "masked_select", "_unique2", "bincount", "equal")

# What a run does, in order of time.
PHASES = (
    "trainer.jobs.fit.make_trainer",
    "trainer.loop.trainer.Trainer.begin",
    "trainer.loop.trainer.Trainer.train_step",
    "trainer.loop.trainer.Trainer.evaluate",
    "trainer.loop.trainer.Trainer.save",
    "trainer.loop.trainer.Trainer.resume",
)


class Finding(NamedTuple):
    """What was found, and what the program was doing then: the watched functions that were running, outermost first."""

    what: str  # mixture, pageable, waiting copy, read
    operation: str
    during: tuple[str, ...]


class Watch(TorchDispatchMode):
    """Notes, of every operation with a tensor on an accelerator: two devices in one; a copy that the host waits for,
    or from memory that is not pinned; a value that the host reads."""

    def __init__(self) -> None:
        super().__init__()
        self.findings: list[Finding] = []
        self.copies: list[tuple[str, tuple[str, ...]]] = []  # that nobody waits for: from where; during what
        self._running: list[str] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if DTensor in types:  # it takes itself apart, and what it does with its parts is seen
            return NotImplemented
        what = self._judged(func.overloadpacket.__name__, args, kwargs or {})
        if what:
            self.findings.append(Finding(what, str(func), tuple(self._running)))
        return func(*args, **(kwargs or {}))

    def _judged(self, name: str, args: Any, kwargs: dict[str, Any]) -> str:
        tensors = [leaf for leaf in tree_leaves((args, kwargs)) if isinstance(leaf, Tensor)]
        if name in COPIES:
            return self._judged_copy(tensors, args, kwargs)
        there = [tensor for tensor in tensors if tensor.device.type not in ("cpu", "meta")]
        if not there:
            return ""
        if name in READS or (name in ("index", "index_put_") and any(one.dtype == torch.bool for one in tensors[1:])):
            return "read"
        # a number of the host's may go along: it is handed to the kernel
        if any(tensor.device != there[0].device and tensor.dim() for tensor in tensors):
            return "mixture"
        return ""

    def _judged_copy(self, tensors: list[Tensor], args: Any, kwargs: dict[str, Any]) -> str:
        if "device" in kwargs:
            start, goal = tensors[0].device, torch.device(kwargs["device"] or tensors[0].device)
        else:
            start, goal = tensors[-1].device, tensors[0].device
        ahead = kwargs.get("non_blocking", False) or (len(args) > 2 and args[2] is True)
        if start.type == goal.type or "meta" in (start.type, goal.type):
            return ""
        if goal.type != "cpu" and not tensors[-1].is_pinned():
            return "pageable"
        if not ahead:
            return "waiting copy"
        self.copies.append((start.type, tuple(self._running)))
        return ""

    @contextmanager
    def over(self, *functions: str) -> Iterator[None]:
        """Know when these run: dotted names, `trainer.loop.trainer.Trainer.train_step`; and which call is the first."""
        patches = [patch(name, self._noting(name)) for name in functions]
        for each in patches:
            each.start()
        try:
            yield
        finally:
            for each in patches:
                each.stop()

    def _noting(self, name: str) -> Any:
        from pkgutil import resolve_name

        function, short = resolve_name(name), name.rsplit(".", 1)[1]
        calls = count()

        def noting(*args: Any, **words: Any) -> Any:
            self._running.append(short if next(calls) else f"first {short}")
            try:
                return function(*args, **words)
            finally:
                self._running.pop()

        return noting
