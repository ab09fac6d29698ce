"""A block of a decoder: attention and an MLP, each normalised before and added to the stream."""

from __future__ import annotations

from typing import Any

from torch import Tensor, nn

from recipes.language.experts import BalancedMixture
from recipes.language.past import NoPast


class Block(nn.Module):
    """Attention, then an MLP, each normalised before and added to the stream; dropout on what is added."""

    def __init__(self, norms: tuple[nn.Module, nn.Module], attention: nn.Module, mlp: nn.Module, dropout: float):
        super().__init__()
        self.attention_norm, self.attention = norms[0], attention
        self.mlp_norm, self.mlp = norms[1], mlp
        self.dropout = nn.Dropout(dropout)

    def forward(self, x: Tensor, *past: NoPast, **documents: Tensor) -> Tensor:
        """(B, T, width) to (B, T, width)."""
        x = x + self.dropout(self.attention(self.attention_norm(x), *past, **documents))
        return x + self.dropout(self.mlp(self.mlp_norm(x)))


class BalancedBlock(Block):
    """The same with a mixture of experts that has a loss of its own."""

    def forward(self, x: Tensor, *past: NoPast, balance: Tensor | None = None, **documents: Tensor) -> Any:
        """(B, T, width) to that, and the loss of each sample (B,), added to `balance`, that of the blocks before."""
        x = x + self.dropout(self.attention(self.attention_norm(x), *past, **documents))
        y, own = self.mlp(self.mlp_norm(x))
        return x + self.dropout(y), own if balance is None else balance + own


def make_block(norms: tuple[nn.Module, nn.Module], attention: nn.Module, mlp: nn.Module, dropout: float) -> Block:
    """The block of these."""
    kind = BalancedBlock if isinstance(mlp, BalancedMixture) else Block
    return kind(norms, attention, mlp, dropout)
