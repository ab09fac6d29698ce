"""A text continued by a decoder, token by token."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from recipes.language.past import Past

Scores = Callable[[Tensor, Sequence[Past]], Tensor]  # of tokens (B, T) behind others: (B, T, vocabulary)


@torch.no_grad()
def continued(
    scores: Scores, layers: int, context: int, tokens: Tensor, count: int, temperature: float, top_k: int | None
) -> Tensor:
    """These tokens (B, T) and so many more: (B, T + count), drawn from torch's global generator.

    temperature: above 1 bolder, below 1 safer, 0 always the likeliest token. top_k: drawn from so many likeliest.
    """
    text, pasts = tokens, [Past() for _ in range(layers)]
    # where the context is full, all but its newer half is forgotten: so it is filled anew only now and then
    new = tokens[:, -context:]
    for _ in range(count):
        new = _drawn(scores(new, pasts)[:, -1].float(), temperature, top_k)  # (B, 1)
        text = torch.cat((text, new), dim=1)
        if pasts[0].tokens == context:
            new, pasts = text[:, -max(1, context // 2) :], [Past() for _ in range(layers)]
    return text


def _drawn(scores: Tensor, temperature: float, top_k: int | None) -> Tensor:
    """One token for each row (B, vocabulary): (B, 1)."""
    if temperature == 0:
        return scores.argmax(-1, keepdim=True)
    if top_k is not None:
        least = scores.topk(min(top_k, scores.shape[-1])).values[:, -1:]
        scores = scores.masked_fill(scores < least, float("-inf"))
    return torch.multinomial((scores / temperature).softmax(-1), 1)
