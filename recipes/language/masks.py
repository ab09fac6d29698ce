"""Attention in which a token sees not all before it: a dense mask, or the blocks of FlexAttention."""

from __future__ import annotations

from functools import cache
from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import scaled_dot_product_attention

_BLOCK = 128  # tokens: FlexAttention looks at a mask in squares of so many


class Masks:
    """Attention to the tokens from a first one on; of each kind of mask one is made in a forward, for all blocks.

    The masks of the last forward stay in memory. A copy of the network has masks of its own.
    """

    def __init__(self) -> None:
        self._made: tuple[Any, dict[Any, Any]] = (None, {})  # for which begins; kind → mask

    def __reduce__(self) -> tuple[type[Masks], tuple[()]]:
        return Masks, ()

    def attention(
        self, queries: Tensor, keys: Tensor, values: Tensor, begins: Tensor, window: int | None, grouped: bool
    ) -> Tensor:
        """(B, heads, T, head), (B, groups, S, head) twice and (B or 1, 1, T, 1): (B, heads, T, head).

        The last query belongs to the last key. begins: the first key that each query may see; window: of so many keys,
        its own and those before it; None: of all.
        """
        if takes_flex(queries):
            mask = self._once(block_mask, begins, keys.shape[2], window)
            return _flex()(queries, keys, values, block_mask=mask, enable_gqa=grouped)
        mask = self._once(dense_mask, begins, keys.shape[2], window, queries.dtype)
        return scaled_dot_product_attention(queries, keys, values, attn_mask=mask, enable_gqa=grouped)

    def _once(self, make: Any, begins: Tensor, *words: Any) -> Any:
        if torch.compiler.is_compiling():  # a graph finds by itself what it computes twice
            return make(begins, *words)
        # context ranks give parts of one tensor, of the same memory; what is kept here nobody else gets meanwhile
        memory, made = begins.untyped_storage(), self._made
        if made[0] is not memory:
            made = self._made = (memory, {})
        kind = (make, begins.storage_offset(), begins.shape, *words)
        if kind not in made[1]:
            made[1][kind] = make(begins, *words)
        return made[1][kind]


def takes_flex(queries: Tensor) -> bool:
    """Does FlexAttention compute these? Its kernels are for CUDA, up to fp32, and heads of 16 numbers or more.

    Few queries, as those of a text that grows token by token, are not worth a kernel for each length.
    """
    fits = queries.dtype != torch.float64 and queries.shape[-1] >= 16 and queries.shape[2] >= _BLOCK
    return queries.is_cuda and fits


def first_seen(begins: Tensor, seen: int, window: int | None) -> tuple[Tensor, Tensor]:
    """The first and the last key that each query sees: (B, 1, T, 1) and (T, 1)."""
    last = _places(begins, seen - begins.shape[2], seen)[:, None]
    return begins if window is None else begins.maximum(last - (window - 1)), last


def dense_mask(begins: Tensor, seen: int, window: int | None, dtype: torch.dtype) -> Tensor:
    """What is added to the scores of T queries, (B, 1, T, S): 0, or -∞ where a token is not seen."""
    (first, last), keys = first_seen(begins, seen, window), _places(begins, 0, seen)  # (S,)
    hidden = (keys < first) | (keys > last)
    return torch.zeros(hidden.shape, dtype=dtype, device=begins.device).masked_fill_(hidden, -torch.inf)


def block_mask(begins: Tensor, seen: int, window: int | None) -> Any:
    """The same for FlexAttention: which squares of queries and keys it computes, and which of them need a look inside.

    From the first key of each query, not from all pairs: memory is that of the squares.
    """
    from torch.nn.attention.flex_attention import BlockMask

    own, rows = begins.shape[2], first_seen(begins, seen, window)[0][:, 0, :, 0]  # (B or 1, T)
    offset, alike = seen - own, len(rows) == 1  # are all samples alike?

    def sees(batch: Tensor, head: Tensor, query: Tensor, key: Tensor) -> Tensor:
        return (key >= (rows[0, query] if alike else rows[batch, query])) & (key <= query + offset)

    queries, keys = -(-own // _BLOCK), -(-seen // _BLOCK)  # squares
    padded = torch.cat((rows, rows[:, -1:].expand(-1, queries * _BLOCK - own)), dim=1).unflatten(1, (queries, _BLOCK))
    front = _places(begins, 0, keys) * _BLOCK  # (keys,): the first key of each square
    back, first = front + _BLOCK - 1, _places(begins, 0, queries)[:, None] * _BLOCK + offset  # (queries, 1)
    last = (first + _BLOCK - 1).clamp_max(seen - 1)
    some = (front <= last) & (back >= padded.amin(2)[..., None])  # (B, queries, keys)
    full = (back <= first) & (front >= padded.amax(2)[..., None])
    squares = [_listed(which[:, None]) for which in (some & ~full, full)]
    (partial, partial_at), (whole, whole_at) = squares
    return BlockMask.from_kv_blocks(
        partial, partial_at, whole, whole_at, BLOCK_SIZE=_BLOCK, mask_mod=sees, seq_lengths=(own, seen)
    )


def _listed(which: Tensor) -> tuple[Tensor, Tensor]:
    """How many squares of each row are meant, (B, 1, queries), and their numbers before all others, (…, keys)."""
    return which.sum(-1, dtype=torch.int32), which.int().argsort(dim=-1, descending=True, stable=True).int()


def _places(like: Tensor, start: int, stop: int) -> Tensor:
    return torch.arange(start, stop, device=like.device, dtype=torch.int32)


@cache
def _flex() -> Any:
    """FlexAttention, compiled: as it is written in Python it would hold all scores."""
    from torch.nn.attention.flex_attention import flex_attention

    return torch.compile(flex_attention)
