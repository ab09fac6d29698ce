"""A mixture of experts: several MLPs stand in the place of one, and a router sends each token to a few of them.

What a token gets depends on its own sample alone: no expert is full because of what others in the batch want.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from math import ceil
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
    capacity: float | None = None  # in training: at most so many times its even share of a sample's tokens; None: all
    bias_rate: float | None = None  # a bias of each expert moves so far in a step, to balance them; None: no bias
    auxiliary: float = 0.0  # factor of the loss that balances experts within each sample
    expert_groups: int = 1  # experts stand in so many groups, and
    active_groups: int = 1  # those of a token come from so many of them (DeepSeek-V2, arXiv:2405.04434)

    @property
    def by_sample(self) -> bool:
        """Must a router see all tokens of a sample at once, not one after the other?"""
        return self.capacity is not None or self.auxiliary != 0

    @property
    def group_score(self) -> int:
        """How many of its best experts score a group, added up: of a softmax one, of sigmoids two (DeepSeek-V3)."""
        return 2 if self.scores == "sigmoid" and self.expert_groups > 1 else 1

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
        in_active = self.experts // max(self.expert_groups, 1) * self.active_groups  # experts
        least = self.group_score * self.expert_groups  # one for each that scores a group
        whole = least <= self.experts and self.experts % max(self.expert_groups, 1) == 0
        if not (1 <= self.active_groups <= self.expert_groups and whole and self.active <= in_active):
            raise Refusal(
                f"model.expert_groups={self.expert_groups}, model.active_groups={self.active_groups}: model.experts"
                f" {self.experts} must be whole groups of {self.group_score} or more, and the active groups hold"
                f" model.active {self.active} experts or more; 1 and 1: no groups"
            )
        if self.capacity is not None and self.capacity <= 0:
            raise Refusal(f"model.capacity={self.capacity}: it is a factor of the even share, as 1.25; null: no limit")
        for key, number in (("bias_rate", self.bias_rate or 0), ("auxiliary", self.auxiliary)):
            if number < 0:  # it would make busy experts busier
                raise Refusal(f"model.{key}={number}: it is 0 or more")
        if self.scaling <= 0:
            raise Refusal(f"model.scaling={self.scaling}: it is above 0")


class Router(nn.Module):
    """Scores every token for every expert, in fp32 or finer, and chooses.

    counts: (experts + 1,) choices of each expert in this step, and those dropped. It is a counter of the plan: after
    a step it holds the sum over the global batch, and `counted` is called.
    """

    counts: Tensor
    bias: Tensor | None

    def __init__(self, width: int, routing: Routing) -> None:
        super().__init__()
        self.routing = routing
        self.weight = nn.Parameter(torch.empty(routing.experts, width))
        self.register_buffer("counts", torch.zeros(routing.experts + 1, dtype=torch.int64), persistent=False)
        self.register_buffer("bias", None if routing.bias_rate is None else torch.zeros(routing.experts))

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """(B, T, width) to weights and numbers of the experts of each token, (B, T, active) both, and a loss (B,).

        A choice that is dropped has the number `experts`, of none, and the weight 0.
        """
        routing, wide = self.routing, torch.promote_types(x.dtype, torch.float32)
        with torch.autocast(x.device.type, enabled=False):
            logits = functional.linear(x.to(wide), self.weight.to(wide))  # (B, T, experts)
            scores = logits.softmax(-1) if routing.scores == "softmax" else logits.sigmoid()
            # the bias chooses, and weighs nothing: so it has no gradient (DeepSeek-V3, arXiv:2412.19437)
            ranked = scores.detach() if self.bias is None else scores.detach() + self.bias.to(wide)
            chosen = self._in_active_groups(ranked).topk(routing.active, dim=-1).indices
            weights = scores.gather(-1, chosen)
            if routing.normalised:
                weights = weights / (weights.sum(-1, keepdim=True) + torch.finfo(wide).tiny)
            weights = weights * routing.scaling
            # (B, experts): how many of a sample's choices each expert gets
            load = torch.zeros_like(scores[:, 0], dtype=torch.int64)
            load.scatter_add_(1, chosen.flatten(1), torch.ones_like(chosen).flatten(1))
            balance = self._balance(scores, load)
            if self.training:
                weights, chosen, dropped = self._dropped(weights, chosen)
                self.counts += torch.cat([load.sum(0), dropped[None]])
        return weights, chosen, balance

    def _in_active_groups(self, ranked: Tensor) -> Tensor:
        """The same scores (B, T, experts), and -∞ for experts outside of the groups that are best for a token."""
        routing = self.routing
        if routing.active_groups == routing.expert_groups:
            return ranked
        grouped = ranked.unflatten(-1, (routing.expert_groups, -1))  # (B, T, groups, experts in a group)
        best = grouped.topk(routing.group_score, dim=-1).values.sum(-1)  # (B, T, groups)
        outside = torch.ones_like(best, dtype=torch.bool)
        outside = outside.scatter(-1, best.topk(routing.active_groups, dim=-1).indices, False)
        return grouped.masked_fill(outside[..., None], -torch.inf).flatten(-2)

    def _balance(self, scores: Tensor, load: Tensor) -> Tensor:
        """The loss of each sample, (B,): 1 for even experts, times a factor (DeepSeek-V3, equations 17 to 20)."""
        if not self.routing.auxiliary or not self.training:
            return scores.new_zeros(len(scores))
        even = self.routing.experts / (self.routing.active * scores.shape[1])
        shares = (scores / scores.sum(-1, keepdim=True)).mean(1)  # (B, experts)
        return self.routing.auxiliary * (even * load.to(shares.dtype) * shares).sum(-1)

    def _dropped(self, weights: Tensor, chosen: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """The same without choices for which an expert has no room in their sample, and how many these are.

        The first tokens of a sample come first: no token can drop out because of a later one.
        """
        routing = self.routing
        if routing.capacity is None:
            return weights, chosen, chosen.new_zeros(())
        batch, tokens, active = chosen.shape
        room = ceil(routing.capacity * tokens * active / routing.experts)
        flat = chosen.flatten(1)  # (B, T · active)
        order = flat.argsort(dim=1, stable=True)
        ordered = flat.gather(1, order)
        # (B, T · active): where the choices of the same expert begin, and so the place of each among them
        begins = torch.searchsorted(ordered, ordered)
        places = torch.arange(tokens * active, device=chosen.device) - begins
        place = torch.empty_like(order).scatter_(1, order, places)
        full = (place >= room).view(batch, tokens, active)
        return weights.masked_fill(full, 0.0), chosen.masked_fill(full, routing.experts), full.sum()

    @torch.no_grad()
    def counted(self) -> None:
        """After a step, with the counts of the whole global batch: whoever had too much is chosen less, and so on."""
        if self.bias is not None and self.routing.bias_rate and self.weight.requires_grad:  # a frozen one stays
            load = self.counts[:-1].to(self.bias.dtype)
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
        # stable: an expert's tokens stay in their order; dropped choices are last
        order = flat.argsort(stable=True)
        rows = x.flatten(0, 1)[order // active]  # (choices, width)
        results = self.compute(rows, flat)
        back = torch.empty_like(order).scatter_(0, order, torch.arange(len(order), device=order.device))
        each = results[back].view(*chosen.shape, -1)  # (B, T, active, width)
        return (each * weights.to(each.dtype)[..., None]).sum(-2).to(x.dtype)

    def compute(self, rows: Tensor, chosen: Tensor) -> Tensor:
        """Rows (choices, width) in the order of their experts, of which `chosen` has the numbers in any order."""
        gate, up, down = (_local(weight) for weight in (self.gate, self.up, self.down))
        # (experts + 1,) how many rows each has, and none of them
        counts = chosen.new_zeros(len(gate) + 1).scatter_add_(0, chosen, torch.ones_like(chosen))
        return _choose_products(rows, counts, gate)(rows, counts, gate, up, down)


def compute_one_by_one(rows: Tensor, counts: Tensor, gate: Tensor, up: Tensor, down: Tensor) -> Tensor:
    """An expert after the other. The host waits for the counts, because it must know how many rows each has."""
    results, begin = [], 0
    for count, *mlp in zip(_known(counts[:-1], len(rows)), gate.unbind(), up.unbind(), down.unbind(), strict=True):
        results.append(_gated(rows[begin : begin + count], *mlp))
        begin += count
    return torch.cat([*results, results[0].new_zeros(max(len(rows) - begin, 0), rows.shape[1])])


def compute_grouped(rows: Tensor, counts: Tensor, gate: Tensor, up: Tensor, down: Tensor) -> Tensor:
    """All experts in one kernel for each product; only the device knows the counts, and nothing waits for them."""
    kind = _product_dtype(rows)
    rows, gate, up, down = (each.to(kind) for each in (rows, gate, up, down))
    ends = counts.cumsum(0, dtype=torch.int32)
    # rows of no expert are the last one's, and become zeros behind it: rows of no group would be memory unwritten
    groups = torch.cat([ends[:-2], ends[-1:]])  # (experts,) where the rows of each end
    product = partial(functional.grouped_mm, offs=groups)
    results = product(functional.silu(product(rows, gate.mT)) * product(rows, up.mT), down.mT)
    behind = torch.arange(len(rows), device=rows.device) >= ends[-2]
    return results.masked_fill(behind[:, None], 0.0)


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
    return counts.tolist() if type(counts) is Tensor else [rows // len(counts)] * len(counts)


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
    """What a training line says of a step's counts, by layer (experts + 1,): the global batch's, of all its blocks.

    busiest and idlest: of all experts of all layers, relative to an even share. expert NN: its choices in all layers.
    """
    if not counts:
        return {}
    table = torch.stack([*counts.values()])  # (layers, experts + 1)
    load, dropped = table[:, :-1], table[:, -1].sum()
    relative = load / load.sum(1, keepdim=True).clamp(min=1) * load.shape[1]
    each = {f"experts/{number:03}": count for number, count in enumerate(load.sum(0))}
    return {"experts/busiest": relative.max(), "experts/idlest": relative.min(), "experts/dropped": dropped} | each
