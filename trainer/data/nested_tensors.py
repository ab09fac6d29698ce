"""Nested dicts, tuples, lists and dataclasses of tensors: what a batch is made of, and what a network answers."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, MutableMapping, Sequence
from copy import copy
from dataclasses import fields, is_dataclass
from typing import Any

import torch
from torch import Tensor

from trainer.launch.devices import uses_pinned_memory


def tensors(tree: Any) -> Iterator[Tensor]:
    """Every tensor of a tree, in order."""
    if isinstance(tree, Tensor):
        yield tree
    elif isinstance(tree, (list, tuple)):
        for value in tree:
            yield from tensors(value)
    else:
        yield from tensors([value for _, value in _named_children(tree)])


def named_tensors(tree: Any, name: str) -> Iterator[tuple[str, Tensor]]:
    """Every tensor of a tree with its place there: `name` itself, `name.KEY` in a dict, `name.0` in a list."""
    if isinstance(tree, Tensor):
        yield name, tree
    for key, value in enumerate(tree) if isinstance(tree, (list, tuple)) else _named_children(tree):
        yield from named_tensors(value, f"{name}.{key}")


def named_lists(tree: Any, name: str) -> Iterator[tuple[str, Sequence[Any]]]:
    """Every list and tuple of a tree with its place there, as `named_tensors` has it; outer ones before inner ones."""
    children: Iterable[tuple[Any, Any]] = _named_children(tree)
    if isinstance(tree, (list, tuple)):
        yield name, tree
        children = enumerate(tree)
    for key, value in children:
        yield from named_lists(value, f"{name}.{key}")


def first_tensor(tree: Any) -> Tensor:
    """The first tensor of a tree; its first dimension is the number of samples. ValueError where there is none."""
    for tensor in tensors(tree):
        return tensor
    raise ValueError(f"a batch holds no tensor: {type(tree).__name__}")


def map_tensors(tree: Any, change: Callable[[Tensor], Any]) -> Any:
    """The same tree with `change` applied to every tensor; what is no tensor stays as it is."""
    if isinstance(tree, Tensor):
        return change(tree)
    return _map_children(tree, lambda value: map_tensors(value, change))


def replace_tensors(tree: Any, values: Iterable[Tensor]) -> Any:
    """The same tree with these tensors in place of its own, in the order of `tensors`."""
    remaining = iter(values)
    return map_tensors(tree, lambda _: next(remaining))


def slice_rows(tree: Any, start: int, stop: int, size: int) -> Any:
    """Samples `start` to `stop` of a batch of `size`: of its tensors, and of lists of what is no tensor (names).

    What has another first dimension belongs to the batch as a whole, and stays.
    """
    if isinstance(tree, Tensor):
        return tree[start:stop] if tree.dim() and tree.shape[0] == size else tree
    # a list as long as the batch, without tensors: one name, one path for each sample
    is_namedtuple = isinstance(tree, tuple) and hasattr(tree, "_fields")
    if (
        isinstance(tree, (list, tuple))
        and not is_namedtuple
        and len(tree) == size
        and next(tensors(tree), None) is None
    ):
        return tree[start:stop]
    return _map_children(tree, lambda value: slice_rows(value, start, stop, size))


def has_rows(tree: Any, size: int) -> bool:
    """Is it certain that row i of every tensor is sample i of a batch of `size`? Then `slice_rows` cuts samples.

    Not certain is a list of tensors as long as the batch: they may be views of all samples, or one of each. Nor is what
    stands in the batch but for the samples: a number, a tensor of another length, an object that nobody knows here.
    """
    if isinstance(tree, Tensor):
        return tree.dim() > 0 and tree.shape[0] == size
    if isinstance(tree, (list, tuple)):
        has_no_tensors = next(tensors(tree), None) is None  # names
        if len(tree) == size and not hasattr(tree, "_fields"):
            return has_no_tensors
        return not has_no_tensors and all(has_rows(value, size) for value in tree)
    children = _named_children(tree)
    return tree is None or (bool(children) and all(has_rows(value, size) for _, value in children))


def select_rows(tree: Any, at: Tensor, size: int) -> Any:
    """These samples of a batch of `size`, of its tensors; `at`: (n,) int64, on the device of the tensors."""
    return map_tensors(tree, lambda x: x.index_select(0, at) if x.dim() and x.shape[0] == size else x)


def _map_children(tree: Any, change: Callable[[Any], Any]) -> Any:
    """The same dict, list, tuple or dataclass with every value changed; what is none of them stays."""
    if isinstance(tree, (list, tuple)):
        values = [change(value) for value in tree]
        return type(tree)(*values) if hasattr(tree, "_fields") else type(tree)(values)  # a namedtuple takes them singly
    if type(tree) is dict:
        return {key: change(value) for key, value in tree.items()}
    # of other kinds a copy, for nobody knows what their constructors take; transformers' outputs are both at once
    children = _named_children(tree)
    result = copy(tree) if children else tree
    for key, value in children:
        if isinstance(tree, MutableMapping):
            result[key] = change(value)
        else:
            object.__setattr__(result, key, change(value))  # a frozen one too
    return result


def _named_children(tree: Any) -> list[tuple[Any, Any]]:
    """What a dict or a dataclass holds, by name; nothing of what is neither."""
    if isinstance(tree, MutableMapping):
        return list(tree.items())
    if is_dataclass(tree) and not isinstance(tree, type):
        return [(field.name, getattr(tree, field.name)) for field in fields(tree)]
    return []


def to_device(tree: Any, device: torch.device) -> Any:
    """The same tree on a device, through pinned memory where that serves: from other the host would wait for copies."""
    if device.type == "cpu":
        return tree  # where it was read
    if isinstance(tree, Tensor):
        pinned = uses_pinned_memory(device)
        # pinned memory is kept by torch until the copy is done, so nobody need wait here
        return (tree.pin_memory() if pinned and tree.is_cpu else tree).to(device, non_blocking=pinned)
    if callable(move := getattr(tree, "to", None)):
        return move(device)  # it knows better: packed sequences keep their lengths on the host
    return _map_children(tree, lambda value: to_device(value, device))


def cast_floats(tree: Any, dtype: torch.dtype) -> Any:
    """The same tree with its floating-point tensors in another precision; whole numbers stay."""
    return map_tensors(tree, lambda tensor: tensor.to(dtype) if tensor.is_floating_point() else tensor)
