"""Which gradients of a network are sparse."""

from __future__ import annotations

from torch import nn


def sparse_embeddings(network: nn.Module) -> dict[str, nn.Embedding | nn.EmbeddingBag]:
    """The trainable embeddings whose gradients are sparse, by name."""
    return {
        name or "itself": module
        for name, module in network.named_modules()
        if isinstance(module, nn.Embedding | nn.EmbeddingBag) and module.sparse and module.weight.requires_grad
    }
