"""Layers that not every strategy can take, or that do something else in each: sparse embeddings, BatchNorm, dropout."""

from __future__ import annotations

from torch import nn
from torch.nn.modules.dropout import _DropoutNd

from trainer.learning.optimizer import sparse_embeddings
from trainer.parallel.batch_norm import batch_norms
from trainer.refusal import Refusal


def curve_notes(network: nn.Module, sync_bn: bool) -> list[str]:
    """One line for each kind of layer whose effect depends on how samples are dealt to ranks and micro-batches."""
    norms = 0 if sync_bn else len(batch_norms(network))
    drops = sum(isinstance(module, _DropoutNd) and module.p > 0 for module in network.modules())
    notes = []
    if norms:
        notes.append(
            f"{norms} BatchNorm layers: the curve depends on data ranks and micro-batches (strategy.sync_bn=true)"
        )
    if drops:
        notes.append(f"{drops} dropout layers: the curve depends on data ranks and micro-batches, repeatably")
    return notes


def refuse_sparse(network: nn.Module, word: str) -> None:
    """Refuse embeddings whose gradients are sparse. `word`: the strategy that cannot take them."""
    for name in sparse_embeddings(network):
        raise Refusal(
            f"strategy={word} sends dense gradients, and the embedding {name} makes sparse ones; "
            "build it with sparse=False, or use strategy=ddp distributed.backend=gloo"
        )
