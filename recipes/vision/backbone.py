"""What of a classifier is its backbone: said to whom asks the network."""

from __future__ import annotations

from torch import nn


def marked(network: nn.Module, head: str | None = None) -> nn.Module:
    """The network, with `backbone`: the names of its parts outside of the head. None: its last part is the head."""
    names = [name for name, _ in network.named_parameters()]
    head = head or names[-1].split(".")[0]
    first = head.split(".")[0]  # of what a head lies in the rest is backbone, too
    parts = (name if name.split(".")[0] == first else name.split(".")[0] for name in names)
    vars(network)["backbone"] = tuple(dict.fromkeys(part for part in parts if not f"{part}.".startswith(f"{head}.")))
    return network
