"""Reading a forward as a graph of calls (torch.fx), and what flows through this graph.

The reading is strict: a forward that could compute something else than its graph is refused as `Untraceable`. For that
this file asks who looks at the type of a value (`_StrictProxy`), and reads the bytecode of the code that turns a value
into a bool (`_is_assertion`). tests/test_cut.py notices if torch or Python change there.
"""

from __future__ import annotations

import operator
from collections import Counter
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import is_dataclass
from dis import get_instructions
from inspect import currentframe
from itertools import pairwise
from types import FrameType
from typing import Any

import torch
from torch import Tensor, fx, nn

from trainer.launch.devices import device_types
from trainer.messages import first_line

NETWORK = "network"  # the attribute under which the traced module holds the network

# attributes and methods of a value that are no part of its values
_FACTS = {"shape", "dtype", "device", "ndim", "size", "dim", "numel", "stride", "is_floating_point"}
# parts of the names of functions that draw random numbers
_RANDOM = ("rand", "dropout", "bernoulli", "multinomial", "normal", "exponential", "uniform")
# Their sizes are not known while a forward is read: they are recorded like operations.
_TENSOR_MAKERS = (torch.arange, torch.eye, torch.full, torch.linspace, torch.ones, torch.zeros)
_IN_PLACE = {operator.iadd, operator.isub, operator.imul, operator.itruediv, operator.imatmul, operator.iand}


class Untraceable(Exception):
    """A forward that is more than calls in a fixed order; the message says what stood in the way."""


def trace(step: nn.Module, opened: set[str]) -> fx.Graph:
    """The forward of a module that holds a network and calls it, as a graph of calls in order; nothing is computed.

    opened: the network's modules to look into. Every other one stays a single call, so that its code, its mode and its
    weights remain its own. What an opened one's forward reads from Python's numbers is fixed from here on. Targets are
    names in the network. Untraceable where the forward depends on values, on the mode or on chance.
    """
    inside = {f"{NETWORK}.{name}" for name in opened} | {NETWORK}
    # a stage has an opened module's children, not the module: nobody would call its own train()
    for name, module in step.named_modules():
        if name in inside and type(module).train is not nn.Module.train:
            raise Untraceable("it has a train() of its own, which stages would not call")
    with _preserve_flags(step):
        # read twice, in training with autocast and in evaluation: a forward that asks for either gives two graphs
        with ExitStack() as precisions:
            for kind in device_types():
                precisions.enter_context(torch.autocast(kind))
            training = _trace_once(step.train(), inside)
        with torch.no_grad():
            evaluation = _trace_once(step.eval(), inside)
    # one graph serves both: stages are not cut anew for an evaluation
    if str(training) != str(evaluation):
        raise Untraceable("it does something else in training than in evaluation, or something random")
    return training


class _StrictProxy(fx.Proxy):
    """Stands for a value while a forward is read. Code that asks for its type would get that of the proxy."""

    @property  # type: ignore[misc]  # the base has it as an attribute
    def __class__(self) -> Any:
        # fx itself may ask, and finds the module of the code that asks; a network's code may not
        frame = currentframe()
        asker = frame.f_back.f_globals.get("__name__", "") if frame and frame.f_back else ""
        if not asker.startswith(("torch.fx", "torch.utils._pytree", "torch.nn.parameter")):
            raise Untraceable("it asks of what type a value is")
        return fx.Proxy

    def __len__(self) -> int:
        raise Untraceable("it asks for the len() of a value; x.shape[0] says the same of a tensor")

    def __bool__(self) -> bool:
        # an assertion changes nothing where it holds; whatever else a value decides is not known here
        frame = currentframe()
        return (frame is not None and frame.f_back is not None and _is_assertion(frame.f_back)) or super().__bool__()


def _is_assertion(frame: FrameType) -> bool:
    """Does an assert statement ask? Where the value is true, its bytecode jumps over the loading of the error."""
    following = (each for each in get_instructions(frame.f_code) if each.offset >= frame.f_lasti)
    # these two do nothing here; Python 3.14 has the one, 3.11 the other
    ahead = [each for each in following if each.opname not in ("NOT_TAKEN", "PRECALL")]
    for jump, load in pairwise(ahead[:3]):  # at most one operation before the jump: a comparison that ends in a bool
        if "JUMP" in jump.opname:
            return "IF_TRUE" in jump.opname and ("ASSERTION" in load.opname or load.argval is AssertionError)
    return False


class _Tracer(fx.Tracer):
    """Records calls, and refuses what a graph would not repeat."""

    proxy_buffer_attributes = True  # a buffer is read in the graph, not frozen into it

    def __init__(self, step: nn.Module, opened: set[str]) -> None:
        super().__init__(autowrap_functions=_TENSOR_MAKERS)
        self._autowrap_search.append(torch)  # under torch's own name, too
        self._opened = opened
        self._surroundings = _context_state()
        self._learns = {parameter: parameter.requires_grad for parameter in step.parameters()}  # as it begins
        self._calls: Counter[str] = Counter()  # of each module, as names in the step
        self._draws: Counter[tuple[str, int]] = Counter()  # in each call

    def proxy(self, node: fx.Node) -> fx.Proxy:
        """What stands for a node's value while a forward is read."""
        return _StrictProxy(node, self)

    def create_node(self, *words: Any, **more: Any) -> fx.Node:
        """Record one operation. Untraceable where it happens under a context that the graph would not have."""
        if _context_state() != self._surroundings:
            raise Untraceable("a part of it runs without gradient, or in a precision of its own")
        if any(parameter.requires_grad != learns for parameter, learns in self._learns.items()):
            raise Untraceable("a part of it runs while parameters are frozen by requires_grad_()")
        node = super().create_node(*words, **more)
        if node.op in ("call_function", "call_method") and is_random(node):
            # in a stage's graph nobody could tell any more in which module's code this stands
            path = self.scope.module_path
            self._draws[path, self._calls[path]] += 1
            name = path.removeprefix(NETWORK).removeprefix(".") if path else None
            node.meta["call_site"] = name, self._calls[path], self._draws[path, self._calls[path]]
        return node

    def create_arg(self, a: Any) -> Any:
        """Record a value. Untraceable where fx would make another kind of it: of transformers' outputs."""
        if issubclass(type(a), dict) and is_dataclass(type(a)):
            raise Untraceable(f"it answers with a {type(a).__name__}, which would become a plain dict")
        return super().create_arg(a)

    def call_module(self, m: nn.Module, *words: Any) -> Any:
        """Record a call. Untraceable where the module has been given parameters that the graph would not have."""
        if not self._learns.keys() >= set(m.parameters()):
            raise Untraceable("it calls a module with other parameters than its own")
        self._calls[self.path_of_module(m)] += 1
        return super().call_module(m, *words)

    def iter(self, obj: fx.Proxy) -> Iterator[Any]:
        """What a loop goes through. Of the last sizes of a value, x.shape[-2:], it is known how many there are."""
        at = obj.node.args[1] if obj.node.target is operator.getitem else None
        if isinstance(at, slice) and isinstance(at.start, int) and at.start < 0 and at.stop is at.step is None:
            return iter([operator.getitem(obj, number) for number in range(-at.start)])
        return super().iter(obj)

    def is_leaf_module(self, m: nn.Module, module_qualified_name: str) -> bool:
        """Is the module called as a whole?"""
        return module_qualified_name not in self._opened


def _context_state() -> tuple[bool, ...]:
    """What a forward may change around some of its lines, and fx does not record."""
    autocast = [torch.is_autocast_enabled(kind) for kind in device_types()]
    return (torch.is_grad_enabled(), torch.is_inference_mode_enabled(), *autocast)


def _trace_once(step: nn.Module, opened: set[str]) -> fx.Graph:
    """Read the forward in the step's present mode. opened: names in the step."""
    try:
        graph = _Tracer(step, opened).trace(step)
    except Exception as error:  # whatever a forward does with a proxy of a tensor
        raise Untraceable(first_line(error).strip(" .")) from error
    # from names in the step to names in the network; what lies outside of it fx has made from a tensor of the forward
    for node in graph.nodes:
        node.meta.pop("is_wrapped", None)  # a stage's code would have torch.arange wrapped for good
        if node.op in ("get_attr", "call_module"):
            if not node.target.startswith(f"{NETWORK}."):
                raise Untraceable("it makes a tensor of its own, which would be frozen; a buffer can hold it")
            node.target = node.target.removeprefix(f"{NETWORK}.")
    return graph


@contextmanager
def _preserve_flags(module: nn.Module) -> Iterator[None]:
    """Restore `training` and `requires_grad` afterwards: a forward may break off before it has restored them itself."""
    modes = {each: each.training for each in module.modules()}
    learning = {parameter: parameter.requires_grad for parameter in module.parameters()}
    try:
        yield
    finally:
        for each, training in modes.items():
            each.training = training
        for parameter, learns in learning.items():
            parameter.requires_grad_(learns)


class GraphFlow:
    """The nodes of a graph in order, and the values that flow between them: what must be handed on at a cut.

    What follows from the batch, from buffers and from shapes alone is not handed on. Its nodes are *copied*: every
    stage that needs them computes them again. All have the batch, and masks could not travel with a gradient.
    """

    def __init__(self, graph: fx.Graph, network: nn.Module) -> None:
        self.nodes: list[fx.Node] = list(graph.nodes)
        self.at = {node: index for index, node in enumerate(self.nodes)}  # where each node stands
        self._network = network
        # what several stages compute must be the same in each: nobody may write into it
        changed = {node.args[0] for node in self.nodes if is_in_place(node) and node.args}
        self._copied: set[fx.Node] = set()
        for node in self.nodes:
            if self._is_copied(node):
                if node in changed:
                    raise Untraceable(f"it changes {node} in place, which every stage has by itself")
                self._copied.add(node)

    def is_copied(self, node: fx.Node) -> bool:
        """Does every stage that needs this node compute it by itself?"""
        return node in self._copied

    def sources(self, node: fx.Node) -> Iterator[fx.Node]:
        """The values that a node needs, directly or through copied nodes; copied nodes are left out."""
        for source in node.all_input_nodes:
            if source in self._copied:
                yield from self.sources(source)
            else:
                yield source

    def handed(self, at: int) -> list[fx.Node]:
        """The values from before this position that are needed from there on, in order."""
        needed = (source for node in self.nodes[at:] if node not in self._copied for source in self.sources(node))
        return sorted({source for source in needed if self.at[source] < at}, key=self.at.__getitem__)

    def state(self, node: fx.Node) -> list[Tensor]:
        """The parameters and buffers that a node brings with it."""
        if node.op == "call_module":
            module = self._network.get_submodule(str(node.target))
            return [*module.parameters(), *module.buffers()]
        return [get_tensor(self._network, str(node.target))] if node.op == "get_attr" else []

    def _is_copied(self, node: fx.Node) -> bool:
        if node.op == "placeholder":
            return True
        if node.op == "get_attr":
            return not isinstance(get_tensor(self._network, str(node.target)), nn.Parameter)
        if node.op not in ("call_function", "call_method") or is_in_place(node):
            return False
        # a shape is known wherever the value is; what follows from copied nodes alone is copied, unless it is random
        function = _function_name(node)
        if function in _FACTS or (function == "getattr" and node.args[1] in _FACTS):
            return True
        return not is_random(node) and all(n in self._copied for n in node.all_input_nodes)


def is_random(node: fx.Node) -> bool:
    """Does a node give random numbers, by its name?"""
    return any(name in _function_name(node) for name in _RANDOM)


def is_in_place(node: fx.Node) -> bool:
    """Does a node visibly change its first argument in place?"""
    if node.op not in ("call_function", "call_method"):
        return False
    function = _function_name(node)
    named_so = function.endswith("_") and not function.endswith("__")  # by torch's convention
    return named_so or node.target in _IN_PLACE or bool(node.kwargs.get("inplace"))


def get_tensor(network: nn.Module, name: str) -> Tensor:
    """A tensor of a network by its name."""
    holder, _, last = name.rpartition(".")
    return getattr(network.get_submodule(holder), last)


def _function_name(node: fx.Node) -> str:
    return node.target if isinstance(node.target, str) else getattr(node.target, "__name__", "")
