"""Predicting the next token."""

from __future__ import annotations

import inspect
import math
from copy import copy
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional

from recipes.language.experts import figures
from trainer.learning.task import Task
from trainer.messages import BadData, Refusal

_APART = 1e-3  # of the norm of a token's scores: what rounding does not do in fp32


class NextToken(Task):
    """Cross entropy over tokens; perplexity, and bits for each byte of the text. Targets: token numbers (B, T).

    bytes_per_token: of the evaluation's text, on average; None: not known, and no bits are told. ignored: the target
    that does not count; None: all count, which every rank then knows without a word. loss_chunk: the network gives the
    loss of each token (B, T), and has the scores of so many tokens at once; None: it gives the scores of all. A
    subclass whose metrics want scores gets them in an evaluation. pack: inputs are token numbers and, as many, the
    places in the sample at which their documents begin: the network is given both.
    """

    def __init__(
        self,
        bytes_per_token: float | None = None,
        ignored: int | None = None,
        loss_chunk: int | None = None,
        pack: bool = False,
    ) -> None:
        self._pack = pack
        self._bytes, self._ignored, self.loss_chunk = bytes_per_token, ignored, loss_chunk
        self._skipped = -100 if ignored is None else ignored  # torch's own
        if loss_chunk is not None and loss_chunk < 1:
            raise Refusal(f"task.loss_chunk={loss_chunk}: it is a number of tokens, at least 1; null: all at once")

    def check(self, network: nn.Module) -> None:
        """Refuse chunks where the network cannot compute its loss by itself, and documents that it would mix."""
        takes = "begins" in inspect.signature(network.forward).parameters
        needs = "its forward must take (tokens, begins), as that of the decoders of recipes.language does"
        if self._pack and (why := getattr(network, "mixes_documents", "") if takes else needs):
            raise Refusal(
                f"data.pack=true: {type(network).__name__} would let tokens see other documents of their sample: {why};"
                " data.pack=false works with every network"
            )
        if self.loss_chunk is not None and not callable(getattr(network, "losses", None)):
            raise Refusal(
                f"task.loss_chunk={self.loss_chunk}: {type(network).__name__} has no method losses(tokens, targets,"
                " ignored, chunk), the loss of each token, as the decoders of recipes.language have one;"
                " task.loss_chunk=null works with every network"
            )

    def forward(self, network: nn.Module, inputs: Any, targets: Tensor) -> Tensor:
        """Scores (B, T, vocabulary); in chunks the loss of each token (B, T)."""
        tokens, *begins = (inputs[0], inputs[1]) if self._pack else (inputs,)
        if self.loss_chunk is None or not (network.training or type(self).metrics is Task.metrics):
            return network(tokens, *begins)
        return network.losses(tokens, targets, self._skipped, self.loss_chunk, *begins)  # type: ignore[operator]  # `check` has looked

    @torch.no_grad()
    def examine(self, network: nn.Module, inputs: Any, targets: Tensor) -> str:
        """Does the last document of each sample score as at the beginning of one? If not, a sentence."""
        if not self._pack:
            return ""
        tokens, begins = inputs
        places, whole = torch.arange(tokens.shape[1], device=tokens.device), self.with_whole_outputs()
        first = begins[:, -1:]  # (B, 1): where it begins
        turned = (places + first) % len(places)  # (B, T): the last document, then all others as one
        moved = tokens.gather(1, turned), torch.where(places < len(places) - first, 0, len(places) - first)
        outputs: list[Any] = [whole.forward(network, given, targets) for given in (inputs, moved)]
        scores, other = (x["tokens"] if isinstance(x, dict) else x for x in outputs)  # (B, T, vocabulary)
        rows, back = torch.arange(len(first), device=places.device)[:, None], (places - first) % len(places)
        apart = (scores - other[rows, back]).norm(dim=-1) / scores.norm(dim=-1)  # (B, T)
        worst = apart.masked_fill(places < first, 0).amax(1)  # (B,)
        sample = int(worst.argmax())
        if float(worst[sample]) < _APART:
            return ""
        kind, at = type(network).__name__, int(first[sample])
        return (
            f"{kind} mixes documents: that from token {at} on of sample {sample} scores otherwise than at the beginning"
            f" of a sample, by {float(worst[sample]):.1e} of the scores' norm. No token may see one before its"
            " begins, and positions must count from there"
        )

    def with_whole_outputs(self) -> NextToken:
        """The same without chunks."""
        whole = copy(self)
        whole.loss_chunk = None
        return whole

    def loss(self, output: Any, target: Tensor) -> Tensor | dict[str, Tensor]:
        """The mean over the tokens that count of (B, T, vocabulary), or of their losses (B, T); 0 where there are none.

        With the loss of each sample that balances experts: beside it the mean of that, by tokens, too. BadData
        where the network or the data is of another kind.
        """
        weight = self.weight(target)
        count = max(weight, 1) if isinstance(weight, int) else weight.clamp_min(1)
        if not isinstance(output, dict):
            return self._total(output, target) / count
        # a sample counts by its tokens that count, so that the mean is that over all ranks and micro-batches
        tokens = (target != self._skipped).sum(1) if self._ignored is not None else target.shape[1]  # (B,)
        balance = (output["balance"] * tokens).sum() / count
        return {"cross_entropy": self._total(output["tokens"], target) / count, "balance": balance}

    def _total(self, output: Tensor, target: Tensor) -> Tensor:
        if self.loss_chunk is not None and output.shape == target.shape:
            return output.sum()
        if output.dim() != 3 or output.shape[:-1] != target.shape:
            raise BadData(
                f"the network gives {tuple(output.shape)} for targets {tuple(target.shape)}; task=language takes scores"
                " (samples, tokens, vocabulary) and targets (samples, tokens), as of model=gpt_nano data=text;"
                " task=classification takes (samples, classes)"
            )
        return functional.cross_entropy(
            output.flatten(0, 1), target.flatten(), reduction="sum", ignore_index=self._skipped
        )

    def weight(self, target: Tensor) -> Tensor | int:
        """How many tokens count."""
        return target.numel() if self._ignored is None else (target != self._ignored).sum()

    def counted(self, counts: dict[str, Tensor]) -> dict[str, Tensor]:
        """Of a mixture of experts: how many tokens each got."""
        return figures(counts)

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
