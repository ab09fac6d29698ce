"""Parameters, gradients and optimizer state spread over the data ranks (FSDP2, ZeRO-2 and ZeRO-3)."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Literal

import torch
from torch import nn

from trainer.learning.task import Task
from trainer.parallel.buckets import average_gradients
from trainer.parallel.mesh import make_mesh, ranks_along, spread
from trainer.parallel.shard import Sharding, not_spread, reshard, shard
from trainer.parallel.tensor import refuse_plan
from trainer.parallel.units import units
from trainer.refusal import Refusal
from trainer.strategies.joined import Parted
from trainer.strategies.layers import refuse_sparse
from trainer.strategies.placed import Placed
from trainer.strategies.placed_tensor import PlacedTensor


@dataclass
class FSDP(Parted):
    """Each rank holds a part of every parameter; a unit is gathered when it computes, and released.

    Degrees multiply to the processes: `replicate` copies (HSDP), each spread over `shard` ranks, of which each is cut
    over `tensor` ranks by the plan.
    """

    replicate: int = 1  # copies of the network; they average gradients
    shard: int | None = None  # ranks that one copy is spread over; None: what the others leave
    tensor: int = 1  # ranks that one part is cut over, by the plan; keep them on one machine
    reshard_after_forward: bool = True  # true: gathered anew for the backward (ZeRO-3); false: kept until then (ZeRO-2)
    sync_micro_batches: bool = False  # gradients travel after each micro-batch: more traffic, no whole gradient is kept
    param_dtype: Literal["bf16"] | None = None  # what parameters are gathered in; masters stay fp32. None: as they are
    cpu_offload: bool = False  # parts and optimizer state lie in the host's memory; the optimizer runs there
    prefetch: int = 1  # units gathered before they are needed

    def degrees(self, world_size: int) -> dict[str, int]:
        """How many ranks along each axis. Refusal where they do not multiply to the processes."""
        return spread(world_size, {"replicate": self.replicate, "shard": self.shard, "tensor": self.tensor})

    @property
    def name(self) -> str:
        """The word for these degrees."""
        return ("hsdp" if self.replicate > 1 else "fsdp") + ("_tp" if self.tensor > 1 else "")

    def check(self, task: Task, network: nn.Module, world_size: int) -> None:
        """Refuse units that are not there; with tensor ranks what has no plan, or sizes that do not divide."""
        if self.prefetch < 1:
            raise Refusal(f"strategy.prefetch={self.prefetch}: at least 1 unit is gathered ahead")
        super().check(task, network, world_size)
        refuse_sparse(network, self.name)
        units(network, task.plan(network))
        if self.tensor > 1:
            refuse_plan(network, task.plan(network), self.tensor)

    def _arrange(self) -> None:
        self.mesh = make_mesh(self.device.type, self.degrees(self.world.size), always=("shard",))
        self.data = ranks_along(self.mesh, "replicate", "shard")

    def build(self, task: Task, network: nn.Module, example: Any) -> Placed:
        """Collective: put this rank's part of a network here."""
        return _Placed(self, task, network, example, self.mesh["tensor"] if self.tensor > 1 else None)


class _Placed(PlacedTensor):
    strategy: FSDP

    def _units(self) -> list[str]:
        return units(self.network, self._plan)  # each is gathered before it runs: no graph could reach over two

    def _shard(self, names: list[str]) -> None:
        # the root is the whole step: so the task may use the network as it likes, everything is gathered by then
        own = self.strategy
        how = Sharding(own.reshard_after_forward, own.param_dtype, own.cpu_offload, own.prefetch)
        self._root = shard(self._called, self.network, names, own.mesh, how)
        self._fill(torch.device("cpu") if own.cpu_offload else own.device)
        self._copied = not_spread(self.network)

    def _wrap(self) -> Callable[[Any, Any], Any]:

        def forward(inputs: Any, targets: Any) -> Any:
            try:
                return self._called(inputs, targets)
            except RuntimeError as error:
                if "mixed torch.Tensor and DTensor" in str(error):
                    error.add_note(
                        "A weight is used outside of the unit that holds it, where it is not gathered. Name units in"
                        " the network's plan, Plan(shard=(…)), each of which holds all that uses a weight of it."
                    )
                raise

        return forward

    def _sync(self, last: bool) -> Any:
        self._root.set_requires_gradient_sync(last or self.strategy.sync_micro_batches)
        return super()._sync(last)

    def _average(self) -> None:
        average_gradients(self._copied, self.strategy.data)

    def evaluate(self, batch: Any, valid: int) -> dict[str, torch.Tensor]:
        """Sums over a micro-batch; a data rank of which no sample is `valid` computes, too, for all gather from it."""
        sums = super().evaluate(batch, valid)
        reshard(self._called)  # a forward without a backward leaves parameters gathered
        return sums
