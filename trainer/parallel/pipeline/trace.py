"""Reading a forward as a graph of the modules it calls, so that it can be cut between any two of them."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from inspect import currentframe
from typing import Any

import torch
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
    for name, part in step.named_modules():
        if name in inside and type(part).train is not nn.Module.train:
            raise Untraceable("it has a train() of its own, which stages would not call")
    with _modes_kept(step):
        # once as if learning in another precision, once as if evaluating: whoever asks for one of these is found out
        with _autocasting():
            training = _traced(step.train(), inside)
        with torch.no_grad():
            evaluation = _traced(step.eval(), inside)
    if str(training) != str(evaluation):
        raise Untraceable("it does something else in training than in evaluation, or something random")
    return training


def enclosing(name: str) -> set[str]:
    """The modules that a module lies in, by name."""
    parts = name.split(".")
    return {".".join(parts[:depth]) for depth in range(1, len(parts))}


class _StandIn(fx.Proxy):
    """A value of a forward that is being read. Whoever asks for its type would be told the stand-in's."""

    @property  # type: ignore[misc]  # the base has it as an attribute
    def __class__(self) -> Any:
        frame = currentframe()
        asker = frame.f_back.f_globals.get("__name__", "") if frame and frame.f_back else ""
        if not asker.startswith(("torch.fx", "torch.utils._pytree", "torch.nn.parameter")):
            raise Untraceable("it asks of what type a value is")
        return fx.Proxy


class _Tracer(fx.Tracer):
    proxy_buffer_attributes = True  # a buffer is read in the graph, not frozen into it

    def __init__(self, step: nn.Module, opened: set[str]) -> None:
        super().__init__()
        self._opened = opened
        self._surroundings = _surroundings()
        self._own = set(step.parameters())

    def proxy(self, node: fx.Node) -> fx.Proxy:
        """What stands for a node's value while a forward is read."""
        return _StandIn(node, self)

    def create_node(self, *words: Any, **more: Any) -> fx.Node:
        """Take down one operation. Untraceable where it happens under a context that the graph would not have."""
        if _surroundings() != self._surroundings:
            raise Untraceable("a part of it runs without gradient, or in a precision of its own")
        return super().create_node(*words, **more)

    def call_module(self, m: nn.Module, *words: Any) -> Any:
        """Take down a call. Untraceable where the module has been given parameters that the graph would not have."""
        if not self._own.issuperset(m.parameters()):
            raise Untraceable("it calls a module with other parameters than its own")
        return super().call_module(m, *words)

    def is_leaf_module(self, m: nn.Module, module_qualified_name: str) -> bool:
        """Is the module called as a whole?"""
        return module_qualified_name not in self._opened


def _surroundings() -> tuple[bool, ...]:
    """What a forward may change around some of its lines, and fx does not take down."""
    precisions = [torch.is_autocast_enabled(kind) for kind in ("cpu", "cuda")]
    return (torch.is_grad_enabled(), torch.is_inference_mode_enabled(), *precisions)


def _traced(step: nn.Module, opened: set[str]) -> fx.Graph:
    try:
        graph = _Tracer(step, opened).trace(step)
    except Exception as error:  # whatever a forward does with a stand-in for a tensor
        raise Untraceable((str(error).splitlines() or [type(error).__name__])[0].strip(" .")) from error
    for node in graph.nodes:
        if node.op in ("get_attr", "call_module"):
            if not node.target.startswith(f"{ROOT}."):
                raise Untraceable("it makes a tensor of its own, which would be frozen; a buffer can hold it")
            node.target = node.target.removeprefix(f"{ROOT}.")
    return graph


@contextmanager
def _autocasting() -> Iterator[None]:
    kinds = ("cpu", "cuda")
    before = [torch.is_autocast_enabled(kind) for kind in kinds]
    try:
        for kind in kinds:
            torch.set_autocast_enabled(kind, True)
        yield
    finally:
        for kind, enabled in zip(kinds, before, strict=True):
            torch.set_autocast_enabled(kind, enabled)


@contextmanager
def _modes_kept(module: nn.Module) -> Iterator[None]:
    modes = {part: part.training for part in module.modules()}
    try:
        yield
    finally:
        for part, training in modes.items():
            part.training = training
