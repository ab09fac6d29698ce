"""Compiling a network: its units one by one, or the whole of it."""

from __future__ import annotations

from collections import defaultdict
from contextlib import AbstractContextManager
from typing import Any

import torch
from torch import nn


def compile_network(network: nn.Module, names: list[str]) -> None:
    """Compile each of these units by itself, in place; the whole network where none is named. Names stay.

    Units of one class and with parameters of the same shapes share one graph: torch's cache belongs to the code, not to
    the module. So it also counts towards one limit how often all of them had to be compiled, and then silently gives
    up; the limit is raised to what these units may need.
    """
    if not names:
        network.compile()
        return
    limit = torch.compiler.config
    limit.recompile_limit = max(limit.recompile_limit, 8 + 4 * len(names))  # training, evaluation, two batch sizes each
    limit.accumulated_recompile_limit = max(limit.accumulated_recompile_limit, 4 * limit.recompile_limit)
    shapes = defaultdict(set)
    units = [network.get_submodule(name) for name in names]
    for unit in units:
        shapes[type(unit)].add(tuple(parameter.shape for parameter in unit.parameters()))
    for unit in units:
        # where sizes differ from unit to unit torch would take them for variable, and compute slower for it
        unit.compile(dynamic=None if len(shapes[type(unit)]) == 1 else False)


def uncompiled() -> AbstractContextManager[Any]:
    """Inside it what was compiled runs as it was written: for a rehearsal, whose batch has another size than a step's.

    A first call of another size would cost a graph that is never used again, and have torch take the size for variable.
    """
    return torch.compiler.set_stance("force_eager")
