"""How an adapter is split over tensor ranks: as the layer beside which it stands."""

from __future__ import annotations

from collections.abc import Mapping
from copy import copy
from functools import partial
from typing import Any

from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Partial, Placement, Replicate, Shard, distribute_tensor
from torch.distributed.tensor.parallel import ColwiseParallel, ParallelStyle, RowwiseParallel
from torch.nn.functional import linear

from recipes.lora import OWN, Adapted


class _Columns(ColwiseParallel):
    """Each rank has some of the outputs: all of lora_a (rank, in), and its rows of lora_b (out, rank)."""

    def _apply(self, module: nn.Module, device_mesh: DeviceMesh) -> nn.Module:
        return _apply_with_adapter(super(), module, device_mesh, (Replicate(), Shard(0)))


class _Rows(RowwiseParallel):
    """Each rank has some of the inputs: its columns of lora_a, and all of lora_b. In between r numbers are summed."""

    def _apply(self, module: nn.Module, device_mesh: DeviceMesh) -> nn.Module:
        (layout,) = self.output_layouts
        module = _apply_with_adapter(super(), module, device_mesh, (Shard(1), Replicate()))
        if isinstance(module, Adapted):
            vars(module)["combine"] = partial(_combined_rows, layout)
        return module


def _combined_rows(layout: Placement, module: Adapted, output: Any, x: Any) -> Tensor:
    """`combined` of a layer whose inputs are split: both terms become whole, or a rank's tokens, before they are added.

    Explicit: where torch chooses the layouts, it makes both terms whole, though only a rank's tokens are wanted.
    """
    # (B, T or T / ranks, rank); the tensor ranks: forward a sum, small; backward what was cut comes together
    narrow: Any = linear(x, module.lora_a)
    narrow = narrow.redistribute(placements=[layout]).to_local()
    terms = [Partial() if layout.is_shard() else Replicate()]  # from other tokens each rank has another gradient
    b: Any = module.lora_b
    added = linear(narrow, b.to_local(grad_placements=terms))
    # the tensor ranks; the sum that the layer needs without an adapter as well
    whole = output.redistribute(placements=[layout])
    return whole + module.scale * DTensor.from_local(added, b.device_mesh, [layout], run_check=False)


_WITH_ADAPTER: dict[type, type] = {ColwiseParallel: _Columns, RowwiseParallel: _Rows}


def with_adapters(plan: Mapping[str, ParallelStyle]) -> dict[str, ParallelStyle]:
    """The same plan, in which a layer's adapter is split as the layer is; layers without one are split as before."""
    styles = {name: copy(style) for name, style in plan.items()}
    for style in styles.values():
        if not isinstance(style, _Columns | _Rows):
            style.__class__ = _WITH_ADAPTER.get(type(style), type(style))
    return styles


def _apply_with_adapter(
    plain: Any, module: nn.Module, mesh: DeviceMesh, placements: tuple[Placement, Placement]
) -> nn.Module:
    """Split the layer as `plain` does, which takes every parameter for one of the layer's own, and then its adapter.

    torch calls _apply, in 2.11 to 2.15: there is no public name.
    """
    own = {name: getattr(module, name) for name in OWN if isinstance(module, Adapted)}
    for name in own:
        delattr(module, name)
    module = plain._apply(module, mesh)
    for (name, whole), placement in zip(own.items(), placements, strict=bool(own)):
        split = distribute_tensor(whole.data, mesh, [placement])  # as yet without values: nothing is sent
        module.register_parameter(name, nn.Parameter(split, requires_grad=whole.requires_grad))
    return module
