"""A block of a decoder: attention and an MLP, each normalised before and added to the stream."""

from __future__ import annotations

from typing import Any

from torch import Tensor, nn
from torch.nn import functional

from recipes.language.causal import Causal
from recipes.language.past import NoPast

ALL = NoPast()
NORMS = {"layer": nn.LayerNorm, "rms": nn.RMSNorm}


class Attention(nn.Module):
    """Causal self-attention, in which a group of heads that ask share one head that answers (grouped-query attention).

    The rows of `qkv` are packed group after group, each with the queries of its heads, one key and one value: cutting
    the rows cuts whole groups. As many groups as heads is the usual attention.
    """

    def __init__(
        self, width: int, heads: int, groups: int, bias: bool, qkv_bias: bool, positions: nn.Module, core: Causal
    ) -> None:
        super().__init__()
        self.head_width, self.each = width // heads, heads // groups
        self.qkv = nn.Linear(width, (heads + 2 * groups) * self.head_width, bias=qkv_bias)
        self.out = nn.Linear(width, width, bias=bias)
        self.positions, self.core = positions, core

    def forward(
        self, x: Tensor, past: NoPast = ALL, places: Tensor | None = None, begins: Tensor | None = None
    ) -> Tensor:
        """(B, T, width) to (B, T, width); -1 stands for the groups that this rank has.

        places (B, T): of tokens in their documents; begins (B, 1, T, 1): the first token that each may see.
        """
        batch, tokens, _ = x.shape
        packed = self.qkv(x).view(batch, tokens, -1, self.each + 2, self.head_width)  # (B, T, groups, …, head)
        q, k, v = packed.split((self.each, 1, 1), dim=3)
        q, k, v = (part.flatten(2, 3).transpose(1, 2) for part in (q, k, v))  # (B, heads or groups, T, head)
        start = past.tokens if places is None else places
        q, (k, v) = self.positions(q, start), past.extended(self.positions(k, start), v)
        seen = {} if begins is None else {"begins": begins}
        return self.out(self.core(q, k, v, **seen).transpose(1, 2).flatten(2))


class MLP(nn.Module):
    """Two linear layers with GELU between them; `tanh`: the approximation that GPT-2 was trained with."""

    def __init__(self, width: int, inner: int, bias: bool, approximate: str = "none") -> None:
        super().__init__()
        self.up, self.down = nn.Linear(width, inner, bias=bias), nn.Linear(inner, width, bias=bias)
        self.approximate = approximate

    def forward(self, x: Tensor) -> Tensor:
        """(B, T, width) to (B, T, width)."""
        return self.down(functional.gelu(self.up(x), approximate=self.approximate))


class TanhMLP(MLP):
    """The same with GPT-2's approximation of GELU."""

    def __init__(self, width: int, inner: int, bias: bool) -> None:
        super().__init__(width, inner, bias, "tanh")


class SwiGLU(nn.Module):
    """Two layers side by side, one of which opens the other, then one back (Shazeer 2020, arXiv:2002.05202)."""

    def __init__(self, width: int, inner: int, bias: bool) -> None:
        super().__init__()
        self.gate, self.up = nn.Linear(width, inner, bias=bias), nn.Linear(width, inner, bias=bias)
        self.down = nn.Linear(inner, width, bias=bias)

    def forward(self, x: Tensor) -> Tensor:
        """(B, T, width) to (B, T, width)."""
        return self.down(functional.silu(self.gate(x)) * self.up(x))


MLPS: dict[str, type[nn.Module]] = {"gelu": MLP, "gelu_tanh": TanhMLP, "swiglu": SwiGLU}


class Block(nn.Module):
    """Attention, then an MLP, each normalised before and added to the stream; dropout on what is added."""

    def __init__(self, norms: tuple[nn.Module, nn.Module], attention: Attention, mlp: nn.Module, dropout: float):
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

    def forward(self, x: Tensor, *past: NoPast, **documents: Tensor) -> Any:
        """(B, T, width) to that, and the loss of each sample, (B,)."""
        x = x + self.dropout(self.attention(self.attention_norm(x), *past, **documents))
        y, balance = self.mlp(self.mlp_norm(x))
        return x + self.dropout(y), balance
