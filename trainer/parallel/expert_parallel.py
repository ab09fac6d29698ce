"""Expert parallelism: each of some data ranks has a part of the experts, and tokens travel to them and back."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd.function import once_differentiable
from torch.distributed import ProcessGroup
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Replicate, Shard

from trainer.learning.parallel_plan import Plan
from trainer.messages import Refusal
from trainer.parallel.buckets import average_tensors
from trainer.parallel.device_mesh import ranks_along, split_axes, to_local
from trainer.parallel.module_units import matching_modules, require_modules
from trainer.parallel.ranks import Ranks

_WITHOUT = "strategy.expert=1 works with every network"


class ExpertRanks:
    """The ranks of a run by the experts that they hold: neighbours along `expert` hold different ones."""

    def __init__(self, device_type: str, world_size: int, expert: int, tensor: int) -> None:
        """Collective, if `expert` is more than 1; else every rank has all experts, and nothing is done."""
        self.degree, self._tensor = expert, tensor
        self._mesh: Any = None  # a DeviceMesh; None: no rank has other experts than the others
        if expert > 1:
            degrees = {"copies": world_size // tensor // expert, "expert": expert, "tensor": tensor}
            axes = {axis: degree for axis, degree in degrees.items() if degree > 1 or axis == "expert"}
            self._mesh = init_device_mesh(device_type, tuple(axes.values()), mesh_dim_names=tuple(axes))

    @staticmethod
    def refuse(network: nn.Module, plan: Plan, expert: int, data_ranks: int) -> None:
        """Refuse a network without experts, and numbers that do not divide."""
        if not plan.experts:
            raise Refusal(
                f"strategy.expert={expert}: {type(network).__name__} has no experts, by its plan (Plan(experts=…));"
                f" model=moe_nano has; {_WITHOUT}"
            )
        if data_ranks % expert:
            raise Refusal(
                f"{data_ranks} data ranks (replicate × shard × context) / strategy.expert {expert} is not whole;"
                f" degrees that work: {_divisors(data_ranks)}; or start {-(-data_ranks // expert) * expert} data ranks"
            )
        for key in plan.experts:
            for name, module in require_modules(network, key, "the plan's experts", f"; {_WITHOUT}").items():
                count = len(next(module.parameters()))
                if count % expert:
                    raise Refusal(
                        f"{count} experts of {name} / strategy.expert {expert} is not whole; degrees that work:"
                        f" {_divisors(count)}"
                    )

    def apply(self, network: nn.Module, plan: Plan, device: torch.device, dtype: torch.dtype | None) -> None:
        """Let each rank hold a part of the experts that the plan names, in place, and send tokens to the others.

        They compute on this device and in this type, wherever and in whatever they are kept; None: in their own.
        """
        for key in plan.experts if self._mesh else ():
            for _, module in matching_modules(network, key):
                for name, parameter in module.named_parameters():
                    setattr(module, name, nn.Parameter(_shard(parameter, self._mesh), parameter.requires_grad))
                compute: Any = module.compute
                here = partial(_compute_here, module, compute, device, dtype)
                held, ranks = len(to_local(next(module.parameters()))), ranks_along(self._mesh, "expert")
                vars(module)["compute"] = _outside_of_graphs(partial(_compute_elsewhere, here, held, ranks))

    @torch.no_grad()
    def average_gradients(self, network: nn.Module) -> None:
        """Collective: make gradients of experts those of the mean over all data ranks.

        Tokens of all ranks along `expert` came here: their gradients are added up already, and only divided. Ranks
        along `copies` hold the same experts, and average.
        """
        if self._mesh:
            spread = [x.grad for x in network.parameters() if x.grad is not None and "expert" in split_axes(x)]
            gradients = [to_local(gradient) for gradient in spread]
            for gradient in gradients:
                gradient.div_(self.degree)
            average_tensors(gradients, ranks_along(self._mesh, "copies"))  # the ranks with the same; every gradient

    def place(self, rank: int) -> dict[str, int]:
        """Where a rank is along `copies` and `expert`."""
        copies, expert = divmod(rank // self._tensor, self.degree)
        return {"copies": copies, "expert": expert} if self._mesh else {}

    def groups(self) -> list[ProcessGroup]:
        """The groups along each axis."""
        return self._mesh.get_all_groups() if self._mesh else []


def _divisors(count: int) -> str:
    return ", ".join(str(each) for each in range(1, count + 1) if count % each == 0)


def _shard(parameter: Tensor, mesh: Any) -> DTensor:
    """A parameter (experts, …), perhaps split over tensor ranks already, as this rank's part of it."""
    local, names = to_local(parameter.detach()), mesh.mesh_dim_names or ()
    part = local.chunk(mesh["expert"].size())[mesh.get_local_rank("expert")]
    split = parameter.placements[0] if isinstance(parameter, DTensor) else Replicate()
    placements = {"copies": Replicate(), "expert": Shard(0), "tensor": split}
    return DTensor.from_local(
        part,
        mesh,
        [placements[name] for name in names],
        run_check=False,
        shape=parameter.shape,
        stride=parameter.stride(),
    )


def _outside_of_graphs(function: Callable[..., Tensor]) -> Callable[..., Tensor]:
    """The same, which no compiled graph contains: how many rows travel is known only as it runs."""

    @torch.compiler.disable
    def call(rows: Tensor, chosen: Tensor) -> Tensor:
        return function(rows, chosen)

    return call


def _compute_here(
    module: nn.Module,
    compute: Callable[..., Tensor],
    device: torch.device,
    dtype: torch.dtype | None,
    rows: Tensor,
    chosen: Tensor,
) -> Tensor:
    """`compute` of a module, with its parameters brought to a device and a type; their gradients go back."""
    kept = dict(module.named_parameters())
    # an attribute of an object comes before a parameter of the same name
    vars(module).update({name: each.to(device, each.dtype if dtype is None else dtype) for name, each in kept.items()})
    try:
        return compute(rows, chosen)
    finally:
        for name in kept:
            del vars(module)[name]


def _compute_elsewhere(compute: Callable[..., Tensor], held: int, ranks: Ranks, rows: Tensor, chosen: Tensor) -> Tensor:
    """Collective: rows (choices, width) in the order of their experts go to the ranks of these, and come back.

    chosen: the experts' numbers, in any order; rows of no expert are last, and become zeros. compute: the same for the
    experts of this rank, of which there are `held`.
    """
    with torch.no_grad():
        experts = ranks.size * held
        counts = chosen.new_zeros(experts + 1).scatter_add_(0, chosen, torch.ones_like(chosen))[:-1]
        counts = counts.view(ranks.size, -1)  # (ranks, experts of a rank)
        arriving = ranks.all_to_all(counts)  # the expert ranks; how many rows come for each expert here
        sends, receives = (_known(each.sum(1), len(rows)) for each in (counts, arriving))
        # rows arrive rank by rank: (rows here,) the number of each one's expert here
        each = torch.arange(arriving.shape[1], device=rows.device).repeat(ranks.size)
        numbers = each.repeat_interleave(arriving.flatten(), output_size=sum(receives))
        order = numbers.argsort(stable=True)
        back = torch.empty_like(order).scatter_(0, order, torch.arange(len(order), device=order.device))
    kept = sum(sends)
    # the expert ranks; the tokens of each choice, (rows here, width)
    here = _Exchange.apply(rows[:kept], ranks, sends, receives)
    results = compute(here[order], numbers)[back]
    returned = _Exchange.apply(results, ranks, receives, sends)  # the expert ranks; what came of them
    return torch.cat([returned, returned.new_zeros(len(rows) - kept, rows.shape[1])])


def _known(counts: Tensor, rows: int) -> list[int]:
    """Rows of each rank as the host knows them; of a shape without values, as a plan has it, even shares."""
    return counts.tolist() if type(counts) is Tensor else [rows // len(counts)] * len(counts)


class _Exchange(torch.autograd.Function):
    """Rows to other ranks. The gradient of each comes back the same way: to the rank that it is from, and once."""

    @staticmethod
    def forward(ctx: Any, rows: Tensor, ranks: Ranks, sends: list[int], receives: list[int]) -> Tensor:
        ctx.way = ranks, receives, sends
        return ranks.all_to_all(rows, sends, receives)  # the expert ranks; rows of some tokens

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, gradient: Tensor) -> Any:
        ranks, sends, receives = ctx.way
        return ranks.all_to_all(gradient, sends, receives), None, None, None  # the expert ranks; their gradients
