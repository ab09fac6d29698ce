"""Gradients that are sparse travel in no bucket and are cut into no parts."""

from __future__ import annotations

from torch import nn

from trainer.refusal import Refusal


def refuse_sparse(network: nn.Module, word: str) -> None:
    """Refuse embeddings whose gradients are sparse. `word`: the strategy that cannot take them."""
    for name, module in network.named_modules():
        if isinstance(module, nn.Embedding | nn.EmbeddingBag) and module.sparse and module.weight.requires_grad:
            raise Refusal(
                f"strategy={word} sends dense gradients, and the embedding {name or 'itself'} makes sparse ones; "
                "build it with sparse=False, or use strategy=ddp"
            )
