"""What a network of transformers says of all tokens of a text, as one vector: (B, T, width) to (B, width)."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor


def last(output: Any, mask: Tensor) -> Tensor:
    """At the last real token, which has seen all others in a decoder; mask: (B, T), 0 for padding."""
    at = mask.cumsum(1).argmax(1)  # (B,): the first place at which all real tokens have been counted
    tokens = output.last_hidden_state
    return tokens.gather(1, at[:, None, None].expand(-1, 1, tokens.shape[2])).squeeze(1)


def mean(output: Any, mask: Tensor) -> Tensor:
    """The mean over real tokens."""
    tokens = output.last_hidden_state
    wide = torch.promote_types(tokens.dtype, torch.float32)  # bf16 counts to 256
    return (tokens * mask[..., None]).sum(1, dtype=wide) / mask.sum(1, keepdim=True).clamp_min(1)


def cls(output: Any, mask: Tensor) -> Tensor:
    """At the first token, through the layer that BERT and its like have for it."""
    pooled = getattr(output, "pooler_output", None)
    return output.last_hidden_state[:, 0] if pooled is None else pooled


POOLS: dict[str, Callable[[Any, Tensor], Tensor]] = {"last": last, "mean": mean, "cls": cls}


def usual(config: Any) -> str:
    """The mean for encoders, known by that they can guess masked tokens; for decoders the last token."""
    from transformers import MODEL_FOR_MASKED_LM_MAPPING

    return "mean" if type(config) in MODEL_FOR_MASKED_LM_MAPPING and not config.is_decoder else "last"
