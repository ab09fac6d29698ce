"""Where a network is cut into stages, and which of two ways makes the stages.

1. The forward is read as a graph of calls (torch.fx), and a stage is a range of it (`stages`). This way is preferred:
   a stage runs its own calls only, and a cut may be before any module.
2. Where fx cannot follow the forward (it depends on values, on the mode, or on chance), each stage runs the whole
   forward, with fake tensors in place of what other stages hold (`untraced_stage`). Then cuts are between blocks only.

The plan's cuts are used where there are as many as needed; otherwise the network is cut into about equal parts.
"""

from __future__ import annotations

from collections.abc import Collection
from itertools import accumulate
from typing import Any

import torch
from torch import Tensor, fx, nn
from torch.utils.flop_counter import FlopCounterMode

from trainer.data.nested_tensors import map_tensors
from trainer.messages import Refusal
from trainer.parallel.meta_model import named_state
from trainer.parallel.module_units import has_children, repeated_blocks, require_modules
from trainer.parallel.pipeline.fake_forward import CannotCut, copy_step
from trainer.parallel.pipeline.fx_trace import NETWORK, GraphFlow, Untraceable, trace
from trainer.parallel.pipeline.stages import WITHOUT_STAGES, make_traced_stages
from trainer.parallel.pipeline.untraced_stage import make_untraced_stages

# The heaviest stage may be so many times as heavy as need be, where only one value travels instead of several.
UNEVEN = 1.5
Weights = dict[str, float]  # name of a module or parameter → its fraction of the network, in bytes and arithmetic


def cut_stages(
    step: nn.Module,
    cuts: tuple[str, ...],
    count: int,
    example: Any = None,
    held: Collection[int] | None = None,
    may_draw: bool = False,
) -> dict[int, nn.Module]:
    """The stages of a network by their numbers. Parameters, buffers and modules are the network's, with its names.

    step: the module that is called with (inputs, targets) and calls its `network`. Every stage is called with those and
    with what the stage before handed on. It returns a tuple to hand on; the last stage returns the step's output.

    cuts: the first module of each stage after the first. example: (inputs, targets), to weigh modules and to run a
    forward that is no graph; without it only names are checked for such a forward, and there are no stages. held: the
    stages that are wanted; None: all. may_draw: random numbers of a forward follow from numbers alone, so they are the
    same in every stage. Refusal where the network cannot be cut so.
    """
    network = step.get_submodule(NETWORK)
    wanted = range(count) if held is None else held
    planned = list(cuts) if len(cuts) == count - 1 else []
    for name in planned:
        require_modules(network, name, "the plan's cut", f"; {WITHOUT_STAGES}")
    # the first way: stages are ranges of a graph
    try:
        names = planned or _require_equal_cuts(step, count, example)
        traced = make_traced_stages(step, names, count)
        return {number: traced[number] for number in wanted}
    except Untraceable as error:
        why = str(error)
    # the second way: each stage runs the whole forward
    names = planned or find_cuts_between_blocks(network, count)
    refusal = f"{type(network).__name__} cannot be cut into stages:"
    if not names:
        raise Refusal(
            f"{refusal} its forward cannot be followed ({why}); nor does it repeat {count} blocks in a list, between"
            " which it could be cut all the same: name the first module of each stage in the plan's cuts;"
            f" {WITHOUT_STAGES}"
        )
    try:
        return {} if example is None else make_untraced_stages(step, names, example, wanted, may_draw)
    except CannotCut as error:
        raise Refusal(
            f"{refusal} {error}. (Where it can be read as a graph of calls it can be cut anywhere, but {why}.)"
            f" {WITHOUT_STAGES}"
        ) from error


def _require_equal_cuts(step: nn.Module, count: int, example: Any) -> list[str]:
    """Cuts into about equal parts. Refusal, with the number that works, where there are too few places to cut."""
    names = find_equal_cuts(step, count, example)
    if len(names) < count - 1:
        network, most = step.get_submodule(NETWORK), len(names) + 1
        of_each: dict[Tensor, list[str]] = {}  # the names of each parameter
        for name, parameter in network.named_parameters(remove_duplicate=False):
            of_each.setdefault(parameter, []).append(name)
        tied = [" and ".join(several) for several in of_each.values() if len(several) > 1]
        raise Refusal(
            f"{type(network).__name__} has parts for {most} stage{'s' if most > 1 else ''}, {count} were asked for"
            + (f" ({tied[0]} are one tensor, and all that uses it lies in one stage)" if tied else "")
            + "; "
            + (f"with {most} it would work, or a plan with cuts; {WITHOUT_STAGES}" if most > 1 else WITHOUT_STAGES)
        )
    return names


def find_equal_cuts(step: nn.Module, count: int, example: Any) -> list[str]:
    """The first module of each stage after the first, so that the heaviest stage is as light as can be.

    Cuts over which one value is handed on are preferred, and modules are left whole as long as that is enough. There
    are fewer names than asked for where there are fewer places to cut. example: (inputs, targets), of which only shapes
    are looked at, on the meta device.

    Untraceable where the forward cannot be followed; or where that of a module which outweighs a stage cannot, and
    there are blocks to cut between instead.
    """
    network = step.get_submodule(NETWORK)
    weight = _module_weights(step, example)
    heavy = {name for name, fraction in weight.items() if fraction > weight[""] / count}  # more than a stage's part
    lists = {name for name, module in network.named_modules() if type(module).forward is nn.Sequential.forward}
    names: list[str] = []
    # first look into what is heavy, which must be divided; then into everything, where that was not enough
    for wanted in (heavy | lists, set(weight)):
        graph, closed = _trace_opened(step, wanted)
        if (whole := sorted(heavy & closed.keys())) and find_cuts_between_blocks(network, count):
            raise Untraceable(f"that of {whole[0]} not: {closed[whole[0]]}")
        flow = GraphFlow(graph, network)
        # one value is the least that can travel; with skip connections there may be no such cut, or none in the middle
        starts = _possible_starts(flow)
        narrow = [start for start in starts if len(flow.handed(flow.at[start])) <= 1]
        heaviest_narrow, cuts_narrow = _balance(flow, narrow, count, weight)
        heaviest, cuts = _balance(flow, starts, count, weight)
        if (len(cuts_narrow), -heaviest_narrow) >= (len(cuts), -UNEVEN * heaviest):
            cuts = cuts_narrow
        if len(cuts) == count - 1:
            return cuts
        names = max(names, cuts, key=len)
    return names


def find_cuts_between_blocks(network: nn.Module, count: int) -> list[str]:
    """The first block of each stage after the first, about as many blocks to each; none where there are too few.

    The blocks are those that the network repeats in a list, of several lists in the one with the most bytes.
    """
    lists = {name: repeated_blocks(module) for name, module in network.named_modules()}
    weight = {name: sum(map(_bytes, members.values())) for name, members in lists.items()}
    name = max(weight, key=weight.__getitem__)
    blocks = list(lists[name])
    if len(blocks) < count:
        return []
    return [f"{name}.{blocks[len(blocks) * stage // count]}".strip(".") for stage in range(1, count)]


def _module_weights(step: nn.Module, example: Any) -> Weights:
    """How heavy each module and parameter is: its fraction of all bytes, plus that of the arithmetic of a forward.

    Without an example, or where the forward needs values, bytes alone count. The same on every rank.
    """
    network = step.get_submodule(NETWORK)
    # bytes: a rank must hold its stages
    total = max(_bytes(network), 1)
    weight = {name: _bytes(module) / total for name, module in network.named_modules()}
    weight |= {name: parameter.nbytes / total for name, parameter in network.named_parameters()}
    # arithmetic: all wait for the slowest stage
    work = {} if example is None else _module_flops(step, example)
    return {name: fraction + work.get(name, 0) / max(work.get("", 0), 1) for name, fraction in weight.items()}


def _trace_opened(step: nn.Module, wanted: set[str]) -> tuple[fx.Graph, dict[str, str]]:
    """A trace that looks into every module that is wanted; and those whose forwards cannot be followed, with why."""
    network = step.get_submodule(NETWORK)
    opened: set[str] = set()
    closed: dict[str, str] = {}
    graph = trace(step, opened)
    # one level at a time: what a module calls is seen only when it has been opened
    while True:
        names = [
            name
            for name in dict.fromkeys(str(node.target) for node in graph.nodes if node.op == "call_module")
            if name in wanted - closed.keys() and has_children(network.get_submodule(name))
        ]
        if not names:
            return graph, closed
        for name in names:
            try:
                graph = trace(step, opened | {name})
                opened.add(name)
            except Untraceable as error:
                closed[name] = str(error)  # it stays a single call, and nothing is lost but a place to cut


def _possible_starts(flow: GraphFlow) -> list[fx.Node]:
    """Modules with parameters before which the network can be cut: none of its parameters is used on both sides."""
    # a tensor must lie in one stage: between its first and its last use no cut can be
    span: dict[int, tuple[int, int]] = {}
    for index, node in enumerate(flow.nodes):
        for tensor in flow.state(node):
            if isinstance(tensor, nn.Parameter) or node.op == "call_module":
                span[id(tensor)] = (span.get(id(tensor), (index, index))[0], index)
    # a module that is called twice can only be a stage's first where it is called first
    first: dict[Any, fx.Node] = {}
    for node in flow.nodes:
        if node.op == "call_module" and any(isinstance(tensor, nn.Parameter) for tensor in flow.state(node)):
            first.setdefault(node.target, node)
    return [node for node in first.values() if not any(a < flow.at[node] <= b for a, b in span.values())]


def _balance(flow: GraphFlow, starts: list[fx.Node], count: int, weight: Weights) -> tuple[float, list[str]]:
    """The weight of the heaviest stage, and the names of the cuts with which it is lightest.

    starts: the modules before which there may be a cut. As many stages as can be, at most `count`; every stage has a
    parameter.
    """
    # sums from the flow's beginning: what lies between two of them is a difference
    ends = [0, *(flow.at[start] for start in starts), len(flow.nodes)]
    weights = [
        weight.get(str(node.target), 0.0) if node.op in ("call_module", "get_attr") else 0.0 for node in flow.nodes
    ]
    counts = [sum(isinstance(tensor, nn.Parameter) for tensor in flow.state(node)) for node in flow.nodes]
    sums, parameters = [0.0, *accumulate(weights)], [0, *accumulate(counts)]
    # Dynamic programming over the places to cut. best[e]: number of stages → the best way to have so many up to
    # ends[e]: (weight of the heaviest, sum of squares of all, the cuts). Of equal maxima the evener way wins.
    best: list[dict[int, tuple[float, float, list[int]]]] = [{0: (0.0, 0.0, [])}]
    for e in range(1, len(ends)):
        best.append({})
        for s in range(e):
            if parameters[ends[s]] == parameters[ends[e]]:
                continue  # a stage without a parameter
            # the last stage from s to e, behind the best of all ways to s
            stage_weight = sums[ends[e]] - sums[ends[s]]
            for stages, (heaviest, squares, cuts) in best[s].items():
                candidate = (max(heaviest, round(stage_weight, 6)), squares + stage_weight**2, [*cuts, s])
                if stages < count and candidate[:2] < best[e].get(stages + 1, (float("inf"), 0.0, []))[:2]:
                    best[e][stages + 1] = candidate
    if not best[-1]:
        return 0.0, []
    heaviest, _, cuts = best[-1][max(best[-1])]  # as many stages as can be; the first one begins without a cut
    return heaviest, [str(starts[cut - 1].target) for cut in cuts[1:]]


def _bytes(module: nn.Module) -> int:
    return sum(parameter.nbytes for parameter in module.parameters())


def _module_flops(step: nn.Module, example: Any) -> dict[str, int]:
    """Floating-point operations of each module in one forward, counted on shapes; nothing where that fails."""

    def shapes(tensor: Tensor) -> Tensor:
        return torch.empty_like(tensor, device="meta")

    state = {tensor: shapes(tensor.detach()) for _, tensor in named_state(step)}
    try:
        # a copy: of a module with two names torch's functional_call would not put everything back
        with torch.no_grad(), FlopCounterMode(display=False) as counter:
            copy_step(step, state)(*map_tensors(example, shapes))
    except Exception:  # a forward that needs values; the bytes alone must do
        return {}
    prefix = f"{type(step).__name__}.{NETWORK}"
    counts = {name: sum(each.values()) for name, each in counter.get_flop_counts().items()}
    return {name.removeprefix(prefix).removeprefix("."): n for name, n in counts.items() if name.startswith(prefix)}
