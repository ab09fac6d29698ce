"""Attention of a decoder: causal, in groups of heads, with rotary positions or learned ones."""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor, nn

from recipes.language.causal import Causal
from recipes.language.masks import Masks
from recipes.language.past import NoPast
from recipes.language.rotary import NoRotary, Rotary
from recipes.language.rotary_scaling import Unscaled
from trainer.messages import Refusal

ALL = NoPast()


@dataclass(frozen=True)
class AttentionSettings:
    """How all blocks attend; it makes the attention of each."""

    width: int
    context: int
    heads: int
    groups: int  # heads of keys and values
    bias: bool
    qkv_bias: bool
    rotary: float | None  # base; None: positions are learned vectors
    scaling: Unscaled  # of rotary positions
    window: int | None
    window_from: int  # the first block that has it

    def refuse(self) -> None:
        """Refuse settings of which no attention can be made."""
        if self.heads < 1 or self.width % self.heads:
            near = max(self.heads, 1) * -(-self.width // max(self.heads, 1))
            raise Refusal(
                f"model.width {self.width} ÷ model.heads {self.heads} is not whole; model.width={near} would work"
            )
        if self.groups < 1 or self.heads % self.groups:
            fit = ", ".join(str(count) for count in range(1, self.heads + 1) if self.heads % count == 0)
            raise Refusal(
                f"model.heads {self.heads} ÷ model.groups {self.groups} is not whole; groups that work: {fit}"
            )
        if self.rotary is None and self.scaling != Unscaled():
            raise Refusal(
                "model.rotary_scaling scales rotary positions, and model.rotary=null has none: model.rotary=500000"
            )
        if (self.window is not None and self.window < 1) or self.window_from < 0:
            raise Refusal(
                f"model.window={self.window}, model.window_from={self.window_from}: tokens that a token sees, itself"
                " among them, 1 or more (null: all before it); and the first block in which it is so, 0 or more"
            )

    def make(self, number: int, masks: Masks) -> nn.Module:
        """That of this block; masks: those of all blocks."""
        # a window that holds the whole context is none
        inside = self.window is not None and self.window < self.context and number >= self.window_from
        core = Causal(self.heads > self.groups, self.window if inside else None, masks)
        head_width = self.width // self.heads
        # what tells queries and keys where they are; every block has its own, since a pipeline may part them
        none = self.rotary is None
        positions = NoRotary() if none else Rotary(head_width, self.context, self.rotary, self.scaling)  # type: ignore[arg-type]
        return Attention(self.width, self.heads, self.groups, self.bias, self.qkv_bias, positions, core)


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
