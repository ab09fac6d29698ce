"""Latent attention as transformers has it, in DeepSeek-V2 and V3."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from recipes.language.attention import AttentionSettings, Latent
from recipes.language.pairs import Pair, same

_NAMES = {
    "q_down": "q_a_proj",
    "q_norm": "q_a_layernorm",
    "kv_down": "kv_a_proj_with_mqa",
    "kv_norm": "kv_a_layernorm",
    "kv_up": "kv_b_proj",
    "out": "o_proj",
}


def pair(settings: AttentionSettings, latent: Latent, block: str, layer: str, kind: str) -> Pair:
    """What holds one tensor of an attention; block: `model.layers.3.`, layer: as `kv_up`.

    There the numbers that are turned lie pair after pair, as (0, 1), (2, 3); here all firsts before all seconds.
    """
    names = {**_NAMES, "q_up": "q_proj" if latent.q_rank is None else "q_b_proj"}
    name, turned = f"{block}self_attn.{names[layer]}.{kind}", latent.rotary_width
    heads = {"q_up": settings.heads, "kv_down": 1}.get(layer)  # of which each has numbers that are turned
    if heads is None:
        return same(name)
    return Pair((name,), lambda x: _parted(x, heads, turned), lambda own: (_paired(own, heads, turned),))


def _parted(x: Tensor, heads: int, turned: int) -> Tensor:
    """Rows (heads · numbers, …), of which the last `turned` of each head are pairs: firsts, then seconds."""
    rows = x.unflatten(0, (heads, -1))
    plain, pairs = rows.split((rows.shape[1] - turned, turned), dim=1)
    return torch.cat((plain, pairs.unflatten(1, (-1, 2)).transpose(1, 2).flatten(1, 2)), dim=1).flatten(0, 1)


def _paired(own: Tensor, heads: int, turned: int) -> Tensor:
    """The way back."""
    rows = own.unflatten(0, (heads, -1))
    plain, halves = rows.split((rows.shape[1] - turned, turned), dim=1)
    return torch.cat((plain, halves.unflatten(1, (2, -1)).transpose(1, 2).flatten(1, 2)), dim=1).flatten(0, 1)


def configuration(latent: Latent) -> dict[str, Any]:
    """What config.json says of it."""
    return {
        "kv_lora_rank": latent.kv_rank,
        "q_lora_rank": latent.q_rank,
        "qk_nope_head_dim": latent.plain_width,
        "qk_rope_head_dim": latent.rotary_width,
        "v_head_dim": latent.value_width,
        "head_dim": latent.rotary_width,
        "rope_interleave": True,
    }
