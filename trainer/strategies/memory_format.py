"""The form of a network's numbers: their type, and in which order images lie in memory."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from trainer.data.nested_tensors import changed, floats_as
from trainer.refusal import Refusal


class MemoryFormat:
    """What batches and weights must look like to meet: fp64 for proofs, channels last where images are convolved.

    Channels last is the faster layout of convolutions, on GPUs and (by a fifth, measured) on CPUs.
    """

    def __init__(self, network: nn.Module, dtype: torch.dtype, channels_last: bool) -> None:
        self._double = dtype == torch.float64
        convolutions = (module for module in network.modules() if isinstance(module, nn.Conv2d))
        self._channels_last = channels_last and any(max(module.kernel_size) > 1 for module in convolutions)

    def lay_out(self, network: nn.Module) -> None:
        """Bring the weights of convolutions into the layout of their inputs, in place."""
        for parameter in network.parameters():
            if self._channels_last and parameter.dim() == 4:  # of a convolution: (out, in, height, width)
                # as their gradients come: `contiguous` would leave the stride of a dimension of 1 as it is, and DDP
                # would warn of two layouts
                laid_out = torch.empty_like(parameter.data, memory_format=torch.channels_last)
                parameter.data = laid_out.copy_(parameter.data)

    def cast(self, tree: Any) -> Any:
        """A batch in this form: images (B, C, H, W) with the channels last."""
        tree = floats_as(tree, torch.float64) if self._double else tree
        return changed(tree, self._laid_out) if self._channels_last else tree

    def _laid_out(self, x: Tensor) -> Tensor:
        return x.contiguous(memory_format=torch.channels_last) if self._channels_last and x.dim() == 4 else x


def in_double(network: nn.Module) -> nn.Module:
    """The network in fp64, in place. TypeError where it has complex numbers: torch would drop their imaginary parts."""
    for name, tensor in (*network.named_parameters(), *network.named_buffers()):
        if tensor.is_complex():
            raise TypeError(f"{name} is complex, and no file of a checkpoint keeps complex numbers of 128 bits")
    return network.to(torch.float64)


def check_gradients(network: nn.Module) -> None:
    """RuntimeError where a gradient lies in memory in another order than its parameter, as one made by hand may.

    Fused optimizers read memory, not indices: they would learn something else without a word.
    """
    for name, parameter in network.named_parameters():
        gradient = parameter.grad
        if gradient is None or isinstance(gradient, DTensor) or gradient.layout != torch.strided:
            continue
        wanted = torch.empty_like(parameter, device="meta").stride()  # as autograd would have laid it out
        # of a dimension of size 1 the stride means nothing
        strides = zip(parameter.shape, wanted, gradient.stride(), strict=True)
        if any(size > 1 and own != other for size, own, other in strides):
            raise RuntimeError(
                f"the gradient of {name} has strides {gradient.stride()} instead of {wanted}; keep the parameter's: "
                "torch.empty_like(parameter).copy_(gradient)"
            )


def refuse_extra_state(network: nn.Module) -> None:
    """Refuse a network whose state is more than tensors: a checkpoint could not give it back."""
    extra = [name for name, value in network.state_dict().items() if not isinstance(value, Tensor)]
    if extra:
        raise Refusal(f"no checkpoint can keep what is no tensor in the network's state: {', '.join(extra[:5])}")
