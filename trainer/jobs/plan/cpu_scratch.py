"""What kernels on CPUs take for themselves while they run: no storage, so that nothing but this file knows of it.

Measured operator by operator, by the growth of a process, with torch 2.15 (oneDNN, gloo). Of what a ViT, a GPT, a CNN,
a ResNet and a ConvNeXt compute and send, convolutions and two collectives alone take more than 5 MiB.
"""

from __future__ import annotations

from collections.abc import Sequence
from math import prod
from typing import Any

import torch
from torch import Tensor

_BLOCK = 16  # channels that oneDNN's layouts keep together; a group of fewer is filled up


def convolution_scratch(name: str, args: Sequence[Any], out: Any) -> int:
    """Bytes that oneDNN takes for a convolution, or its backward, beside tensors; 0 for other operators.

    Its kernels compute on copies in layouts of their own: always of the weights, and of images that are not channels
    last. In a backward the weights' gradient is also copied back.
    """
    if name == "aten::convolution":
        images, weight, groups = args[0], args[1], args[8]
        if _is_channels_last(images):
            return _relaid(weight) + (weight.nbytes if groups == 1 else 0)
        # first copies of what goes in, then one of what comes out
        return max(images.nbytes + weight.nbytes, out.nbytes)
    if name == "aten::convolution_backward":
        gradient, images, weight, groups = args[0], args[1], args[2], args[9]
        if not args[10][1]:  # the weights are frozen
            return weight.nbytes
        blocked = weight.nbytes if groups == 1 else groups * _BLOCK**2 * prod(weight.shape[2:]) * weight.itemsize
        if _is_channels_last(images):
            return _relaid(weight) + blocked + weight.nbytes
        return max(images.nbytes + gradient.nbytes, blocked)
    return 0


def collective_scratch(op: str, whole: int) -> int:
    """Bytes that gloo takes for a collective of a whole tensor of so many bytes, beside what is given to it.

    It gathers into a flat tensor of its own, and reduces a copy of what is to be scattered. What is reduced otherwise
    passes through two pieces of at most 1 MiB.
    """
    return whole if op in ("all-gather", "reduce-scatter") else 0


def _relaid(weight: Tensor) -> int:
    """Bytes of the copy of weights that are not channels last where the images are: of what FSDP has gathered."""
    return 0 if _is_channels_last(weight) else weight.nbytes


def _is_channels_last(tensor: Tensor) -> bool:
    return tensor.dim() == 4 and tensor.is_contiguous(memory_format=torch.channels_last)
