"""The loss of each token from hidden states, some tokens at a time: the scores of all are never in memory at once.

`torch.nn.functional.linear_cross_entropy` of torch 2.15 works in chunks, too, and is not used: under autocast it
computes in fp32, which is another curve, and it takes no weight that tensor ranks split.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd.function import once_differentiable
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Partial, Replicate


class Head(nn.Linear):
    """The last layer of a language model: hidden states to scores, or to the losses of tokens whose scores go again."""

    def forward(self, x: Tensor, targets: Tensor | None = None, ignored: int = -100, chunk: int = 0) -> Tensor:
        """(B, T, width) to scores (B, T, vocabulary); with targets (B, T) to the loss of each token (B, T).

        ignored: the target whose loss is 0. chunk: of so many tokens there are scores at once.
        """
        if targets is None:
            return super().forward(x)
        weight = self.weight
        if not isinstance(weight, DTensor):
            return _TokenLosses.apply(x, weight, targets, ignored, chunk, None)
        # tensor ranks divide the vocabulary: the gradient of x is a sum over them, which DTensor adds up
        assert isinstance(x, DTensor)
        local, mesh = x.to_local(grad_placements=[Partial()]), weight.device_mesh
        losses = _TokenLosses.apply(local, weight.to_local(), targets, ignored, chunk, mesh)
        return DTensor.from_local(losses, mesh, [Replicate()], run_check=False)


class _TokenLosses(torch.autograd.Function):
    """Cross entropy of hidden states with a linear layer; its backward computes the scores of each chunk again.

    It keeps one number for each token. The gradient of the weight is added up in one tensor, in fp32 or finer.
    """

    @staticmethod
    def forward(
        ctx: Any, x: Tensor, weight: Tensor, targets: Tensor, ignored: int, chunk: int, mesh: DeviceMesh | None
    ) -> Tensor:
        """x (B, T, width), weight (vocabulary of this rank, width), targets (B, T) to losses (B, T)."""
        ctx.dtype, ctx.chunk = _product_dtype(x), chunk
        counted = targets != ignored
        # the place of each target among this rank's tokens, (B, T), and whether it is there
        place = torch.where(counted, targets, 0)
        here = counted
        if mesh is not None:
            place = place - mesh.get_local_rank() * len(weight)
            here = counted & (place >= 0) & (place < len(weight))
            place = torch.where(here, place, 0)
        narrow = weight.to(ctx.dtype)
        pairs = [
            _log_sum_and_loss(_scores(rows, narrow), at, mine, mesh)
            for rows, at, mine in zip(*(_chunks(each, x, chunk) for each in (x, place, here)), strict=True)
        ]
        # (B, T) each: the logarithm of the sum of all e^score; that less the target's score
        log_sums, losses = (torch.cat(parts).view(targets.shape) for parts in zip(*pairs, strict=True))
        ctx.save_for_backward(x, weight, place, here, counted, log_sums)
        return torch.where(counted, losses, 0)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, gradient: Tensor) -> Any:
        """The gradients of x and weight, of what this rank has of the vocabulary."""
        x, weight, place, here, counted, log_sums = ctx.saved_tensors
        narrow = weight.to(ctx.dtype)
        gradient = torch.where(counted, gradient, 0)
        of_x = torch.empty_like(x, memory_format=torch.contiguous_format) if ctx.needs_input_grad[0] else None
        of_weight = torch.zeros_like(weight, dtype=_sum_dtype(weight.dtype)) if ctx.needs_input_grad[1] else None
        every = (x, place, here, log_sums, gradient)
        outs = _chunks(of_x, x, ctx.chunk) if of_x is not None else None
        for index, (rows, at, mine, log_sum, factor) in enumerate(
            zip(*(_chunks(each, x, ctx.chunk) for each in every), strict=True)
        ):
            # (n, vocabulary), in place: scores, probabilities, less 1 at the target, their gradient
            scores = _scores(rows, narrow).sub_(log_sum[:, None]).exp_()
            scores.scatter_add_(1, at[:, None], -mine.to(scores.dtype)[:, None])
            of_scores = scores.mul_(factor[:, None]).to(ctx.dtype)
            del scores
            if outs is not None:
                outs[index].copy_(of_scores @ narrow)
            if of_weight is None:
                continue
            if of_weight.dtype == of_scores.dtype:
                of_weight.addmm_(of_scores.t(), rows)
            else:
                of_weight += of_scores.t() @ rows.to(ctx.dtype)
        return of_x, None if of_weight is None else of_weight.to(weight.dtype), None, None, None, None


def _chunks(each: Tensor, x: Tensor, chunk: int) -> tuple[Tensor, ...]:
    """What belongs to the tokens of x, (B, T, …), as pieces (n, …)."""
    return each.view(x.shape[:-1].numel(), *each.shape[x.dim() - 1 :]).split(chunk)


def _scores(rows: Tensor, weight: Tensor) -> Tensor:
    """(n, width) to the scores of this rank's tokens (n, vocabulary), as exact as a loss needs them."""
    scores = rows.to(weight.dtype) @ weight.t()
    return scores.to(_sum_dtype(scores.dtype))


def _log_sum_and_loss(scores: Tensor, place: Tensor, here: Tensor, mesh: DeviceMesh | None) -> tuple[Tensor, Tensor]:
    """Of each row (n, vocabulary) the logarithm of the sum of all e^score, and the loss; changes scores in place."""
    # the tensor ranks; the largest score of each token, then two sums
    largest = _over_ranks(scores.amax(1), mesh, "max")
    scores.sub_(largest[:, None])
    mine = torch.where(here, scores.gather(1, place[:, None])[:, 0], 0)
    sums = _over_ranks(torch.stack([scores.exp_().sum(1), mine]), mesh, "sum")  # (2, n)
    log = sums[0].log()
    return log + largest, log - sums[1]


def _over_ranks(x: Tensor, mesh: DeviceMesh | None, what: str) -> Tensor:
    """Collective: the sum or the largest over these ranks."""
    return x if mesh is None else DTensor.from_local(x, mesh, [Partial(what)], run_check=False).full_tensor()


def _product_dtype(x: Tensor) -> torch.dtype:
    """The type in which a linear layer would compute here."""
    kind = x.device.type
    autocast = torch.amp.is_autocast_available(kind) and torch.is_autocast_enabled(kind)
    return torch.get_autocast_dtype(kind) if autocast and x.dtype != torch.float64 else x.dtype


def _sum_dtype(dtype: torch.dtype) -> torch.dtype:
    """The type in which sums of such numbers are kept."""
    return torch.promote_types(dtype, torch.float32)
