"""torch.compile of a network or of its units, and how many graphs it made."""

from __future__ import annotations

import sys
from collections import defaultdict
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from time import monotonic
from typing import Any, Literal

import torch
from torch import nn
from torch.overrides import TorchFunctionMode
from typing_extensions import override

from trainer.learning.parallel_plan import Plan
from trainer.messages import format_count

# Functions that torch's tracer does not show to a function mode: in a graph they would draw torch's own numbers. Their
# operators are known by these names alone. The first two are shown by torch 2.15, and not by 2.11.
_UNSEEN = {"rand", "randn", "rand_like", "randn_like", "randint_like"}
_UNSEEN |= {"randperm", "multinomial", "poisson", "native_dropout"}


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

    def __init__(self, settings: CompileSettings, sample_modes: Sequence[type[TorchFunctionMode]]) -> None:
        """sample_modes: what gives samples their random numbers; a graph may then not draw torch's."""
        self.settings, self._sample_modes = settings, sample_modes
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
        if self._sample_modes:  # which module draws is noted in Python, once for a forward and its repetition
            torch._dynamo.config.skip_fwd_side_effects_in_bwd_under_checkpoint = True
        # In a graph a mode is part of it. Where a graph has ended it must run as it is: compiled alone it would give
        # for one function of torch what was right for another (`x.size(0)` for `x.dtype`), as guards see no difference
        for mode in self._sample_modes:
            torch._dynamo.eval_frame.skip_code(vars(mode)["__torch_function__"].__code__)
        # where a graph ended inside of a recomputed unit, the second forward would draw other numbers: torch says where
        fullgraph = self.settings.fullgraph or (recomputed and bool(self._sample_modes))
        how = {"backend": self.backend, "fullgraph": fullgraph}
        if not names or self.settings.scope == "network":
            network.compile(dynamic=self.settings.dynamic, **how)
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
            unit.compile(dynamic=self.settings.dynamic if alike or self.settings.dynamic else False, **how)

    def _compile_graph(self, graph: torch.fx.GraphModule, inputs: Any) -> Callable[..., Any]:
        """What torch calls for each graph: Inductor, in the mode of the settings."""
        from torch._inductor import list_mode_options  # a second of imports, which most runs need not pay
        from torch._inductor.compile_fx import compile_fx

        if self._sample_modes:
            _refuse_unseen_draws(graph)
        began = monotonic()
        options = list_mode_options(self.settings.mode, self.settings.dynamic)
        compiled: Any = compile_fx(graph, inputs, config_patches=options)
        self.graphs, self._seconds = self.graphs + 1, self._seconds + monotonic() - began
        return compiled

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


def make_compiler(settings: CompileSettings | None, sample_modes: Sequence[type[TorchFunctionMode]]) -> NoCompiler:
    """What compiles a run's network."""
    return NoCompiler() if settings is None else Compiler(settings, sample_modes)


def without_compile() -> AbstractContextManager[Any]:
    """Inside it compiled modules run as they were written: for a trial batch, whose size is not that of a step.

    A first call of another size would cost a graph that is never used again, and have torch take the size for variable.
    """
    # where nothing has imported the compiler nothing is compiled, and its import takes a third of a start
    return torch.compiler.set_stance("force_eager") if "torch._dynamo" in sys.modules else nullcontext()


def _refuse_unseen_draws(graph: torch.fx.GraphModule) -> None:
    """RuntimeError for a graph with random numbers that cannot be those of samples."""
    for node in graph.graph.nodes:
        name = node.target if node.op == "call_method" else getattr(node.target, "__name__", "")
        if node.op in ("call_function", "call_method") and name in _UNSEEN:
            raise RuntimeError(
                f"loop.dropout=sample: a compiled module calls {name}, which torch.compile does not show; write"
                " torch.empty_like(x).uniform_() or .normal_() there, or use loop.dropout=native"
            )
