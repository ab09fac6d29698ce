"""Rotary positions: queries and keys are turned by angles that grow with the place of their token."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from recipes.language.rotary_scaling import Unscaled
from trainer.messages import Refusal


class Rotary(nn.Module):
    """Turns pairs of numbers of each head, the first half with the second (Su et al. 2021, arXiv:2104.09864).

    base: the slowest pair turns once in about 2π · base tokens, where nothing is scaled. The order of pairs is that of
    transformers' Llama.
    """

    def __init__(self, head_width: int, context: int, base: float, scaling: Unscaled | None = None) -> None:
        super().__init__()
        if head_width % 2:
            raise Refusal(
                f"model.width ÷ model.heads is {head_width}: rotary positions turn pairs of numbers, so it must be even"
            )
        if base <= 0:
            raise Refusal(f"model.rotary is {base}; it is the base of rotary positions, such as 10000 (null: none)")
        self.base, self.scaling = base, scaling or Unscaled()
        speeds = self.scaling.speeds(head_width, base)  # (head / 2,)
        angles = torch.arange(context, dtype=torch.float64)[:, None] * speeds  # (context, head / 2), radians
        # computed once in fp64; they follow from the settings, so no checkpoint holds them
        self.cos: Tensor
        self.sin: Tensor
        self.register_buffer("cos", angles.cos().float().repeat(1, 2), persistent=False)
        self.register_buffer("sin", angles.sin().float().repeat(1, 2), persistent=False)

    def forward(self, x: Tensor, start: int | Tensor) -> Tensor:
        """(B, heads, T, head) to the same, turned; start: the place of the first token, or of all of them (B, T)."""
        places = start[:, None] if isinstance(start, Tensor) else slice(start, start + x.shape[2])
        first, second = x.chunk(2, dim=-1)
        turned = torch.cat((-second, first), dim=-1)
        return (x * self.cos[places] + turned * self.sin[places]).to(x.dtype)


class NoRotary(nn.Module):
    """The same where positions are learned vectors: queries and keys stay as they are."""

    def forward(self, x: Tensor, start: int | Tensor) -> Tensor:
        """(B, heads, T, head) to the same."""
        return x
