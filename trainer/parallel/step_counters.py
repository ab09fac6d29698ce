"""Buffers in which the forwards of a step count: their sum over the global batch, the same under every strategy."""

from __future__ import annotations

from collections.abc import Collection, Iterable

import torch
from torch import Tensor, nn

from trainer.learning.parallel_plan import Plan
from trainer.messages import Refusal
from trainer.parallel.ranks import Ranks


class StepCounters:
    """The counters that a plan names: buffers of whole numbers, to which forwards of a step add.

    A rank may hold some of the network (a stage). The sums of all are known to every rank.
    """

    def __init__(self, network: nn.Module, plan: Plan) -> None:
        """network: the whole one."""
        buffers = dict(network.named_buffers())
        for name in plan.counters:
            if name not in buffers or buffers[name].is_floating_point():
                raise Refusal(f"the plan's counters name {name}, which is no buffer of whole numbers of this network")
        self._shapes = {name: buffers[name].shape for name in plan.counters}
        self.sums: dict[str, Tensor] = {}  # of the last step

    def begin(self, *networks: nn.Module) -> None:
        """A step begins: nothing is counted yet."""
        for network in networks if self._shapes else ():
            for buffer in self._held(network).values():
                buffer.zero_()

    def end(self, networks: Collection[nn.Module], device: torch.device, groups: Iterable[Ranks] = ()) -> None:
        """Collective over these groups: counters become sums over all ranks, and their modules hear of it.

        networks: that of this rank; in a plain loop those of all ranks it stands for.
        """
        if self._shapes:
            self._sum([*dict.fromkeys(networks)], device, groups)

    @torch.no_grad()
    def _sum(self, networks: list[nn.Module], device: torch.device, groups: Iterable[Ranks]) -> None:
        held = [self._held(network) for network in networks]
        counts = {name: torch.zeros(shape, dtype=torch.int64, device=device) for name, shape in self._shapes.items()}
        for counters in held:
            for name, buffer in counters.items():
                counts[name] += buffer
        flat = torch.cat([x.flatten() for x in counts.values()])  # (numbers of all counters,)
        for ranks in groups:
            ranks.all_reduce_sum_(flat).wait()  # the data and context ranks, then stages; 8 bytes a number
        sums = flat.split([shape.numel() for shape in self._shapes.values()])
        self.sums = {name: x.view(shape) for (name, shape), x in zip(self._shapes.items(), sums, strict=True)}
        for network, counters in zip(networks, held, strict=True):
            for name, buffer in counters.items():
                buffer.copy_(self.sums[name])
                network.get_submodule(name.rpartition(".")[0]).counted()  # type: ignore[operator]  # the plan says so

    def _held(self, network: nn.Module) -> dict[str, Tensor]:
        return {name: buffer for name, buffer in network.named_buffers() if name in self._shapes}
