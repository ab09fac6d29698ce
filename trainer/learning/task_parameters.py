"""Parameters that a task holds beside the network: nobody trains them, so what is to learn is refused."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from torch import Tensor, nn

from trainer.formatting import named
from trainer.learning.task import Task
from trainer.refusal import Refusal

_WORDS = (
    "no optimizer, checkpoint or other rank would know of them. Put them into the network: a module with your network"
    " and these parameters inside, whose output hands them to the loss (docs/extending.md, Weights that a loss learns)"
)


def refuse_parameters(task: Task) -> None:
    """Refuse parameters that a task has made for itself. A network inside it may be one that is not to learn."""
    own = [name for name, value in _held(vars(task), ()) if isinstance(value, nn.Parameter) and value.requires_grad]
    if own:
        raise Refusal(f"task: {type(task).__name__} has parameters of its own, {named(own, 8)}: {_WORDS}")


def with_gradient(task: Task, network: nn.Module) -> list[str]:
    """The weights that lie in a task, not in the network, and got a gradient from its loss."""
    trained = {*network.parameters()}
    every = ((name, x) for name, value in _held(vars(task), ()) for name, x in _weights(name, value))
    return [name for name, x in every if x not in trained and x.is_leaf and x.grad is not None]


def refuse_gradients(task: Task, names: list[str]) -> None:
    """Refuse a task whose weights got gradients, for these would be all that comes of them."""
    if names:
        raise Refusal(
            f"task: weights that {type(task).__name__} holds get gradients, {named(names, 8)}: {_WORDS}. Where they are"
            " not to learn (a teacher, a network that measures a loss): requires_grad_(False)"
        )


def _held(tree: Any, above: tuple[str, ...]) -> Iterator[tuple[str, Any]]:
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
            yield from _held(value, name)


def _weights(name: str, value: Tensor | nn.Module) -> Iterator[tuple[str, Tensor]]:
    if isinstance(value, Tensor):
        yield name, value
    else:
        yield from ((f"{name}.{key}", parameter) for key, parameter in value.named_parameters())
