"""What flows through a traced forward: which values must travel where it is cut, and which every stage has anyway."""

from __future__ import annotations

import operator
from collections.abc import Iterator

from torch import Tensor, fx, nn

from trainer.parallel.pipeline.trace import Untraceable

_FACTS = {"shape", "dtype", "device", "ndim", "size", "dim", "numel", "stride", "is_floating_point"}
_RANDOM = ("rand", "dropout", "bernoulli", "multinomial", "normal", "exponential", "uniform")
_IN_PLACE = {operator.iadd, operator.isub, operator.imul, operator.itruediv, operator.imatmul, operator.iand}


class Flow:
    """The nodes of a graph in order, and for each the values that it needs.

    Whatever follows from the batch, from buffers and from shapes alone is worked out again by every stage that needs
    it: each of them has the batch, and numbers or masks could not be handed on with a gradient.
    """

    def __init__(self, graph: fx.Graph, network: nn.Module) -> None:
        self.nodes: list[fx.Node] = list(graph.nodes)
        self.at = {node: index for index, node in enumerate(self.nodes)}
        self._network = network
        changed = {node.args[0] for node in self.nodes if writes(node) and node.args}
        self._copied: set[fx.Node] = set()
        for node in self.nodes:
            if self._is_copied(node):
                if node in changed:
                    raise Untraceable(f"it changes {node} in place, which every stage has by itself")
                self._copied.add(node)

    def is_copied(self, node: fx.Node) -> bool:
        """Does every stage work this node out for itself?"""
        return node in self._copied

    def sources(self, node: fx.Node) -> Iterator[fx.Node]:
        """The values that a node needs, directly or through what is worked out again."""
        for source in node.all_input_nodes:
            if source in self._copied:
                yield from self.sources(source)
            else:
                yield source

    def handed(self, at: int) -> list[fx.Node]:
        """The values from before this position that are needed from there on, in order."""
        late = (source for node in self.nodes[at:] if node not in self._copied for source in self.sources(node))
        return sorted({source for source in late if self.at[source] < at}, key=self.at.__getitem__)

    def state(self, node: fx.Node) -> list[Tensor]:
        """The parameters and buffers that a node brings with it."""
        if node.op == "call_module":
            module = self._network.get_submodule(str(node.target))
            return [*module.parameters(), *module.buffers()]
        return [attribute(self._network, str(node.target))] if node.op == "get_attr" else []

    def _is_copied(self, node: fx.Node) -> bool:
        if node.op == "placeholder":
            return True
        if node.op == "get_attr":
            return not isinstance(attribute(self._network, str(node.target)), nn.Parameter)
        if node.op not in ("call_function", "call_method") or writes(node):
            return False
        word = _word(node)
        if word in _FACTS or (word == "getattr" and node.args[1] in _FACTS):
            return True
        return not any(part in word for part in _RANDOM) and all(n in self._copied for n in node.all_input_nodes)


def writes(node: fx.Node) -> bool:
    """Does a node visibly change its first argument in place?"""
    if node.op not in ("call_function", "call_method"):
        return False
    word = _word(node)
    named = word.endswith("_") and not word.endswith("__")
    return named or node.target in _IN_PLACE or bool(node.kwargs.get("inplace"))


def attribute(network: nn.Module, name: str) -> Tensor:
    """A tensor of a network by its name."""
    holder, _, last = name.rpartition(".")
    return getattr(network.get_submodule(holder), last)


def _word(node: fx.Node) -> str:
    return node.target if isinstance(node.target, str) else getattr(node.target, "__name__", "")
