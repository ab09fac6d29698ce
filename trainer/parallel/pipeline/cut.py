"""Where a network is cut into stages: where its plan says, or else into parts of about the same size."""

from __future__ import annotations

from collections.abc import Collection, Iterator
from itertools import accumulate
from typing import Any

from torch import nn
from torch.utils.flop_counter import FlopCounterMode

from trainer.messages import Refusal, format_count
from trainer.parallel.module_units import LISTS, repeated_blocks, require_modules
from trainer.parallel.pipeline.fake_forward import NETWORK, CannotCut, FakeForward
from trainer.parallel.pipeline.stages import make_stages

WITHOUT_STAGES = "strategy=fsdp and strategy=ddp need no cutting"


def cut_stages(
    step: nn.Module,
    cuts: tuple[str, ...],
    count: int,
    example: Any,
    held: Collection[int] | None = None,
    may_draw: bool = False,
) -> dict[int, nn.Module]:
    """The stages of a network by their numbers. Parameters, buffers and modules are the network's, with its names.

    step: the module that is called with (inputs, targets) and calls its `network`. Every stage is called with those and
    with what the stage before handed on. It returns a tuple to hand on; the last stage returns the step's output.

    cuts: the first module of each stage after the first; another number of them than is needed is passed over. example:
    (inputs, targets), for a forward on shapes. held: the stages that are wanted; None: all. may_draw: random numbers of
    a forward follow from numbers alone, so they are the same in every stage. Refusal where the network cannot be cut
    so.
    """
    network = step.get_submodule(NETWORK)
    try:
        if len(cuts) == count - 1:
            for name in cuts:
                require_modules(network, name, "the plan's cut", f"; {WITHOUT_STAGES}")
            names = [*cuts]
        else:
            names = find_equal_cuts(step, count, example, may_draw)
        return make_stages(step, names, example, range(count) if held is None else held, may_draw)
    except CannotCut as error:
        raise Refusal(f"{type(network).__name__} cannot be cut into stages: {error}; {WITHOUT_STAGES}") from error


def find_equal_cuts(step: nn.Module, count: int, example: Any, may_draw: bool) -> list[str]:
    """The first module of each stage after the first, so that the heaviest stage is as light as can be.

    Refusal, with the number that works, where there are too few modules to cut between.
    """
    network = step.get_submodule(NETWORK)
    total = _bytes(network)
    parts = dict(_parts(network, "", total / count))
    with FlopCounterMode(display=False) as counter:
        names = FakeForward(step, [], example, may_draw, watched=parts).called
    if len(names) < count:
        fewer = f"with {len(names)} it would work, or a plan with cuts; " if len(names) > 1 else ""
        raise Refusal(
            f"{type(network).__name__} has parts for {format_count(len(names), 'stage')}, {count} were asked for;"
            f" {fewer}{WITHOUT_STAGES}"
        )
    # bytes, as a rank must hold its stages; and arithmetic, as all wait for the slowest stage
    flops = {name: sum(counts.values()) for name, counts in counter.get_flop_counts().items()}
    whole = f"{type(step).__name__}.{NETWORK}"
    work = [flops.get(f"{whole}.{name}", 0) / max(flops.get(whole, 0), 1) for name in names]
    weights = [_bytes(parts[name]) / total + part for name, part in zip(names, work, strict=True)]
    sums = [0.0, *accumulate(weights)]
    # by where the last stage ends: the weight of the heaviest stage, the sum of all squares, and where stages begin
    ways: dict[int, tuple[float, float, list[int]]] = {0: (0.0, 0.0, [])}
    for _ in range(count):
        longer: dict[int, tuple[float, float, list[int]]] = {}
        for begin, (heaviest, squares, begins) in ways.items():
            for end in range(begin + 1, len(sums)):
                weight = sums[end] - sums[begin]
                way = max(heaviest, round(weight, 6)), squares + weight**2, [*begins, begin]
                longer[end] = min(longer.get(end, way), way)
        ways = longer
    return [names[begin] for begin in ways[len(names)][2][1:]]


def _parts(parent: nn.Module, prefix: str, part: float) -> Iterator[tuple[str, nn.Module]]:
    """Modules with parameters before which there may be a cut, by name: those in lists, and those beside the lists.

    What repeats in a list stays whole, unless it has more bytes than a stage's part and is a list, or has lists of
    blocks inside.
    """
    repeated = repeated_blocks(parent).values()
    for word, child in parent.named_children():
        has_blocks = any(repeated_blocks(inner) for inner in child.modules())
        is_list = isinstance(child, LISTS) and type(child).forward in (nn.Sequential.forward, nn.Module.forward)
        if (has_blocks or is_list) and (child not in repeated or _bytes(child) > part):
            yield from _parts(child, f"{prefix}{word}.", part)
        elif _bytes(child):
            yield f"{prefix}{word}", child


def _bytes(module: nn.Module) -> int:
    return sum(parameter.nbytes for parameter in module.parameters())
