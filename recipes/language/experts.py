"""A mixture of experts: several MLPs stand in the place of one, and a router sends each token to a few of them.

What a token gets depends on its own sample alone: no expert is full because of what others in the batch want.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from torch.nn import functional

from trainer.messages import Refusal, did_you_mean

SCORES = ("softmax", "sigmoid")


@dataclass(frozen=True)
class Routing:
    """How tokens find their experts."""

    experts: int  # in a block
    active: int = 2  # experts that compute a token
    scores: str = "softmax"  # over all experts, or a sigmoid for each (DeepSeek-V3)
    normalised: bool = True  # the weights of a token's experts add up to `scaling`
    scaling: float = 1.0  # factor of these weights
    bias_rate: float | None = None  # a bias of each expert moves so far in a step, to balance them; None: no bias
    auxiliary: float = 0.0  # factor of the loss that balances experts within each sample

    @property
    def by_sample(self) -> bool:
        """Must a router see all tokens of a sample at once, not one after the other?"""
        return self.auxiliary != 0

    def refuse(self) -> None:
        """Refuse numbers of which no mixture can be made."""
        if self.scores not in SCORES:
            raise Refusal(
                f"model.scores={self.scores}: there are {', '.join(SCORES)}{did_you_mean(self.scores, SCORES)}"
            )
        if self.experts < 1:
            raise Refusal(f"model.experts={self.experts}: 1 or more stand in the place of one MLP; null: none")
        if not 1 <= self.active <= self.experts:
            raise Refusal(
                f"model.active={self.active}: of model.experts {self.experts} a token gets 1 to {self.experts}"
            )
        for key, number in (("bias_rate", self.bias_rate or 0), ("auxiliary", self.auxiliary)):
            if number < 0:  # it would make busy experts busier
                raise Refusal(f"model.{key}={number}: it is 0 or more")
        if self.scaling <= 0:
            raise Refusal(f"model.scaling={self.scaling}: it is above 0")


class Router(nn.Module):
    """Scores every token for every expert, in fp32 or finer, and chooses.

    counts: (experts,) choices of each expert in this step. It is a counter of the plan: after a step it holds the sum
    over the global batch, and `counted` is called.
    """

    counts: Tensor
    bias: Tensor | None

    def __init__(self, width: int, routing: Routing) -> None:
        super().__init__()
        self.routing = routing
        self.weight = nn.Parameter(torch.empty(routing.experts, width))
        self.register_buffer("counts", torch.zeros(routing.experts, dtype=torch.int64), persistent=False)
        self.register_buffer("bias", None if routing.bias_rate is None else torch.zeros(routing.experts))

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """(B, T, width) to weights and numbers of the experts of each token, (B, T, active) both, and a loss (B,)."""
        routing, wide = self.routing, torch.promote_types(x.dtype, torch.float32)
        with torch.autocast(x.device.type, enabled=False):
            logits = functional.linear(x.to(wide), self.weight.to(wide))  # (B, T, experts)
            scores = logits.softmax(-1) if routing.scores == "softmax" else logits.sigmoid()
            # the bias chooses, and weighs nothing: so it has no gradient (DeepSeek-V3, arXiv:2412.19437)
            ranked = scores.detach() if self.bias is None else scores.detach() + self.bias.to(wide)
            chosen = ranked.topk(routing.active, dim=-1).indices
            weights = scores.gather(-1, chosen)
            if routing.normalised:
                weights = weights / (weights.sum(-1, keepdim=True) + torch.finfo(wide).tiny)
            weights = weights * routing.scaling
            # (B, experts): how many of a sample's choices each expert gets
            load = torch.zeros_like(scores[:, 0], dtype=torch.int64)
            load.scatter_add_(1, chosen.flatten(1), torch.ones_like(chosen).flatten(1))
            balance = self._balance(scores, load)
            if self.training:
                self.counts += load.sum(0)
        return weights, chosen, balance

    def _balance(self, scores: Tensor, load: Tensor) -> Tensor:
        """The loss of each sample, (B,): 1 for even experts, times a factor (DeepSeek-V3, equations 17 to 20)."""
        if not self.routing.auxiliary or not self.training:
            return scores.new_zeros(len(scores))
        even = self.routing.experts / (self.routing.active * scores.shape[1])
        shares = (scores / scores.sum(-1, keepdim=True)).mean(1)  # (B, experts)
        return self.routing.auxiliary * (even * load.to(shares.dtype) * shares).sum(-1)

    @torch.no_grad()
    def counted(self) -> None:
        """After a step, with the counts of the whole global batch: whoever had too much is chosen less, and so on."""
        if self.bias is not None and self.routing.bias_rate and self.weight.requires_grad:  # a frozen one stays
            load = self.counts.to(self.bias.dtype)
            self.bias += self.routing.bias_rate * (load.mean() - load).sign()


class Experts(nn.Module):
    """Gated MLPs without biases, whose weights lie one behind the other: (experts, out, in) each.

    Tokens are put in the order of their experts, so that each expert computes its tokens as one matrix, or one kernel
    those of all. Nothing is filled up, and an expert without tokens gets zeros as its gradient.
    """

    def __init__(self, width: int, inner: int, experts: int) -> None:
        super().__init__()
        self.gate, self.up = (nn.Parameter(torch.empty(experts, inner, width)) for _ in range(2))
        self.down = nn.Parameter(torch.empty(experts, width, inner))

    def forward(self, x: Tensor, weights: Tensor, chosen: Tensor) -> Tensor:
        """(B, T, width), and weights and numbers of experts (B, T, active), to (B, T, width)."""
        active, flat = chosen.shape[-1], chosen.flatten()  # (choices,)
        # stable: an expert's tokens stay in their order
        order = flat.argsort(stable=True)
        rows = x.flatten(0, 1)[order // active]  # (choices, width)
        results = self.compute(rows, flat)
        back = torch.empty_like(order).scatter_(0, order, torch.arange(len(order), device=order.device))
        each = results[back].view(*chosen.shape, -1)  # (B, T, active, width)
        return (each * weights.to(each.dtype)[..., None]).sum(-2).to(x.dtype)

    def compute(self, rows: Tensor, chosen: Tensor) -> Tensor:
        """Rows (choices, width) in the order of their experts, of which `chosen` has the numbers in any order."""
        gate, up, down = (_local(weight) for weight in (self.gate, self.up, self.down))
        # (experts,) how many rows each has
        counts = chosen.new_zeros(len(gate)).scatter_add_(0, chosen, torch.ones_like(chosen))
        return _choose_products(rows, counts, gate)(rows, counts, gate, up, down)


def compute_one_by_one(rows: Tensor, counts: Tensor, gate: Tensor, up: Tensor, down: Tensor) -> Tensor:
    """An expert after the other. The host waits for the counts, because it must know how many rows each has."""
    results, begin = [], 0
    for count, *mlp in zip(_known(counts, len(rows)), gate.unbind(), up.unbind(), down.unbind(), strict=True):
        results.append(_gated(rows[begin : begin + count], *mlp))
        begin += count
    return torch.cat(results)


def compute_grouped(rows: Tensor, counts: Tensor, gate: Tensor, up: Tensor, down: Tensor) -> Tensor:
    """All experts in one kernel for each product; only the device knows the counts, and nothing waits for them."""
    kind = _product_dtype(rows)
    rows, gate, up, down = (each.to(kind) for each in (rows, gate, up, down))
    product = partial(functional.grouped_mm, offs=counts.cumsum(0, dtype=torch.int32))  # where the rows of each end
    return product(functional.silu(product(rows, gate.mT)) * product(rows, up.mT), down.mT)


def compute_even_shares(rows: Tensor, counts: Tensor, gate: Tensor, up: Tensor, down: Tensor) -> Tensor:
    """The same for a plan, whose counts have no values: as many products and as much memory, of even shares."""
    kind, experts = _product_dtype(rows), len(gate)
    rows, gate, up, down = (each.to(kind) for each in (rows, gate, up, down))
    left = len(rows) % experts
    even = rows[: len(rows) - left].view(experts, -1, rows.shape[1])  # (experts, rows of each, width)
    results = (functional.silu(even @ gate.mT) * (even @ up.mT)) @ down.mT
    return functional.pad(results.flatten(0, 1), (0, 0, 0, left))


def _choose_products(rows: Tensor, counts: Tensor, weight: Tensor) -> Callable[..., Tensor]:
    """How this device computes experts of this type and these sides."""
    aligned = len(rows) > 0 and all(side % 8 == 0 for side in weight.shape[1:])  # 16 bytes
    if not aligned or _product_dtype(rows) != torch.bfloat16:
        return compute_one_by_one
    if type(counts) is not Tensor:  # a shape without values: a plan, in most cases for a GPU, and on none
        return compute_even_shares
    if not rows.is_cuda:
        return compute_one_by_one
    return compute_grouped if _has_grouped_products(rows.device.type) else compute_one_by_one


@torch.compiler.assume_constant_result
def _has_grouped_products(kind: str) -> bool:
    """Has this device the kernel, and is it right? On Blackwell, (10, 0), experts without rows got gradients.

    pytorch#172439
    """
    return torch.version.hip is None and (8, 0) <= torch.get_device_module(kind).get_device_capability() < (10, 0)


def _product_dtype(x: Tensor) -> torch.dtype:
    """In which type a matrix product of it is computed: what autocast says, or its own."""
    kind = x.device.type
    return torch.get_autocast_dtype(kind) if torch.is_autocast_enabled(kind) else x.dtype


def _known(counts: Tensor, rows: int) -> list[int]:
    """Rows of each expert as the host knows them; of a shape without values, as a plan has it, even shares."""
    if type(counts) is Tensor:
        return counts.tolist()
    others = [rows // len(counts)] * (len(counts) - 1)
    return [*others, rows - sum(others)]


def _gated(x: Tensor, gate: Tensor, up: Tensor, down: Tensor) -> Tensor:
    """One expert, (n, width) to (n, width); n may be 0."""
    return functional.linear(functional.silu(functional.linear(x, gate)) * functional.linear(x, up), down)


def _local(weight: Tensor) -> Tensor:
    return weight.to_local() if isinstance(weight, DTensor) else weight


class Mixture(nn.Module):
    """Router and experts in the place of an MLP; `shared` computes every token."""

    def __init__(self, width: int, inner: int, routing: Routing, shared: nn.Module | None) -> None:
        super().__init__()
        self.router, self.experts, self.shared = Router(width, routing), Experts(width, inner, routing.experts), shared

    def forward(self, x: Tensor) -> Any:
        """(B, T, width) to (B, T, width)."""
        return self.computed(x)[0]

    def computed(self, x: Tensor) -> tuple[Tensor, Tensor]:
        """The same, and the loss of each sample that balances experts, (B,)."""
        weights, chosen, balance = self.router(x)
        y = self.experts(x, weights, chosen)
        return (y if self.shared is None else y + self.shared(x)), balance


class BalancedMixture(Mixture):
    """The same with its loss: (B, T, width) to that and (B,)."""

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        return self.computed(x)


def figures(counts: dict[str, Tensor]) -> dict[str, Tensor]:
    """What a training line says of a step's counts, by layer (experts,): the global batch's, of all its blocks.

    busiest and idlest: of all experts of all layers, relative to an even share. expert NN: its choices in all layers.
    """
    if not counts:
        return {}
    load = torch.stack([*counts.values()])  # (layers, experts)
    relative = load / load.sum(1, keepdim=True).clamp(min=1) * load.shape[1]
    each = {f"experts/{number:03}": count for number, count in enumerate(load.sum(0))}
    return {"experts/busiest": relative.max(), "experts/idlest": relative.min()} | each
