"""Gradients that are sparse travel in no bucket and are cut into no parts."""

from __future__ import annotations

from torch import nn

from trainer.learning.sparse import sparse_embeddings
from trainer.refusal import Refusal


def refuse_sparse(network: nn.Module, word: str) -> None:
    """Refuse embeddings whose gradients are sparse. `word`: the strategy that cannot take them."""
    for name in sparse_embeddings(network):
        raise Refusal(
            f"strategy={word} sends dense gradients, and the embedding {name} makes sparse ones; "
            "build it with sparse=False, or use strategy=ddp distributed.backend=gloo"
        )
