"""How the networks of torchvision can be split, which do not say it themselves."""

from __future__ import annotations

from torch import nn

from trainer.learning.parallel_plan import Plan


def torchvision_plan(network: nn.Module) -> Plan:
    """The plan of a torchvision network by its class; an empty one where none is known.

    Of torchvision's VisionTransformer the MLPs are cut, two thirds of its weights. Its attention stays whole: the
    packed projection of `nn.MultiheadAttention` cannot be cut.
    """
    if type(network).__name__ != "VisionTransformer" or not type(network).__module__.startswith("torchvision."):
        return Plan()
    from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel

    return Plan(
        tensor={
            "encoder.layers.*.mlp.0": ColwiseParallel(),
            "encoder.layers.*.mlp.3": RowwiseParallel(),
        },
        shard=("encoder.layers.*",),
    )
