"""Which parts of a classifier are its backbone: what the network answers who asks it."""

from __future__ import annotations

from torch import nn


def marked(network: nn.Module, *heads: str) -> nn.Module:
    """The network, with `backbone`: the names of its parts outside of these heads. None named: its last part is one."""
    names = [name for name, _ in network.named_parameters()]
    heads = heads or (names[-1].split(".")[0],)
    shared = {head.split(".")[0] for head in heads}  # of what a head lies in the rest is backbone, too
    rest = [name for name in names if not f"{name}.".startswith(tuple(f"{head}." for head in heads))]
    parts = (name if name.split(".")[0] in shared else name.split(".")[0] for name in rest)
    vars(network)["backbone"] = tuple(dict.fromkeys(parts))
    return network
