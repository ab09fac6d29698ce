"""Reading a forward as a graph of the modules it calls, so that it can be cut between any two of them."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

from torch import fx, nn

ROOT = "network"  # the attribute under which the traced module holds the network


class Untraceable(Exception):
    """A forward that is more than calls in a fixed order; the message says what stood in the way."""


def trace(step: nn.Module, opened: set[str]) -> fx.Graph:
    """The forward of a module that holds a network and calls it: a graph of calls, in order; nothing is computed.

    `opened`: the network's own modules to look into. Every other one stays a single call, so that its code, its mode
    and its weights remain its own; what an opened one's forward reads from Python's numbers is fixed from here on.
    Targets are the network's own names. Untraceable where the forward depends on values, on the mode or on chance.
    """
    inside = {f"{ROOT}.{name}" for name in opened} | {ROOT}
    with _modes_kept(step):
        training, evaluation = (_traced(step.train(mode), inside) for mode in (True, False))
    if str(training) != str(evaluation):
        raise Untraceable("it does something else in training than in evaluation, or something random")
    return training


def enclosing(name: str) -> set[str]:
    """The modules that a module lies in, by name."""
    parts = name.split(".")
    return {".".join(parts[:depth]) for depth in range(1, len(parts))}


class _Tracer(fx.Tracer):
    proxy_buffer_attributes = True  # a buffer is read in the graph, not frozen into it

    def __init__(self, opened: set[str]) -> None:
        super().__init__()
        self._opened = opened

    def is_leaf_module(self, m: nn.Module, module_qualified_name: str) -> bool:
        """Is the module called as a whole?"""
        return module_qualified_name not in self._opened


def _traced(step: nn.Module, opened: set[str]) -> fx.Graph:
    try:
        graph = _Tracer(opened).trace(step)
    except Exception as error:  # whatever a forward does with a stand-in for a tensor
        raise Untraceable((str(error).splitlines() or [type(error).__name__])[0].strip(" .")) from error
    for node in graph.nodes:
        if node.op in ("get_attr", "call_module"):
            if not node.target.startswith(f"{ROOT}."):
                raise Untraceable("it makes a tensor of its own, which would be frozen; a buffer can hold it")
            node.target = node.target.removeprefix(f"{ROOT}.")
    return graph


@contextmanager
def _modes_kept(module: nn.Module) -> Iterator[None]:
    modes = {part: part.training for part in module.modules()}
    try:
        yield
    finally:
        for part, training in modes.items():
            part.training = training
