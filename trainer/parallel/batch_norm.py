"""BatchNorm over several ranks: SyncBatchNorm for any class of it, or running statistics averaged over ranks."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import suppress
from copy import deepcopy
from functools import partial
from typing import Any, TypeGuard

import torch
from torch import Tensor, nn
from torch.nn import functional
from torch.nn.modules.batchnorm import _BatchNorm
from torch.overrides import TorchFunctionMode

from trainer.learning.freezing import BATCH_NORMS, StaysInEvaluation
from trainer.messages import Refusal
from trainer.parallel.buckets import average_tensors
from trainer.parallel.ranks import Group, Ranks

INSTANCE_NORMS = (nn.InstanceNorm1d, nn.InstanceNorm2d, nn.InstanceNorm3d)


def local_batch_norms(network: nn.Module) -> list[_BatchNorm]:
    """The layers that normalise with the statistics of this rank's micro-batch alone."""
    return [module for module in network.modules() if _is_local(module)]


def _is_local(module: nn.Module) -> TypeGuard[_BatchNorm]:
    """Does it learn statistics, of this rank's data alone?"""
    return isinstance(module, BATCH_NORMS) and not isinstance(module, (SynchronisedBatchNorm, StaysInEvaluation))


def all_batch_norms(network: nn.Module) -> list[_BatchNorm]:
    """All BatchNorms, synchronised or not."""
    return [module for module in network.modules() if isinstance(module, _BatchNorm)]


def norms_without_statistics(network: nn.Module) -> list[str]:
    """The names of BatchNorms that normalise with the statistics of the micro-batch in an evaluation, too."""
    return [name for name, m in network.named_modules() if isinstance(m, _BatchNorm) and m.running_mean is None]


def running_statistics(network: nn.Module) -> dict[str, Tensor]:
    """BatchNorm's running means and variances, by their names."""
    return {
        f"{name}.{key}".removeprefix("."): buffer
        for name, layer in network.named_modules()
        if isinstance(layer, _BatchNorm)
        for key, buffer in layer.named_buffers(recurse=False)
        if buffer.is_floating_point()
    }


def synchronise_batch_norms(network: nn.Module, ranks: Ranks, device: torch.device) -> nn.Module:
    """Have every BatchNorm of a network take its statistics over all of these ranks; DDP does not do this by itself.

    A class that adds something to BatchNorm (timm's adds an activation) keeps what it adds. On CUDA plain BatchNorms
    become torch's own SyncBatchNorm, which is faster, works on nothing else, and would drop such additions.
    """
    if not isinstance(ranks, Group):
        return network
    if type(network) in BATCH_NORMS and device.type == "cuda":  # its kernels are CUDA's
        return nn.SyncBatchNorm.convert_sync_batchnorm(network, ranks.group)
    if _is_local(network):
        # another class, not another module: names, hooks and the layer's own forward stay
        kind = type(network)
        network.__class__ = type(f"Synchronised{kind.__name__}", (SynchronisedBatchNorm, kind), {"ranks": ranks})
    for name, child in network.named_children():
        setattr(network, name, synchronise_batch_norms(child, ranks, device))
    return network


def refuse_custom_batch_norms(network: nn.Module) -> None:
    """Refuse classes of BatchNorm that compute statistics by themselves; a forward on the meta device shows it."""
    for kind, (name, layer) in {type(m): (n, m) for n, m in network.named_modules() if _is_local(m)}.items():
        if kind not in BATCH_NORMS and not _calls_torch(layer):
            raise Refusal(
                f"strategy.sync_bn=true: {name or 'the network'} is a {kind.__name__}, whose forward does not call"
                " torch's batch_norm, so nobody else can take its statistics over all ranks; use strategy.sync_bn=false"
            )


def _calls_torch(layer: _BatchNorm) -> bool:
    """Does the layer's forward call torch's batch_norm?"""
    axes = next(count for kind, count in zip(BATCH_NORMS, (0, 2, 3), strict=True) if isinstance(layer, kind))
    asked = False

    def unchanged(x: Tensor, *_: Any, **__: Any) -> Tensor:
        nonlocal asked
        asked = True
        return x

    with _ReplacedBatchNorm(unchanged), suppress(Exception):
        x = torch.empty(2, layer.num_features, *[2] * axes, device="meta")  # (B, C, ...)
        deepcopy(layer).to("meta").train()(x)
    return asked


def average_statistics(network: nn.Module, ranks: Ranks) -> None:
    """Collective: running means and variances become their mean over the ranks; no other buffer is touched.

    The mean is linear, as is the running update: when it is taken does not change what it will be later. InstanceNorm
    follows the mean over its samples, so the mean over ranks is that over all samples.
    """
    layers = [module for module in network.modules() if _is_local(module) or isinstance(module, INSTANCE_NORMS)]
    buffers = [buffer for layer in layers for buffer in (layer.running_mean, layer.running_var) if buffer is not None]
    average_tensors(buffers, ranks)  # the data ranks; two numbers a channel travel


class SynchronisedBatchNorm(nn.Module):
    """The class that a BatchNorm gets: its own forward, in which torch's batch_norm is the one over all ranks."""

    ranks: Ranks

    def forward(self, *args: Any, **more: Any) -> Any:
        """Call the forward of the layer's own class."""
        with _ReplacedBatchNorm(partial(batch_norm_over_ranks, self.ranks)):
            return super().forward(*args, **more)


class _ReplacedBatchNorm(TorchFunctionMode):
    """Inside, calls of `torch.nn.functional.batch_norm` are calls of another function."""

    def __init__(self, other: Callable[..., Any]) -> None:
        super().__init__()
        self._other = other

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        return (self._other if func is functional.batch_norm else func)(*args, **(kwargs or {}))


def batch_norm_over_ranks(
    ranks: Ranks,
    x: Tensor,
    running_mean: Tensor | None,
    running_var: Tensor | None,
    weight: Tensor | None = None,
    bias: Tensor | None = None,
    training: bool = False,
    momentum: float = 0.1,
    eps: float = 1e-5,
) -> Tensor:
    """Collective in training: torch's batch_norm over the micro-batches of all ranks. x: (B, C, ...).

    Exact also where ranks have different numbers of samples.
    """
    if not training:
        return functional.batch_norm(x, running_mean, running_var, weight, bias, False, momentum, eps)
    wide = x if x.dtype == torch.float64 else x.float()  # statistics of bf16 activations are taken in fp32
    axes = [0, *range(2, x.dim())]  # all but the channels
    count = wide.new_full((1,), x.numel() / x.shape[1])  # filled in there: a copy from the host would wait
    sums = _AllReduce.apply(torch.cat([wide.sum(axes), count]), ranks)  # the data ranks; C + 1 numbers
    total = sums[-1].detach()
    mean = sums[:-1] / total  # (C,)
    shape = [1, -1, *[1] * (x.dim() - 2)]
    centred = wide - mean.view(shape)
    # the second moment is taken around the global mean: E[x²] - E[x]² would cancel
    variance = _AllReduce.apply(centred.square().sum(axes), ranks) / total  # the data ranks; C numbers
    # running statistics move by what all ranks have seen: they stay equal without being sent
    if running_mean is not None and running_var is not None:
        unbiased = variance.detach() * (total / (total - 1).clamp(min=1))
        with torch.no_grad():
            running_mean.lerp_(mean.detach().to(running_mean.dtype), momentum)
            running_var.lerp_(unbiased.to(running_var.dtype), momentum)
    # from here on as in every BatchNorm, with numbers that are the same on all ranks
    scale = torch.rsqrt(variance + eps)  # (C,)
    scale = scale if weight is None else scale * weight
    normalised = centred * scale.view(shape)
    return (normalised if bias is None else normalised + bias.view(shape)).to(x.dtype)


class _AllReduce(torch.autograd.Function):
    """A differentiable sum over ranks: every rank's result depends on every rank's input."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, ranks: Ranks) -> Tensor:
        ctx.ranks = ranks
        x = x.clone()
        ranks.all_reduce_sum_(x).wait()  # the data ranks; C numbers
        return x

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None]:
        total = grads[0].contiguous().clone()
        ctx.ranks.all_reduce_sum_(total).wait()  # the data ranks; C numbers: each rank's loss depends on my sums
        return total, None
