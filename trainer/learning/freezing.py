"""Freezing parts of a network: parameters, and modules that then stay in evaluation mode; what does not learn kept."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from functools import cache
from typing import Self

import torch
from torch import Tensor, nn

from trainer.learning.parameter_patterns import matches_or_contains, resolve_pattern
from trainer.messages import Refusal

BATCH_NORMS = (nn.BatchNorm1d, nn.BatchNorm2d, nn.BatchNorm3d)  # that know the samples of their own process alone
NORMS = (*BATCH_NORMS, nn.SyncBatchNorm)  # what has running statistics


class StaysInEvaluation(nn.Module):
    """A frozen BatchNorm, or a frozen part that its constructor has put there: it stays in evaluation mode."""

    def train(self, mode: bool = True) -> Self:
        """Stay in evaluation mode."""
        return super().train(False)


@contextmanager
def preserve_untrained(network: nn.Module) -> Iterator[None]:
    """What a forward in here does to buffers, numbers of modules, and parameters that do not learn (MoCo) is undone."""

    def untrained() -> dict[str, Tensor]:
        still = {name: parameter for name, parameter in network.named_parameters() if not parameter.requires_grad}
        return {**still, **dict(network.named_buffers())}

    before = {name: tensor.detach().clone() for name, tensor in untrained().items()}
    kept = [(module, [*vars(module).items()]) for module in network.modules()]  # as self.calls += 1 counts
    try:
        yield
    finally:
        with torch.no_grad():
            for name, tensor in untrained().items():
                if name in before:  # a buffer that the forward has just made is a cache
                    tensor.copy_(before[name])
        for module, attributes in kept:
            vars(module).update((name, value) for name, value in attributes if isinstance(value, int | float | str))


def freeze(network: nn.Module, patterns: Sequence[str]) -> nn.Module:
    """Freeze, in place, what matches these patterns: parameters, and whole modules with their BatchNorms.

    Values are not looked at, so the network may be on the meta device. Refusal of a pattern that matches nothing.
    """
    resolved = [name for pattern in patterns for name in resolve_pattern(network, pattern, "model.freeze")]

    def is_frozen(name: str) -> bool:
        return any(matches_or_contains(pattern, name) for pattern in resolved)

    # of tied weights any name counts: the tensor is one
    for name, parameter in network.named_parameters(remove_duplicate=False):
        if is_frozen(name):
            parameter.requires_grad_(False)
    for module in _evaluated_parts(network):  # a teacher: its dropout draws nothing
        if not any(parameter.requires_grad for parameter in module.parameters()):
            for part in (module, *(norm for norm in module.modules() if isinstance(norm, NORMS))):
                _keep_in_evaluation(part)
    # without a gradient a norm would still move its statistics by every batch that it sees
    for name, module in network.named_modules():
        if isinstance(module, NORMS):
            parameters = [f"{name}.{last}" for last, _ in module.named_parameters()]
            # also a norm whose scale and shift are both frozen by name
            if is_frozen(name) or (parameters and all(map(is_frozen, parameters))):
                _keep_in_evaluation(module)
    return network


def _evaluated_parts(network: nn.Module) -> Iterator[nn.Module]:
    """The modules with parameters that a constructor has put into evaluation mode, without the modules in them.

    Around something that learns the mode is by chance: `from_pretrained` returns whole networks so. The class of a
    TorchScript module cannot be exchanged.
    """
    for module in network.children():
        if module.training:
            yield from _evaluated_parts(module)
        elif any(True for _ in module.parameters()) and not isinstance(module, torch.jit.ScriptModule):
            yield module


def _keep_in_evaluation(module: nn.Module) -> None:
    """In place: the class is exchanged, not the module, so that names, hooks and references stay."""
    if not isinstance(module, StaysInEvaluation):
        module.__class__ = _frozen_class(type(module))  # type: ignore[arg-type]  # no class is hashable
        module.eval()


@cache  # one class for each type of module
def _frozen_class(kind: type[nn.Module]) -> type[nn.Module]:
    """A subclass with the same name that stays in evaluation mode."""
    return type(
        kind.__name__, (StaysInEvaluation, kind), {"__module__": kind.__module__, "__qualname__": kind.__qualname__}
    )


def frozen_names(network: nn.Module) -> set[str]:
    """The names of the parameters that do not learn; of a tied one all its names."""
    return {name for name, p in network.named_parameters(remove_duplicate=False) if not p.requires_grad}


def has_adapters(network: nn.Module) -> bool:
    """Do small layers learn beside large ones that stay as they are? Their class says `is_adapter = True`."""
    return any(getattr(module, "is_adapter", False) for module in network.modules())


def count_trainable(network: nn.Module) -> int:
    """How many elements of the network's parameters learn."""
    return sum(parameter.numel() for parameter in network.parameters() if parameter.requires_grad)


def refuse_frozen(network: nn.Module, patterns: Sequence[str]) -> None:
    """Refuse a network of which nothing learns."""
    if not count_trainable(network):
        why = f"; model.freeze={list(patterns)} leaves none" if patterns else ""
        raise Refusal(f"{type(network).__name__} has no trainable parameter{why}")
