"""How a decoder's layers are split over tensor ranks, the usual way, by sequence, with a split loss; and by context."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from typing import Any

from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Partial, Placement, Replicate, Shard, distribute_tensor
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    ParallelStyle,
    PrepareModuleInput,
    PrepareModuleOutput,
    RowwiseParallel,
    SequenceParallel,
)

from recipes.language.experts import Mixture
from trainer.parallel.context_parallel import GatheredKeys, ShiftedPlaces, WholeSequences

WHOLE: Any = {"input_layouts": (Shard(1),), "desired_input_layouts": (Replicate(),)}  # all tokens come together


def tensor_plan(
    mlps: Sequence[nn.Module], tied: bool, learned: bool, sequence: bool, loss_parallel: bool
) -> dict[str, ParallelStyle]:
    """Layer → how it is split; of a decoder with these MLPs, and these kinds of head and positions.

    sequence: between the layers each rank has some of the tokens, not all (Korthikanti et al. 2022, arXiv:2205.05198).
    loss_parallel: the scores stay split by token number until the loss. Tied embeddings stay whole: only one of the two
    layers would hold the shard.
    """
    stream = Shard(1) if sequence else Replicate()
    plan: dict[str, ParallelStyle] = {
        "blocks.*.attention.qkv": ColwiseParallel(),
        "blocks.*.attention.out": RowwiseParallel(output_layouts=stream),
        **_mlp_plan(mlps, sequence),
    }
    if not tied:
        scores = Shard(-1) if loss_parallel else Replicate()
        plan["embed"] = RowwiseParallel(input_layouts=Replicate(), output_layouts=stream)
        plan["head"] = ColwiseParallel(input_layouts=stream, output_layouts=scores, use_local_output=not loss_parallel)
    return plan | (_by_sequence(tied, learned) if sequence else {})


def _mlp_plan(mlps: Sequence[nn.Module], sequence: bool) -> dict[str, ParallelStyle]:
    """The MLPs of all blocks: the width inside of each, and of each expert, is split."""
    plan: dict[str, ParallelStyle] = {}
    stream = Shard(1) if sequence else Replicate()
    for number, mlp in enumerate(mlps):
        alike = all(type(other) is type(mlp) for other in mlps)
        name = f"blocks.{'*' if alike else number}.mlp"
        mixture = isinstance(mlp, Mixture)
        if isinstance(mlp, Mixture):
            plan[f"{name}.experts"] = SplitExperts(stream)
            if mlp.shared is not None:
                plan |= _dense_plan(f"{name}.shared", mlp.shared, stream)
        else:
            plan |= _dense_plan(name, mlp, stream)
        if sequence:  # router and experts of a mixture take plain tensors
            plan[name] = PrepareModuleInput(**WHOLE, use_local_output=mixture)
    return plan


def _dense_plan(name: str, mlp: nn.Module, stream: Placement) -> dict[str, ParallelStyle]:
    into = {f"{name}.{layer}": ColwiseParallel() for layer in ("gate", "up") if hasattr(mlp, layer)}
    return {**into, f"{name}.down": RowwiseParallel(output_layouts=stream)}


class SplitExperts(ParallelStyle):
    """Each tensor rank has a part of the width inside every expert; their results are added up."""

    def __init__(self, stream: Placement) -> None:
        super().__init__()
        self.output_layouts = stream  # by this name dropout behind it knows which tokens are here

    def _apply(self, module: nn.Module, device_mesh: DeviceMesh) -> nn.Module:
        """Split the weights, (experts, inner, width) and (experts, width, inner). torch calls this method."""
        for name, dim in (("gate", 1), ("up", 1), ("down", 2)):
            split = distribute_tensor(getattr(module, name), device_mesh, [Shard(dim)])
            module.register_parameter(name, nn.Parameter(split))
        module.register_forward_pre_hook(partial(_enter, device_mesh))
        module.register_forward_hook(partial(_leave, device_mesh, self.output_layouts))
        return module


def _enter(mesh: DeviceMesh, _: nn.Module, inputs: tuple[Tensor, ...]) -> tuple[Tensor, ...]:
    x, weights, chosen = inputs
    return _summed_gradient(x, mesh), _summed_gradient(weights, mesh), chosen


def _summed_gradient(x: Tensor, mesh: DeviceMesh) -> Tensor:
    """The same tensor, which all tensor ranks have."""
    # nothing travels here; in the backward the tensor ranks add up the gradients, of which each has a part
    return DTensor.from_local(x, mesh, [Replicate()], run_check=False).to_local(grad_placements=[Partial()])


def _leave(mesh: DeviceMesh, stream: Placement, _: nn.Module, __: Any, y: Tensor) -> Tensor:
    # the tensor ranks; each one's part of the sum, (B, T, width)
    return DTensor.from_local(y, mesh, [Partial()], run_check=False).redistribute(placements=[stream]).to_local()


def _by_sequence(tied: bool, learned: bool) -> dict[str, ParallelStyle]:
    """Where the tokens are cut, and where all of them are put together again."""
    plan: dict[str, ParallelStyle] = {
        "blocks.*.attention_norm": SequenceParallel(),
        "blocks.*.attention": PrepareModuleInput(**WHOLE, use_local_output=False),
        "blocks.*.mlp_norm": SequenceParallel(),
        "norm": SequenceParallel(),
    }
    if learned:
        # of (T, width), or (B, T, width) where documents are packed
        plan["position"] = PrepareModuleOutput(output_layouts=Replicate(), desired_output_layouts=Shard(-2))
    if tied:
        plan["embed"] = PrepareModuleOutput(output_layouts=Replicate(), desired_output_layouts=Shard(1))
        plan["head"] = PrepareModuleInput(**WHOLE, use_local_output=True)  # for a weight that is no DTensor
    return plan


def context_plan(learned: bool, mlps: Sequence[nn.Module]) -> dict[str, ParallelStyle]:
    """What works on a stretch of each sequence: attention, what tells tokens where they are, and some routers."""
    places = {"position": ShiftedPlaces()} if learned else {"blocks.*.attention.positions": ShiftedPlaces(1, dim=2)}
    routers = {
        f"blocks.{number}.mlp.router": WholeSequences()
        for number, mlp in enumerate(mlps)
        if isinstance(mlp, Mixture) and mlp.router.routing.by_sample
    }
    return {"blocks.*.attention.core": GatheredKeys(), **places, **routers}
