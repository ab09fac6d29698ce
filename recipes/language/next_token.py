"""Predicting the next token."""

from __future__ import annotations

import math

from torch import Tensor
from torch.nn import functional

from trainer.learning.task import Task
from trainer.messages import BadData


class NextToken(Task):
    """Cross entropy over tokens; perplexity, and bits for each byte of the text. Targets: token numbers (B, T).

    bytes_per_token: of the evaluation's text, on average; None: not known, and no bits are told. ignored: the target
    that does not count; None: all count, which every rank then knows without a word.
    """

    def __init__(self, bytes_per_token: float | None = None, ignored: int | None = None) -> None:
        self._bytes, self._ignored = bytes_per_token, ignored

    def loss(self, output: Tensor, target: Tensor) -> Tensor:
        """The mean over the tokens that count of (B, T, vocabulary); 0 where there are none.

        BadData where the network or the data is of another kind.
        """
        if output.dim() != 3 or output.shape[:-1] != target.shape:
            raise BadData(
                f"the network gives {tuple(output.shape)} for targets {tuple(target.shape)}; task=language takes scores"
                " (samples, tokens, vocabulary) and targets (samples, tokens), as of model=gpt_nano data=text;"
                " task=classification takes (samples, classes)"
            )
        skipped = -100 if self._ignored is None else self._ignored  # torch's own
        total = functional.cross_entropy(output.flatten(0, 1), target.flatten(), reduction="sum", ignore_index=skipped)
        weight = self.weight(target)
        return total / (max(weight, 1) if isinstance(weight, int) else weight.clamp_min(1))

    def weight(self, target: Tensor) -> Tensor | int:
        """How many tokens count."""
        return target.numel() if self._ignored is None else (target != self._ignored).sum()

    def tokens(self, target: Tensor) -> int:
        """All places, also those that do not count: the network computes them."""
        return target.numel()

    def finish(self, totals: dict[str, Tensor]) -> dict[str, float]:
        """Loss in nats for each token; perplexity e^loss; bits for each byte."""
        loss = float(totals["loss"].double() / (totals["weight"] or 1))
        figures = {"loss": loss, "perplexity": math.exp(min(loss, 700.0))}  # e^700 is near the largest number there is
        if self._bytes:
            figures["bits_per_byte"] = loss / math.log(2) / self._bytes
        return figures
