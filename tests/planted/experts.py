"""Mistakes of the program, and of a router, where a network is a mixture of experts."""

from __future__ import annotations

from typing import Any

from torch import Tensor

from tests.planted.networks import rank
from tests.planted.plant import MOE, STRATEGY, Plant
from trainer.parallel.device_mesh import split_axes, to_local


def undivided_experts(original: Any) -> Any:
    """Tokens of two ranks came: the sum of their gradients is taken for the mean."""

    def average(self: Any, network: Any) -> None:
        original(self, network)
        for parameter in network.parameters():
            if "expert" in split_axes(parameter):
                to_local(parameter.grad).mul_(self.degree)

    return average


def counted_here(original: Any) -> Any:
    """The bias of a rank follows its own tokens."""
    return lambda self, networks, device, groups=(): original(self, networks, device)


def other_experts(original: Any) -> Any:
    """The second rank sends each token to the experts next to its own."""

    def forward(self: Any, x: Tensor) -> Any:
        weights, chosen, balance = original(self, x)
        return weights, (chosen + rank()) % self.routing.experts, balance

    return forward


def returned_in_order(original: Any) -> Any:
    """What comes back from experts lies one rank further than it was sent."""

    def all_to_all(self: Any, rows: Tensor, sends: Any = None, receives: Any = None) -> Tensor:
        arrived = original(self, rows, sends, receives)
        return arrived.roll(1, 0) if receives is not None else arrived

    return all_to_all


PLANTS = {
    "experts_summed": Plant(
        "gradients are doubled by experts: the sum over the tokens of two ranks is not divided (pytorch#160285)",
        MOE,
        ("strategy=fsdp", "strategy.expert=2"),
        ("at step 1, gradient, blocks.1.mlp.experts.",),
        STRATEGY,
        {"trainer.parallel.expert_parallel.ExpertRanks.average_gradients": undivided_experts},
    ),
    "router_of_a_rank": Plant(
        "a router differs by rank: the second sends tokens to other experts",
        MOE,
        ("strategy=ddp",),
        ("at step 1, forward, blocks.0.mlp.router",),
        ("the network",),
        {"recipes.language.experts.Router.forward": other_experts},
    ),
    "bias_of_a_rank": Plant(
        "a router differs by rank: its bias follows the tokens of its own rank",
        MOE,
        ("strategy=fsdp",),
        ("at step 1, update, blocks.0.mlp.router.bias",),
        STRATEGY,
        {"trainer.parallel.step_counters.StepCounters.end": counted_here},
    ),
    "tokens_of_others": Plant(
        "what comes back from experts belongs to other tokens",
        MOE,
        ("strategy=fsdp", "strategy.expert=2"),
        ("at step 1, forward, blocks.0.mlp.experts",),
        STRATEGY,
        {"trainer.parallel.ranks.Group.all_to_all": returned_in_order},
    ),
}
