"""Parameters that do not learn: frozen parts of a network, and what a task holds beside it."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from functools import cache
from typing import Any, Self

from torch import Tensor, nn

from trainer.learning.parameter_groups import matches_or_contains, resolve_pattern
from trainer.learning.task import Task
from trainer.messages import Refusal, format_names

BATCH_NORMS = (nn.BatchNorm1d, nn.BatchNorm2d, nn.BatchNorm3d)  # that know the samples of their own process alone
NORMS = (*BATCH_NORMS, nn.SyncBatchNorm)  # what has running statistics


class FrozenBatchNorm(nn.Module):
    """A frozen BatchNorm: it stays in evaluation mode, in training too."""

    def train(self, mode: bool = True) -> Self:
        """Stay in evaluation mode."""
        return super().train(False)


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
    # without a gradient a norm would still move its statistics by every batch that it sees
    for name, module in network.named_modules():
        if isinstance(module, NORMS) and not isinstance(module, FrozenBatchNorm):
            parameters = [f"{name}.{last}" for last, _ in module.named_parameters()]
            # also a norm whose scale and shift are both frozen by name
            if is_frozen(name) or (parameters and all(map(is_frozen, parameters))):
                module.__class__ = _frozen_class(type(module))  # type: ignore[arg-type,assignment]  # no class is hashable
                module.eval()
    return network


@cache
def _frozen_class(kind: type[nn.Module]) -> type[nn.Module]:
    """A subclass with the same name that stays in evaluation mode. Not a wrapper: so all names stay."""
    return type(
        kind.__name__, (FrozenBatchNorm, kind), {"__module__": kind.__module__, "__qualname__": kind.__qualname__}
    )


def frozen_names(network: nn.Module) -> set[str]:
    """The names of the parameters that do not learn; of a tied one all its names."""
    return {name for name, p in network.named_parameters(remove_duplicate=False) if not p.requires_grad}


def count_trainable(network: nn.Module) -> int:
    """How many elements of the network's parameters learn."""
    return sum(parameter.numel() for parameter in network.parameters() if parameter.requires_grad)


def refuse_frozen(network: nn.Module, patterns: Sequence[str]) -> None:
    """Refuse a network of which nothing learns."""
    if not count_trainable(network):
        why = f"; model.freeze={list(patterns)} leaves none" if patterns else ""
        raise Refusal(f"{type(network).__name__} has no trainable parameter{why}")


_WORDS = (
    "no optimizer, checkpoint or other rank would know of them. Put them into the network: a module with your network"
    " and these parameters inside, whose output hands them to the loss (docs/extending.md, Weights that a loss learns)"
)


def refuse_parameters(task: Task) -> None:
    """Refuse parameters that a task has made for itself. A network inside it may be one that is not to learn."""
    names = [
        name
        for name, value in _walk_variables(vars(task), ())
        if isinstance(value, nn.Parameter) and value.requires_grad
    ]
    if names:
        raise Refusal(f"task: {type(task).__name__} has parameters of its own, {format_names(names, 8)}: {_WORDS}")


def task_weights_with_gradient(task: Task, network: nn.Module) -> list[str]:
    """The weights that lie in a task, not in the network, and got a gradient from its loss."""
    trained = {*network.parameters()}
    every = ((name, x) for name, value in _walk_variables(vars(task), ()) for name, x in _named_weights(name, value))
    return [name for name, x in every if x not in trained and x.is_leaf and x.grad is not None]


def refuse_gradients(task: Task, names: list[str]) -> None:
    """Refuse a task whose weights got gradients, for these would be all that comes of them."""
    if names:
        raise Refusal(
            f"task: weights that {type(task).__name__} holds get gradients, {format_names(names, 8)}: {_WORDS}. Where"
            " they are not to learn (a teacher, a network that measures a loss): requires_grad_(False)"
        )


def _walk_variables(tree: Any, above: tuple[str, ...]) -> Iterator[tuple[str, Any]]:
    """Every tensor and network of an object's variables, with its name; lists and dicts are looked into."""
    pairs = tree.items() if isinstance(tree, dict) else enumerate(tree)
    for key, value in pairs:
        # a task may be a module itself, whose tables have no name for users
        name = above if key in ("_parameters", "_modules", "_buffers") else (*above, str(key))
        if isinstance(value, nn.ParameterList | nn.ParameterDict):
            yield from ((f"{'.'.join(name)}.{key}", parameter) for key, parameter in value.named_parameters())
        elif isinstance(value, Tensor | nn.Module):
            yield ".".join(name), value
        elif isinstance(value, list | tuple | dict):
            yield from _walk_variables(value, name)


def _named_weights(name: str, value: Tensor | nn.Module) -> Iterator[tuple[str, Tensor]]:
    if isinstance(value, Tensor):
        yield name, value
    else:
        yield from ((f"{name}.{key}", parameter) for key, parameter in value.named_parameters())
