"""Cutting a network into stages: modules that run one after the other, each with its own parameters."""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection
from itertools import pairwise
from typing import Any

from torch import Tensor, fx, nn

from trainer.parallel.local_shard import named_tensors
from trainer.parallel.per_sample_draw import drawn_by
from trainer.parallel.pipeline.balance import between_blocks, equal_cuts
from trainer.parallel.pipeline.shape_forward import Uncut
from trainer.parallel.pipeline.trace import ROOT, Flow, Untraceable, attribute, trace, writes
from trainer.parallel.pipeline.untraced_stage import running_stages
from trainer.parallel.units import enclosing, matched
from trainer.refusal import Refusal, nearest

ELSE = "strategy=fsdp and strategy=ddp need no cutting"
BATCH = 2  # arguments of every stage before what is handed on: inputs, targets


def cut_stages(
    step: nn.Module,
    cuts: tuple[str, ...],
    count: int,
    example: Any = None,
    held: Collection[int] | None = None,
    may_draw: bool = False,
) -> dict[int, nn.Module]:
    """The stages of a network by their numbers; parameters, buffers and modules are its own, under its names.

    step: the module that is called with (inputs, targets) and calls its `network`. Every stage is called with those,
    and what the stage before handed on; it returns a tuple to hand on, the last one the step's output.

    `cuts`: the first module of each stage after the first; where they are not as many as `count` asks for, the network
    is cut into about equal parts, weighed with an `example`. A forward that cannot be read as a graph is cut between
    blocks and run by every stage; without an example to run it with, only their names are looked at, and there are no
    stages. held: the stages that are wanted; None: all. may_draw: what a forward draws by itself follows from numbers,
    and is the same in every stage. Refusal where the network cannot be cut so.
    """
    network = step.get_submodule(ROOT)
    planned = list(cuts) if len(cuts) == count - 1 else []
    for name in planned:
        matched(network, name, "the plan's cut", f"; {ELSE}")
    try:
        graphs = _graphs(step, planned or _equal(step, count, example), count)
        return {number: graphs[number] for number in (range(count) if held is None else held)}
    except Untraceable as error:
        why = str(error)
    names = planned or between_blocks(network, count)
    said = f"{type(network).__name__} cannot be cut into stages:"
    if not names:
        raise Refusal(
            f"{said} its forward cannot be followed ({why}); nor does it repeat {count} blocks in a list, between which"
            f" it could be cut all the same: name the first module of each stage in the plan's cuts; {ELSE}"
        )
    try:
        wanted = range(count) if held is None else held
        return {} if example is None else running_stages(step, names, example, wanted, may_draw)
    except Uncut as error:
        raise Refusal(
            f"{said} {error}. (Where it can be read as a graph of calls it can be cut anywhere, but {why}.) {ELSE}"
        ) from error


def _graphs(step: nn.Module, names: list[str], count: int) -> list[fx.GraphModule]:
    """The stages as ranges of a graph of calls. Untraceable where the forward is none."""
    network = step.get_submodule(ROOT)
    flow = Flow(trace(step, {above for name in names for above in enclosing(name)}), network)
    # what is refused here would hang or train wrongly later
    bounds = [0, *_ends(flow, names), len(flow.nodes)]
    _refuse_stages(network, flow, bounds)
    stages = [_stage(network, flow, bounds, index) for index in range(count)]
    _keep_state(network, stages)
    return stages


def _equal(step: nn.Module, count: int, example: Any) -> list[str]:
    names = equal_cuts(step, count, example)
    if len(names) < count - 1:
        kind = type(step.get_submodule(ROOT)).__name__
        most = len(names) + 1
        raise Refusal(
            f"{kind} has parts for {most} stage{'s' if most > 1 else ''}, {count} were asked for; "
            + (f"with {most} it would work, or a plan with cuts; {ELSE}" if most > 1 else ELSE)
        )
    return names


def _ends(flow: Flow, names: list[str]) -> list[int]:
    """Where in the flow each stage after the first begins. Refusal where that is nowhere, or out of order."""
    # a module that is called several times begins where it is called first
    calls: dict[str, int] = {}
    for index, node in enumerate(flow.nodes):
        if node.op == "call_module":
            calls.setdefault(str(node.target), index)
    for name in names:
        if name not in calls:
            near = nearest(name, calls)
            raise Refusal(f"the plan's cut {name!r} is never called by the forward{near}; {ELSE}")
    ends = [calls[name] for name in names]
    if ends != sorted(set(ends)):
        order = ", ".join(sorted(names, key=calls.__getitem__))
        raise Refusal(f"the plan's cuts are not in the order of the forward, which is {order}")
    return ends


def _refuse_stages(network: nn.Module, flow: Flow, bounds: list[int]) -> None:
    """Refuse parameters that two stages would share, and stages that have none."""
    held: dict[int, tuple[int, str]] = {}
    for index, (start, end) in enumerate(pairwise(bounds)):
        held_any = False
        for node in flow.nodes[start:end]:
            if flow.is_copied(node):
                continue
            # a tensor in two stages would be two tensors, which learn different things
            for tensor in flow.state(node):
                held_any |= isinstance(tensor, nn.Parameter)
                other, name = held.setdefault(id(tensor), (index, str(node.target)))
                if other != index:
                    raise Refusal(
                        f"{name} and {node.target} share a parameter or buffer, and would lie in stages {other} and"
                        f" {index}: tied parts must be in one stage; {ELSE}"
                    )
        if not held_any:
            raise Refusal(f"stage {index} of {len(bounds) - 1} would have no parameter: cut elsewhere; {ELSE}")
        if index and not flow.handed(start):
            raise Refusal(f"stage {index - 1} gives stage {index} no value: cut elsewhere; {ELSE}")


def _stage(network: nn.Module, flow: Flow, bounds: list[int], index: int) -> fx.GraphModule:
    """One stage's piece of the graph, with the modules that it calls."""
    graph = fx.Graph()
    here: dict[fx.Node, fx.Node] = {}
    for node in flow.nodes[:BATCH]:
        here[node] = graph.placeholder(str(node.target))
    # beside the batch, a stage takes what earlier ones have worked out
    received = flow.handed(bounds[index]) if index else []
    for node in received:
        here[node] = graph.placeholder(node.name)
    for node in received:
        if _is_changed(network, flow.nodes[bounds[index] : bounds[index + 1]], node):
            here[node] = graph.call_method("clone", (here[node],))  # autograd forbids writing into what it began with

    def find(node: fx.Node) -> fx.Node:
        if node not in here:
            here[node] = graph.node_copy(node, find)  # worked out here again
        return here[node]

    # its own nodes, in their order; what every stage has anyway is worked out when somebody asks for it
    for node in flow.nodes[bounds[index] : bounds[index + 1]]:
        if node.op == "output":
            graph.output(fx.node.map_arg(node.args[0], find))
        elif not flow.is_copied(node):
            here[node] = graph.node_copy(node, find)
    # the network's output ends the last stage; others end with what the rest needs, also what they only pass on
    if index < len(bounds) - 2:
        graph.output(tuple(find(node) for node in flow.handed(bounds[index + 1])))
    _tell_who_draws(graph)
    stage = fx.GraphModule(network, graph, class_name="Stage")
    # of a module that several stages call, as all of them may call a dropout, these calls are earlier ones
    vars(stage)["earlier_calls"] = Counter(
        node.target for node in flow.nodes[: bounds[index]] if node.op == "call_module"
    )
    return stage


def _tell_who_draws(graph: fx.Graph) -> None:
    """Have functions that draw know the module in whose code they stood; a graph has the code of several."""
    for node in [node for node in graph.nodes if "drawn" in node.meta]:
        function = getattr(Tensor, node.target) if isinstance(node.target, str) else node.target
        with graph.inserting_before(node):
            told = graph.call_function(drawn_by(node.meta["drawn"], function), node.args, node.kwargs)
        node.replace_all_uses_with(told)
        graph.erase_node(node)


def _is_changed(network: nn.Module, nodes: list[fx.Node], value: fx.Node) -> bool:
    """May one of these nodes write into this value? A module that does anything in place might."""
    for node in nodes:
        if value not in node.all_input_nodes:
            continue
        if node.op == "call_module":
            # torch's layers say it by this attribute; of others nothing is known
            if any(getattr(m, "inplace", False) for m in network.get_submodule(str(node.target)).modules()):
                return True
        elif writes(node):
            return True
    return False


def _keep_state(network: nn.Module, stages: list[fx.GraphModule]) -> None:
    """See to it that the stages together have the network's own names, no more and no fewer.

    What no stage uses stays with the first. A buffer that is no part of the network's state is none of a stage's.
    """
    # a checkpoint is the union of all stages: it must be that of the whole network
    stored = set(network.state_dict())
    held = {name for stage in stages for name, _ in named_tensors(stage)}
    for name, tensor in named_tensors(network):
        if name not in held:
            _hold(stages[0], name, tensor, name in stored)
    # fx has made buffers persistent that the network does not store
    for stage in stages:
        for name in set(stage.state_dict()) - stored:
            _hold(stage, name, attribute(stage, name), persistent=False)


def _hold(stage: nn.Module, name: str, tensor: Tensor, persistent: bool) -> None:
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
