"""Stages as modules: made from a graph of the forward, and all stages of one rank as one module."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from itertools import pairwise
from typing import Any

from torch import Tensor, fx, nn

from trainer.messages import Refusal, did_you_mean
from trainer.parallel.meta_model import named_state
from trainer.parallel.module_units import ancestors
from trainer.parallel.pipeline.fx_trace import NETWORK, GraphFlow, get_tensor, is_in_place, trace
from trainer.parallel.rng.random_draw import with_call_site

WITHOUT_STAGES = "strategy=fsdp and strategy=ddp need no cutting"
BATCH = 2  # arguments of every stage before what is handed on: inputs, targets


def make_traced_stages(step: nn.Module, names: list[str], count: int) -> list[fx.GraphModule]:
    """The stages as ranges of a graph of calls. Untraceable where the forward is none.

    names: the first module of each stage after the first. Refusal where there can be no cut.
    """
    network = step.get_submodule(NETWORK)
    # look into what a cut lies inside of; everything else stays one call
    flow = GraphFlow(trace(step, {above for name in names for above in ancestors(name)}), network)
    # what is refused here would hang or train wrongly later
    bounds = [0, *_stage_starts(flow, names), len(flow.nodes)]
    _refuse_stages(network, flow, bounds)
    stages = [_make_stage(network, flow, bounds, index) for index in range(count)]
    _keep_state(network, stages)
    return stages


def _stage_starts(flow: GraphFlow, names: list[str]) -> list[int]:
    """Where in the flow each stage after the first begins. Refusal where that is nowhere, or out of order."""
    # a module that is called several times begins where it is called first
    calls: dict[str, int] = {}
    for index, node in enumerate(flow.nodes):
        if node.op == "call_module":
            calls.setdefault(str(node.target), index)
    for name in names:
        if name not in calls:
            near = did_you_mean(name, calls)
            raise Refusal(f"the plan's cut {name!r} is never called by the forward{near}; {WITHOUT_STAGES}")
    starts = [calls[name] for name in names]
    if starts != sorted(set(starts)):
        order = ", ".join(sorted(names, key=calls.__getitem__))
        raise Refusal(f"the plan's cuts are not in the order of the forward, which is {order}")
    return starts


def _refuse_stages(network: nn.Module, flow: GraphFlow, bounds: list[int]) -> None:
    """Refuse parameters that two stages would share, and stages that have none."""
    first_use: dict[int, tuple[int, str]] = {}  # id of a tensor → the stage that has it, and under which name
    for index, (start, end) in enumerate(pairwise(bounds)):
        has_parameter = False
        for node in flow.nodes[start:end]:
            if flow.is_copied(node):
                continue
            # a tensor in two stages would be two tensors, which learn different things
            for tensor in flow.state(node):
                has_parameter |= isinstance(tensor, nn.Parameter)
                other, name = first_use.setdefault(id(tensor), (index, str(node.target)))
                if other != index:
                    raise Refusal(
                        f"{name} and {node.target} share a parameter or buffer, and would lie in stages {other} and"
                        f" {index}: tied parts must be in one stage; {WITHOUT_STAGES}"
                    )
        if not has_parameter:
            raise Refusal(
                f"stage {index} of {len(bounds) - 1} would have no parameter: cut elsewhere; {WITHOUT_STAGES}"
            )
        if index and not flow.handed(start):
            raise Refusal(f"stage {index - 1} gives stage {index} no value: cut elsewhere; {WITHOUT_STAGES}")


def _make_stage(network: nn.Module, flow: GraphFlow, bounds: list[int], index: int) -> fx.GraphModule:
    """One stage: its range of the graph, with the modules that it calls.

    It is called with (inputs, targets, *received) and returns what the next stage receives.
    """
    graph = fx.Graph()
    nodes = flow.nodes[bounds[index] : bounds[index + 1]]
    here: dict[fx.Node, fx.Node] = {}  # a node of the whole forward → the same in this stage
    for node in flow.nodes[:BATCH]:
        here[node] = graph.placeholder(str(node.target))
    # beside the batch, a stage takes what earlier ones have computed
    received = flow.handed(bounds[index]) if index else []
    for node in received:
        here[node] = graph.placeholder(node.name)
    for node in received:
        if _may_be_written(network, nodes, node):
            here[node] = graph.call_method("clone", (here[node],))  # autograd forbids writing into what it began with

    def find(node: fx.Node) -> fx.Node:
        if node not in here:
            here[node] = graph.node_copy(node, find)  # computed here again
        return here[node]

    # this stage's nodes, in their order; what every stage computes by itself is copied when a node needs it
    for node in nodes:
        if node.op == "output":
            graph.output(fx.node.map_arg(node.args[0], find))
        elif not flow.is_copied(node):
            here[node] = graph.node_copy(node, find)
    # the network's output ends the last stage; others end with what the rest needs, also what they only pass on
    if index < len(bounds) - 2:
        graph.output(tuple(find(node) for node in flow.handed(bounds[index + 1])))
    _set_call_sites(graph)
    stage = fx.GraphModule(network, graph, class_name="Stage")
    # of a module that several stages call, as all of them may call a dropout, these calls are earlier ones
    vars(stage)["earlier_calls"] = Counter(
        node.target for node in flow.nodes[: bounds[index]] if node.op == "call_module"
    )
    return stage


def _set_call_sites(graph: fx.Graph) -> None:
    """Let functions that draw know the module in whose code they stood; a graph has the code of several."""
    for node in [node for node in graph.nodes if "call_site" in node.meta]:
        function = getattr(Tensor, node.target) if isinstance(node.target, str) else node.target
        with graph.inserting_before(node):
            replacement = graph.call_function(with_call_site(node.meta["call_site"], function), node.args, node.kwargs)
        node.replace_all_uses_with(replacement)
        graph.erase_node(node)


def _may_be_written(network: nn.Module, nodes: list[fx.Node], value: fx.Node) -> bool:
    """May one of these nodes write into this value? A module that does anything in place might."""
    for node in nodes:
        if value not in node.all_input_nodes:
            continue
        if node.op == "call_module":
            # torch's layers say it by this attribute; of others nothing is known
            if any(getattr(m, "inplace", False) for m in network.get_submodule(str(node.target)).modules()):
                return True
        elif is_in_place(node):
            return True
    return False


def _keep_state(network: nn.Module, stages: list[fx.GraphModule]) -> None:
    """Make sure that the stages together have exactly the names of the network's state.

    What no stage uses stays with the first. A buffer that the network does not store is not stored by a stage either.
    """
    # a checkpoint is the union of all stages: it must be that of the whole network
    stored = set(network.state_dict())
    held = {name for stage in stages for name, _ in named_state(stage)}
    for name, tensor in named_state(network):
        if name not in held:
            _register(stages[0], name, tensor, name in stored)
    # fx has made buffers persistent that the network does not store
    for stage in stages:
        for name in set(stage.state_dict()) - stored:
            _register(stage, name, get_tensor(stage, name), persistent=False)


def _register(stage: nn.Module, name: str, tensor: Tensor, persistent: bool) -> None:
    """Give a stage a tensor under a name of the network; what it lies in there has no code."""
    holder, (*path, last) = stage, name.split(".")
    for part in path:
        if not hasattr(holder, part):
            holder.add_module(part, nn.Module())
        holder = holder.get_submodule(part)
    if isinstance(tensor, nn.Parameter):
        holder.register_parameter(last, tensor)
    else:
        if hasattr(holder, last):
            delattr(holder, last)
        holder.register_buffer(last, tensor, persistent)


class RankStages(nn.Module):
    """The stages that one rank holds, as one module: everything stands under the network's own names.

    order: the names of the network's modules. They come in this order, so that of tied weights the same name is first.
    """

    def __init__(self, stages: Sequence[nn.Module], order: Sequence[str]) -> None:
        super().__init__()
        self._order = {name: at for at, name in enumerate(order)}
        for index, stage in enumerate(stages):
            self.add_module(str(index), stage)

    def named_modules(
        self, memo: set[nn.Module] | None = None, prefix: str = "", remove_duplicate: bool = True
    ) -> Iterator[tuple[str, nn.Module]]:
        """Every module under its name in the network; parameters and buffers follow from this."""
        memo = set() if memo is None else memo
        yield prefix, self
        # one tree of names out of several stages, which have bare holders of the same names
        held = [pair for stage in self.children() for pair in stage.named_modules(memo, "", remove_duplicate)]
        for name, module in sorted(held, key=lambda pair: self._order.get(pair[0], len(self._order))):
            yield f"{prefix}.{name}".strip("."), module

    def __getattr__(self, name: str) -> Any:
        """A module of the network. AttributeError, in words, where another rank has it."""
        # torch's own lookup first: parameters, buffers and the stages themselves
        with suppress(AttributeError):
            return super().__getattr__(name)
        with suppress(AttributeError):
            return self.get_submodule(name)
        held = ", ".join(sorted({held.split(".")[0] for held, _ in self.named_modules() if held}))
        raise AttributeError(
            f"{name}: this rank of a pipeline holds these of the network only: {held}; a task's after_step finds what"
            " is there by network.named_parameters()"
        )

    def get_submodule(self, target: str) -> nn.Module:
        """The module of this name. AttributeError where no stage here has it."""
        for name, module in self.named_modules():
            if name == target:
                return module
        raise AttributeError(f"no stage of this rank has a module {target}")

    def state_dict(  # type: ignore[override]  # the base also takes positions, which torch has deprecated
        self, *, destination: dict[str, Any] | None = None, prefix: str = "", keep_vars: bool = False
    ) -> dict[str, Any]:
        """What all stages here hold, under the network's own names."""
        held: dict[str, Any] = {} if destination is None else destination
        for stage in self.children():
            held.update(stage.state_dict(prefix=prefix, keep_vars=keep_vars))
        return held

    def load_state_dict(self, state_dict: Mapping[str, Any], strict: bool = True, assign: bool = False) -> Any:
        """Take over the values of all stages here; what other ranks hold is passed over."""
        for stage in self.children():
            values = stage.state_dict()  # it also holds the versions of modules, which some ask for
            for name in values.keys() - state_dict.keys():
                del values[name]
            values.update({name: state_dict[name] for name in values})
            stage.load_state_dict(values, strict, assign)
