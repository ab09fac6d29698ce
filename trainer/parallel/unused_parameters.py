"""Parameters that a rank's data may leave out: it sends zeros for them, so that all ranks send the same gradients."""

from __future__ import annotations

from collections.abc import Collection
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from trainer.data.nested_tensors import changed, tensors
from trainer.parallel.conditional_modules import Use
from trainer.parallel.local_shard import split_axes
from trainer.parallel.pipeline.shape_forward import leaves
from trainer.parallel.ranks import Ranks
from trainer.parallel.units import enclosing

Places = dict[tuple[nn.Module, str], nn.Parameter]  # where a parameter is found once it is gathered → its shard


class Unused:
    """What `fully_shard` has spread and only some data use. It would reduce the gradients that a rank has, and no more.

    Where no rank has used a parameter in a step it has no gradient afterwards, as in one process.
    """

    def __init__(self, ranks: Ranks) -> None:
        self._ranks = ranks  # those that gradients are averaged over
        self._used: dict[nn.Parameter, bool] = {}  # by any micro-batch of this step, here

    def follow(self, root: nn.Module, network: nn.Module, units: Collection[str], use: Use) -> None:
        """Look at the calls of those units, and of `root`, that hold such parameters. All of them are spread."""
        holders: dict[str, Places] = {}
        for name, parameter in network.named_parameters():
            spread = isinstance(parameter, DTensor) and "shard" in split_axes(parameter)
            if spread and parameter.requires_grad and name not in use.parameters:
                above, _, key = name.rpartition(".")
                unit = next(iter(enclosing(name).intersection(units)), "")
                holders.setdefault(unit, {})[network.get_submodule(above), key] = parameter
                self._used[parameter] = False
        for unit, places in holders.items():
            module = network.get_submodule(unit) if unit else root
            begins: list[set[Any]] = [set()]
            module.register_forward_pre_hook(partial(_begin, begins), with_kwargs=True)  # behind fully_shard's own
            module.register_forward_hook(partial(self._end, begins, places), prepend=True)  # before it releases them

    @torch.compiler.disable
    def _end(
        self,
        begins: list[set[Any]],
        places: dict[tuple[nn.Module, str], nn.Parameter],
        module: nn.Module,
        _: Any,
        output: Any,
    ) -> Any:
        """A call has ended: what its output does not depend on gets zeros with the gradient of the output."""
        learned = [tensor for tensor in tensors(output) if tensor.requires_grad]
        if not torch.is_grad_enabled() or not learned:
            return output
        reached = set(leaves(learned, begins[0]))
        left_out = []
        for (holder, key), parameter in places.items():
            gathered = getattr(holder, key)
            if gathered in reached:
                self._used[parameter] = True
            else:
                left_out.append(gathered)
        if not left_out:
            return output
        touched = _Touch.apply(learned[0], *left_out)
        return changed(output, lambda tensor: touched if tensor is learned[0] else tensor)

    def forget(self) -> None:
        """Collective, after the last backward of a step: what no rank has used has no gradient."""
        if not self._used:
            return
        flags = torch.tensor([*self._used.values()], dtype=torch.uint8)
        self._ranks.all_reduce_max_(flags).wait()  # these ranks; a byte for each parameter, as a CPU tensor
        for parameter, used in zip(self._used, flags.tolist(), strict=True):
            if not used:
                parameter.grad = None
        self._used = dict.fromkeys(self._used, False)


class _Touch(torch.autograd.Function):
    """The first tensor as it is; the others get zeros."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, *parameters: Tensor) -> Tensor:
        ctx.save_for_backward(*parameters)
        return x.clone()  # of a view fully_shard warns

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> Any:
        return grads[0], *(torch.zeros_like(parameter) for parameter in ctx.saved_tensors)


def _begin(begins: list[set[Any]], module: nn.Module, args: Any, kwargs: Any) -> None:
    begins[0] = {tensor.grad_fn for tensor in tensors((args, kwargs))}
