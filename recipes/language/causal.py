"""What a token takes over from those before it: the attention itself, a module that a plan can name."""

from __future__ import annotations

import torch
from torch import Tensor, nn
from torch.nn.attention.bias import causal_lower_right
from torch.nn.functional import scaled_dot_product_attention

from recipes.language.masks import Masks


class Causal(nn.Module):
    """Scaled-dot-product attention in which no token sees a later one; the last query belongs to the last key.

    grouped: several heads of queries share one head of keys and values. window: a token sees so many, itself and those
    before it; None: all. masks: those of all layers.
    """

    def __init__(self, grouped: bool, window: int | None, masks: Masks) -> None:
        super().__init__()
        self.window = window
        self._grouped, self._masks = grouped, masks

    def forward(self, queries: Tensor, keys: Tensor, values: Tensor, begins: Tensor | None = None) -> Tensor:
        """(B, heads, T, head), and (B, groups, S, head) of these T tokens and those before: (B, heads, T, head).

        begins (B or 1, 1, T, 1): the first of the S tokens that each of the T may see, which a window needs to be told
        as well; None: all before it.
        """
        if begins is not None:
            return self._masks.attention(queries, keys, values, begins, self.window, self._grouped)
        own, seen = queries.shape[2], keys.shape[2]
        # two branches: is_causal must be a bool, which `own == seen` is not where torch.export traces free sizes
        if own == seen:
            return scaled_dot_product_attention(queries, keys, values, is_causal=True, enable_gqa=self._grouped)
        # one token alone sees all that are there; several behind others need to be told
        mask = _after_others(own, seen, queries.device) if own > 1 else None
        return scaled_dot_product_attention(queries, keys, values, attn_mask=mask, enable_gqa=self._grouped)


def _after_others(own: int, seen: int, device: torch.device) -> Tensor:
    """What so many queries may see of so many keys, of which the last is the last query's: (own, seen)."""
    try:
        return causal_lower_right(own, seen)  # on GPUs no more than a word to the kernel
    except RuntimeError:  # where torch watches operators, as its selective checkpointing does, no such tensor is made
        return torch.ones(own, seen, dtype=torch.bool, device=device).tril(seen - own)
