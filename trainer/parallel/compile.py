"""torch.compile of a network or of its units, and how many graphs it made."""

from __future__ import annotations

import sys
from collections import Counter, defaultdict
from collections.abc import Callable, Collection, Iterator
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from functools import partial
from time import monotonic
from typing import Any, Literal

import torch
from torch import nn
from typing_extensions import override

from trainer.learning.parallel_plan import Plan
from trainer.messages import format_count
from trainer.parallel.rng.draw_numbers import after_unit, draw_number, hash_name, inside_unit
from trainer.parallel.rng.native_rng import TorchRNG


@dataclass(frozen=True)
class CompileSettings:
    """How a network is compiled; the fields are the keys of `compile`, and mean what torch.compile says of them."""

    mode: Literal["default", "reduce-overhead", "max-autotune"] = "default"
    scope: Literal["units", "network"] | None = None  # each unit by itself, or the whole; None: units if there are any
    fullgraph: bool = False  # a graph that ends inside of what is compiled is an error
    dynamic: bool | None = None  # are sizes variable from the first graph on? None: from the second one on


class NoCompiler:
    """Compiles nothing."""

    def wants_units(self, plan: Plan) -> bool:
        """Are units to be found, so that each is compiled by itself?"""
        return False

    def compile_units(self, network: nn.Module, names: list[str], recomputed: bool) -> None:
        """Compile these units of a network, in place. recomputed: are units run again in the backward?"""

    def begin_forward(self, network: nn.Module) -> None:
        """A forward of this network begins."""

    def pop_notes(self) -> list[str]:
        """What a user should know of the graphs since the last call."""
        return []


class Compiler(NoCompiler):
    """Compiles as the settings say, and counts its graphs."""

    def __init__(self, settings: CompileSettings, rng: TorchRNG) -> None:
        """rng: whose random numbers a forward has."""
        self.settings, self._rng = settings, rng
        self.graphs, self._seconds = 0, 0.0  # made until now, and how long that took
        self.backend = self._compile_graph  # one object: by it torch knows which graphs units may share
        self._said = 0  # of the graphs

    @override
    def wants_units(self, plan: Plan) -> bool:
        return self.settings.scope == "units" or (self.settings.scope is None and bool(plan.shard))

    @override
    def compile_units(self, network: nn.Module, names: list[str], recomputed: bool) -> None:
        """Compile each of these units by itself, in place; the whole network where none is named. Names stay.

        Units of one class and with parameters of the same shapes share one graph: torch's cache belongs to the code,
        not to the module. So it also counts towards one limit how often all of them had to be compiled, and then
        silently gives up; the limit is raised to what these units may need.
        """
        # where a graph ended inside of a recomputed unit, the second forward would draw other numbers: torch says where
        fullgraph = self.settings.fullgraph or (recomputed and self._rng.draws_samples)
        how: dict[str, Any] = {"backend": self.backend, "fullgraph": fullgraph}
        if not names or self.settings.scope == "network":
            # a stage of a pipeline is compiled in parts: the code between them stays Python
            parts: dict[str, nn.Module] = getattr(network, "compiled_parts", lambda: {"": network})()
            for name, part in parts.items():
                how["backend"] = partial(self._compile_graph, below=name)
                _compile_forward(part, dynamic=self.settings.dynamic, **how)
            return
        limit = torch.compiler.config
        # training, evaluation, two batch sizes each
        limit.recompile_limit = max(limit.recompile_limit, 8 + 4 * len(names))
        limit.accumulated_recompile_limit = max(limit.accumulated_recompile_limit, 4 * limit.recompile_limit)
        shapes = defaultdict(set)
        units = [network.get_submodule(name) for name in names]
        for unit in units:
            shapes[type(unit)].add(tuple(parameter.shape for parameter in unit.parameters()))
        for unit in units:
            # where sizes differ from unit to unit torch would take them for variable, and compute slower for it
            alike = len(shapes[type(unit)]) == 1
            _compile_forward(unit, dynamic=self.settings.dynamic if alike or self.settings.dynamic else False, **how)

    def _compile_graph(self, graph: torch.fx.GraphModule, inputs: Any, below: str | None = None) -> Callable[..., Any]:
        """What torch calls for each graph: Inductor, in the mode of the settings.

        below: the name of what is compiled as a whole; None where it is a unit.
        """
        from torch._inductor import list_mode_options  # a second of imports, which most runs need not pay
        from torch._inductor.compile_fx import compile_fx

        began = monotonic()
        options = list_mode_options(self.settings.mode, self.settings.dynamic)
        if self._rng.draws_samples:
            compiled: Any = self._compile_drawing(graph, inputs, options, below)
        else:
            compiled = compile_fx(graph, inputs, config_patches=options)
        self.graphs, self._seconds = self.graphs + 1, self._seconds + monotonic() - began
        return compiled

    def _compile_drawing(
        self, graph: torch.fx.GraphModule, inputs: Any, options: dict[str, Any], below: str | None
    ) -> Callable[..., Any]:
        """A graph that calls torch's own random operators, in the order of the program, where our kernels see them."""
        from torch._functorch import config as autograd_config
        from torch._inductor.compile_fx import compile_fx, compile_fx_inner

        rng, places = self._rng, list[int | None]()

        def look_and_compile(lowered: torch.fx.GraphModule, *args: Any, **more: Any) -> Any:
            if below is not None and not more.get("is_backward"):
                places.extend(_draws_of_graph(lowered, rng.units, below))
            return compile_fx_inner(lowered, *args, **more)

        options = {**options, "fallback_random": True}
        # torch's cache of graphs with their gradients would hand out one at which nobody has looked
        with autograd_config.patch(enable_autograd_cache=False):
            run: Any = compile_fx(graph, inputs, inner_compile=look_and_compile, config_patches=options)
        if not any(places):
            return run  # hooks tell which unit it is

        def run_with_places(*args: Any) -> Any:
            with rng.in_graph(places):
                return run(*args)

        return run_with_places

    @override
    def begin_forward(self, network: nn.Module) -> None:
        """CUDA graphs write over what they gave before: gradients of an earlier micro-batch move out of the way."""
        if self.settings.mode in ("reduce-overhead", "max-autotune"):
            for parameter in network.parameters():
                if parameter.grad is not None:
                    parameter.grad = parameter.grad.clone()
            torch.compiler.cudagraph_mark_step_begin()

    @override
    def pop_notes(self) -> list[str]:
        """How many graphs were made since the last call."""
        new, before, self._said = self.graphs - self._said, self._said, self.graphs
        if not new:
            return []
        again = "; a shape, a type or a mode was new: TORCH_LOGS=recompiles shows which" if before else ""
        of = f"{new} more, {self.graphs} graphs in all" if before else format_count(new, "graph")
        return [f"compile: {of}, {self._seconds:.0f} s until now{again}"]


def make_compiler(settings: CompileSettings | None, rng: TorchRNG) -> NoCompiler:
    """What compiles a run's network."""
    return NoCompiler() if settings is None else Compiler(settings, rng)


def is_compiler_loaded() -> bool:
    """Has anybody imported the compiler? Else nothing is compiled, and its import takes a third of a start."""
    return "torch._dynamo" in sys.modules


def set_fallback_random(value: bool | None) -> bool | None:
    """Whether graphs call torch's own random operators from now on; returns what was. None: nobody compiles."""
    if value is None or not is_compiler_loaded():
        return None
    from torch._inductor import config

    before, config.fallback_random = config.fallback_random, value
    return before


def without_compile() -> AbstractContextManager[Any]:
    """Inside it compiled modules run as they were written: for a trial batch, whose size is not that of a step.

    A first call of another size would cost a graph that is never used again, and have torch take the size for variable.
    """
    return torch.compiler.set_stance("force_eager") if is_compiler_loaded() else nullcontext()


def _compile_forward(module: nn.Module, **how: Any) -> None:
    """Compile what a module computes. Its hooks run as they are: by them it is known where a unit begins and ends."""
    vars(module)["forward"] = torch.compile(module.forward, **how)


def _draws(node: torch.fx.Node) -> bool:
    """Is it an operator that draws? Fused attention is marked, too; where there is dropout in it, it is not fused."""
    marked = torch.Tag.nondeterministic_seeded in getattr(node.target, "tags", ())
    return node.op == "call_function" and marked and "attention" not in str(node.target)


def _draws_of_graph(graph: torch.fx.GraphModule, units: Collection[str], below: str) -> Iterator[int | None]:
    """The numbers of a graph's draws, in its order: where in the network each one is. None: before any unit.

    While a graph runs no hook does. But torch notes for each operator which modules it comes from, as
    "L['self'].blocks.0", and which call of them.
    """
    places: Counter[int] = Counter()  # draws at each place
    place: int | None = None
    for node in graph.graph.nodes:
        stack = node.meta.get("nn_module_stack") or {}
        names = {key: ".".join(filter(None, (below, *path.split(".")[1:]))) for key, (path, _) in stack.items()}
        unit = next((key for key, name in names.items() if name in units), None)
        if unit is not None:
            last = hash_name(names[unit]), int(unit.partition("@")[2] or 0) + 1  # its call
            place = inside_unit(*last)
        elif place is not None:
            place = after_unit(*last)
        if _draws(node):
            places[place or 0] += 1
            yield None if place is None else draw_number(place, places[place])
