"""Attention of a decoder: heads with keys and values of their own, or all of them from one narrow latent."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor, nn
from torch.nn.functional import pad

from recipes.language.causal import Causal
from recipes.language.masks import Masks
from recipes.language.past import NoPast
from recipes.language.rotary import NoRotary, Rotary
from recipes.language.rotary_scaling import Unscaled
from trainer.messages import Refusal

ALL = NoPast()


@dataclass(frozen=True)
class Latent:
    """Widths of latent attention."""

    kv_rank: int  # of the latent of keys and values
    q_rank: int | None  # of the latent of queries; None: they have none
    plain_width: int  # numbers of a head's query and key that know no position
    rotary_width: int  # those behind them, which are turned
    value_width: int  # numbers of a head's value

    @property
    def head_width(self) -> int:
        """Numbers of a head's query and key."""
        return self.plain_width + self.rotary_width


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
    latent: Latent | None

    def refuse(self) -> None:
        """Refuse settings of which no attention can be made."""
        if self.latent is not None:
            self._refuse_latent(self.latent)
        elif self.heads < 1 or self.width % self.heads:
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

    def _refuse_latent(self, latent: Latent) -> None:
        if self.rotary is None or self.bias or self.qkv_bias or self.groups != self.heads:
            raise Refusal(
                f"model.kv_rank={latent.kv_rank}: latent attention has rotary positions, no biases, and keys and values"
                " for every head: model.rotary=10000 model.bias=false model.qkv_bias=null model.groups=null"
            )
        if min(latent.kv_rank, latent.q_rank or 1, latent.value_width, latent.rotary_width, self.heads) < 1:
            raise Refusal(
                f"model.kv_rank={latent.kv_rank}, q_rank={latent.q_rank}, rotary_width={latent.rotary_width},"
                f" value_width={latent.value_width}, heads={self.heads}: 1 or more each (q_rank=null: none)"
            )
        if latent.rotary_width % 2 or latent.plain_width < 0:
            raise Refusal(
                f"model.rotary_width={latent.rotary_width}, model.plain_width={latent.plain_width}: positions"
                " turn pairs of numbers, so the first must be even; the second is 0 or more"
            )

    def make(self, number: int, masks: Masks) -> nn.Module:
        """That of this block; masks: those of all blocks."""
        # a window that holds the whole context is none
        inside = self.window is not None and self.window < self.context and number >= self.window_from
        core = Causal(self.heads > self.groups, self.window if inside else None, masks)
        if self.latent is not None:
            assert self.rotary is not None
            turn = Rotary(self.latent.rotary_width, self.context, self.rotary, self.scaling)
            return LatentAttention(self.width, self.heads, self.latent, turn, core)
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


class LatentAttention(nn.Module):
    """Causal self-attention in which keys and values of all heads come from one narrow latent (MLA, arXiv:2405.04434).

    A head's query and key have numbers that know no position, and behind them some that are turned. The latter are one
    key for all heads, which comes from the stream itself. Queries may have a latent, too.
    """

    def __init__(self, width: int, heads: int, latent: Latent, positions: Rotary, core: Causal) -> None:
        super().__init__()
        rank, norm = latent.q_rank, 1e-6  # DeepSeek's, whatever eps the other norms have
        self.latent, self.scale = latent, positions.scaling.sharpness  # what all scores are multiplied by
        self.q_down = nn.Identity() if rank is None else nn.Linear(width, rank, bias=False)
        self.q_norm = nn.Identity() if rank is None else LatentNorm(rank, eps=norm)
        self.q_up = nn.Linear(width if rank is None else rank, heads * latent.head_width, bias=False)
        self.kv_down = nn.Linear(width, latent.kv_rank + latent.rotary_width, bias=False)
        self.kv_norm = LatentNorm(latent.kv_rank, eps=norm)
        self.kv_up = nn.Linear(latent.kv_rank, heads * (latent.plain_width + latent.value_width), bias=False)
        self.shared_key = SharedKey()
        self.out = nn.Linear(heads * latent.value_width, width, bias=False)
        self.positions, self.core = positions, core

    def forward(
        self, x: Tensor, past: NoPast = ALL, places: Tensor | None = None, begins: Tensor | None = None
    ) -> Tensor:
        """(B, T, width) to (B, T, width); -1 stands for the heads that this rank has. The others as in `Attention`."""
        batch, tokens, _ = x.shape
        plain, turned, value = self.latent.plain_width, self.latent.rotary_width, self.latent.value_width
        start = past.tokens if places is None else places
        narrow, key = self.kv_down(x).split((self.latent.kv_rank, turned), dim=-1)  # (B, T, rank), (B, T, turned)
        key = self.positions(key[:, None], start)  # (B, 1, T, turned)
        kv = self.kv_up(self.kv_norm(narrow)).view(batch, tokens, -1, plain + value).transpose(1, 2)
        k, v = kv.split((plain, value), dim=-1)  # (B, heads, T, …)
        q = self.q_up(self.q_norm(self.q_down(x))).view(batch, tokens, -1, plain + turned).transpose(1, 2)
        q, q_turned = q.split((plain, turned), dim=-1)
        q = torch.cat((q, self.positions(q_turned, start)), dim=-1) * self.scale  # (B, heads, T, plain + turned)
        k, v = past.extended(torch.cat((k, self.shared_key(key, k.shape[1])), dim=-1), v)
        # as wide as keys: most kernels of attention, and the ring, know one width alone
        v = pad(v, (0, max(0, plain + turned - value)))
        seen = {} if begins is None else {"begins": begins}
        return self.out(self.core(q, k, v, **seen)[..., :value].transpose(1, 2).flatten(2))


class LatentNorm(nn.RMSNorm):
    """The norm of a latent, which under autocast has another type than the weight: torch's kernel takes but one."""

    def forward(self, x: Tensor) -> Tensor:
        """(B, T, rank) to the same, in the type of the weight."""
        return super().forward(x.to(self.weight.dtype))


class SharedKey(nn.Module):
    """One key for all heads of this rank: a module, so that a plan can say that other ranks have other heads."""

    def forward(self, key: Tensor, heads: int) -> Tensor:
        """(B, 1, T, n) to (B, heads, T, n)."""
        return key.expand(-1, heads, -1, -1)
