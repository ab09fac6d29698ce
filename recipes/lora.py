"""Adapters: small layers beside large ones that stay as they are (LoRA: Hu et al., 2021, arXiv:2106.09685).

The large layer keeps its name and those of its parameters, so its weights are found as if there were no adapter.
"""

from __future__ import annotations

from collections.abc import Sequence
from fnmatch import fnmatchcase
from functools import cache
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.functional import linear

from trainer.messages import Refusal

OWN = ("lora_a", "lora_b")  # the names of an adapter's parameters


def combined(module: Adapted, output: Tensor, x: Tensor) -> Tensor:
    """What a layer answers (…, out), given its own output and what it was asked."""
    return output + module.scale * linear(linear(x, module.lora_a), module.lora_b)


class Adapted(nn.Module):
    """What a layer becomes that has an adapter: to what it answers, a product of two thin matrices is added."""

    lora_a: nn.Parameter  # (rank, in)
    lora_b: nn.Parameter  # (out, rank)
    scale: float
    is_adapter = True  # checkpoints need not hold the layer itself
    combine = staticmethod(combined)  # of a layer that is split over ranks another one

    def forward(self, x: Tensor) -> Tensor:
        """(…, in) to (…, out)."""
        return self.combine(self, super().forward(x), x)


def refuse_numbers(rank: int | None, alpha: float, layers: Sequence[str]) -> None:
    """Refuse keys of which no adapters can be made, and those that would do nothing. rank None: no adapters."""
    if rank is None and layers:
        raise Refusal(
            f"model.lora_layers=[{','.join(layers)}] and model.lora=null: no layer gets an adapter; model.lora=8"
        )
    if rank is not None and rank < 1:
        raise Refusal(f"model.lora is {rank}; it is the rank of the adapters, 1 or more (null: no adapters)")
    if alpha <= 0:
        raise Refusal(f"model.lora_alpha is {alpha}; it is above 0, or adapters would change nothing")


def adapt(network: nn.Module, rank: int, alpha: float, layers: Sequence[str]) -> None:
    """Give an adapter, in place, to each linear layer that one of these patterns means; none: to all of them.

    A pattern stands for the last words of a layer's name: `q_proj`, `attn.*`. At first an adapter changes nothing.
    Refusal where a pattern means no layer.
    """
    linear_layers = {name: module for name, module in network.named_modules() if _turned(module) is not None}
    meant = {name: module for name, module in linear_layers.items() if not layers or _means(layers, name)}
    for pattern in layers:
        if not any(_means([pattern], name) for name in linear_layers):
            there = ", ".join(dict.fromkeys(name.rpartition(".")[2] for name in linear_layers))
            raise Refusal(f"model.lora_layers: {pattern!r} means no linear layer of the network; there are {there}")
    for module in meant.values():
        weight: Any = module.weight
        outer, inner = weight.shape if not _turned(module) else weight.shape[::-1]
        module.__class__ = _adapted(type(module))  # type: ignore[arg-type]  # no class is hashable
        vars(module)["scale"] = alpha / rank
        # as a linear layer begins, and zeros: their product is zero, and both learn
        module.lora_a = nn.Linear(inner, rank, bias=False).weight
        module.lora_b = nn.Parameter(torch.zeros(outer, rank))


@torch.no_grad()
def merge(network: nn.Module) -> None:
    """Add every adapter to the weight of its layer, in place: the same function, of layers as they were."""
    for module in network.modules():
        if isinstance(module, Adapted):
            added = module.scale * (module.lora_b @ module.lora_a)  # (out, in)
            weight: Any = module.weight
            weight += added.T if _turned(module) else added
            del module.lora_a, module.lora_b, module.scale
            module.__class__ = type(module).__bases__[1]


def _turned(module: nn.Module) -> bool | None:
    """Does a linear layer keep its weight as (in, out), as GPT-2's of transformers do? None: it is no linear layer."""
    kinds = {f"{kind.__module__}.{kind.__qualname__}" for kind in type(module).__mro__}  # it need not be installed
    return False if isinstance(module, nn.Linear) else True if "transformers.pytorch_utils.Conv1D" in kinds else None


def _means(patterns: Sequence[str], name: str) -> bool:
    return any(fnmatchcase(f".{name}", f"*.{pattern}") for pattern in patterns)


@cache
def _adapted(kind: type[nn.Module]) -> type[nn.Module]:
    """A class of the same name with an adapter: not a wrapper, so that all names stay."""
    return type(kind.__name__, (Adapted, kind), {"__module__": kind.__module__, "__qualname__": kind.__qualname__})
