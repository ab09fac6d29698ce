"""BatchNorm over several ranks: statistics of the whole micro-batch, or running statistics that agree."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _BatchNorm

from trainer.parallel.ranks import Group, Ranks

BATCH_NORMS = (nn.BatchNorm1d, nn.BatchNorm2d, nn.BatchNorm3d)


def batch_norms(network: nn.Module) -> list[_BatchNorm]:
    """The layers that normalise by the statistics of their own rank's micro-batch."""
    return [module for module in network.modules() if isinstance(module, BATCH_NORMS)]


def with_statistics(network: nn.Module) -> list[_BatchNorm]:
    """All layers with BatchNorm's running statistics, synchronised or not."""
    return [module for module in network.modules() if isinstance(module, _BatchNorm)]


def synchronised(network: nn.Module, ranks: Ranks, device: torch.device) -> nn.Module:
    """The network with every BatchNorm taking its statistics over all of these ranks; DDP does not do this by itself.

    On GPUs torch's own SyncBatchNorm (which works on nothing else), on CPUs `CPUSyncBatchNorm`.
    """
    if not isinstance(ranks, Group):
        return network
    if device.type == "cuda":
        return nn.SyncBatchNorm.convert_sync_batchnorm(network, ranks.group)
    if isinstance(network, BATCH_NORMS):
        return CPUSyncBatchNorm.of(network, ranks)
    for name, child in network.named_children():
        setattr(network, name, synchronised(child, ranks, device))
    return network


def average_statistics(network: nn.Module, ranks: Ranks) -> None:
    """Collective: running means and variances become their mean over the ranks; no other buffer is touched.

    The mean is linear, as is the running update: when it is taken does not change what it will be later.
    """
    layers = [layer for layer in batch_norms(network) if layer.running_mean is not None]
    if ranks.size == 1 or not layers:
        return
    buffers = [buffer for layer in layers for buffer in (layer.running_mean, layer.running_var) if buffer is not None]
    flat = torch.cat([buffer.reshape(-1) for buffer in buffers])
    ranks.sum_(flat).wait()  # the data ranks; two numbers a channel travel
    flat /= ranks.size
    for buffer, mean in zip(buffers, flat.split([buffer.numel() for buffer in buffers]), strict=True):
        buffer.copy_(mean.view_as(buffer))


class CPUSyncBatchNorm(_BatchNorm):
    """BatchNorm over the micro-batches of all ranks, exact also where they differ in size. x: (B, C, ...)."""

    ranks: Ranks

    @classmethod
    def of(cls, layer: _BatchNorm, ranks: Ranks) -> CPUSyncBatchNorm:
        """Take over a layer's parameters, buffers and settings."""
        own = cls(layer.num_features, layer.eps, layer.momentum, layer.affine, layer.track_running_stats)
        own._parameters.update(layer._parameters)
        own._buffers.update(layer._buffers)
        own.ranks = ranks
        return own.train(layer.training)

    def _check_input_dim(self, x: Tensor) -> None:
        if x.dim() < 2:
            raise ValueError(f"batch normalisation wants (B, C, ...), got {tuple(x.shape)}")

    def forward(self, x: Tensor) -> Tensor:
        """Normalise by the statistics of all ranks in training, by the running ones in evaluation."""
        if not self.training and self.running_mean is not None:
            return super().forward(x)
        self._check_input_dim(x)
        wide = x if x.dtype == torch.float64 else x.float()  # statistics of bf16 activations are taken in fp32
        axes = [0, *range(2, x.dim())]
        count = wide.new_tensor([x.numel() / x.shape[1]])
        sums = _AllReduce.apply(torch.cat([wide.sum(axes), count]), self.ranks)  # the data ranks; C + 1 numbers
        total = sums[-1].detach()
        mean = sums[:-1] / total  # (C,)
        shape = [1, -1, *[1] * (x.dim() - 2)]
        centred = wide - mean.view(shape)
        # the second moment is taken around the global mean: E[x²] - E[x]² would cancel
        variance = _AllReduce.apply(centred.square().sum(axes), self.ranks) / total  # the data ranks; C numbers
        self._track(mean.detach(), variance.detach(), total)
        scale = torch.rsqrt(variance + self.eps)
        scale = scale if self.weight is None else scale * self.weight
        normalised = centred * scale.view(shape)
        return (normalised if self.bias is None else normalised + self.bias.view(shape)).to(x.dtype)

    @torch.no_grad()
    def _track(self, mean: Tensor, variance: Tensor, total: Tensor) -> None:
        if self.running_mean is None or self.running_var is None or self.num_batches_tracked is None:
            return
        self.num_batches_tracked += 1
        rate = 1.0 / float(self.num_batches_tracked) if self.momentum is None else self.momentum
        self.running_mean.lerp_(mean.to(self.running_mean.dtype), rate)
        unbiased = variance * (total / (total - 1).clamp(min=1))
        self.running_var.lerp_(unbiased.to(self.running_var.dtype), rate)


class _AllReduce(torch.autograd.Function):
    """A sum over ranks that is differentiable: every rank's result depends on every rank's input."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, ranks: Ranks) -> Tensor:
        ctx.ranks = ranks
        x = x.clone()
        ranks.sum_(x).wait()
        return x

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None]:
        total = grads[0].contiguous().clone()
        ctx.ranks.sum_(total).wait()
        return total, None
