"""Dropout switched off: what it leaves out depends on ranks and micro-batches, so there is nothing to compare."""

from __future__ import annotations

from torch import nn

# where classes keep their probability: nn.Dropout and its like and torchvision's StochasticDepth in `p`, timm's
# DropPath in `drop_prob`, nn.MultiheadAttention and recurrent layers in `dropout`
_PLACES = {"drop": ("p", "drop_prob"), "stochasticdepth": ("p",), "attention": ("dropout",)}


def drop_nothing(network: nn.Module) -> int:
    """Set the probability of all layers that drop something to 0, in place; how many there were."""
    dropping = 0
    for module in network.modules():
        kind = type(module).__name__.lower()
        places = {name for word, names in _PLACES.items() if word in kind for name in names}
        places |= {"dropout"} if isinstance(module, nn.RNNBase) else set()
        found = [name for name in places if isinstance(vars(module).get(name), float) and vars(module)[name] > 0]
        for name in found:
            setattr(module, name, 0.0)
        dropping += bool(found)
    return dropping
