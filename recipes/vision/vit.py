"""A Vision Transformer that says how it can be split."""

from __future__ import annotations

import torch
from torch import Tensor, nn
from torch.nn import functional

from trainer.learning.parallel_plan import Plan
from trainer.messages import Refusal


class Attention(nn.Module):
    """Self-attention with one fused projection, packed head after head, so that cutting its rows cuts whole heads."""

    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.head_width = width // heads
        self.qkv = nn.Linear(width, 3 * width)  # rows: head 0's q, k, v; head 1's q, k, v; …
        self.out = nn.Linear(width, width)

    def forward(self, x: Tensor) -> Tensor:
        """(B, T, width) to (B, T, width); -1 stands for the heads that this rank has."""
        batch, tokens, _ = x.shape
        q, k, v = self.qkv(x).view(batch, tokens, -1, 3, self.head_width).permute(3, 0, 2, 1, 4)  # (B, heads, T, head)
        mixed = functional.scaled_dot_product_attention(q, k, v)
        return self.out(mixed.transpose(1, 2).flatten(2))


class MLP(nn.Module):
    """Two linear layers with GELU, four times as wide inside."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.up = nn.Linear(width, 4 * width)
        self.down = nn.Linear(4 * width, width)

    def forward(self, x: Tensor) -> Tensor:
        """(B, T, width) to (B, T, width)."""
        return self.down(functional.gelu(self.up(x)))


class Block(nn.Module):
    """Attention, then an MLP, each normalised before and added to the stream; dropout on what is added."""

    def __init__(self, width: int, heads: int, dropout: float) -> None:
        super().__init__()
        self.attention_norm, self.attention = nn.LayerNorm(width), Attention(width, heads)
        self.mlp_norm, self.mlp = nn.LayerNorm(width), MLP(width)
        self.dropout = nn.Dropout(dropout)  # where every tensor rank holds the whole stream

    def forward(self, x: Tensor) -> Tensor:
        """(B, T, width) to (B, T, width)."""
        x = x + self.dropout(self.attention(self.attention_norm(x)))
        return x + self.dropout(self.mlp(self.mlp_norm(x)))


class VisionTransformer(nn.Module):
    """Patches as tokens, learned positions, pre-norm blocks, the mean over tokens, one linear layer.

    Under tensor parallelism the degree must divide `heads`: 12 heads fit 2, 3, 4, 6 and 12 ranks.
    """

    def __init__(
        self,
        num_classes: int,
        channels: int,
        image_size: int,
        patch_size: int | None = None,
        width: int = 192,
        depth: int = 6,
        heads: int = 12,
        dropout: float = 0.0,
    ) -> None:
        super().__init__()
        patch = patch_size or patch_for(image_size)
        if image_size % patch:
            raise Refusal(
                f"{image_size} pixels do not divide into patches of {patch}; {_patches(image_size)} would work"
            )
        if heads < 1:
            raise Refusal(f"model.heads is {heads}; at least 1")
        if width % heads:
            raise Refusal(f"width {width} ÷ heads {heads} is not whole; width {-(-width // heads) * heads} would work")
        self.heads, self.backbone = heads, ("embed", "position", "blocks", "norm")  # all but the head
        self.embed = nn.Conv2d(channels, width, patch, stride=patch)
        self.position = nn.Parameter(torch.empty(1, (image_size // patch) ** 2, width))
        self.dropout = nn.Dropout(dropout)
        self.blocks = nn.ModuleList(Block(width, heads, dropout) for _ in range(depth))
        self.norm = nn.LayerNorm(width)
        self.head = nn.Linear(width, num_classes)
        self._initialise()

    def forward(self, images: Tensor) -> Tensor:
        """Images (B, channels, image_size, image_size) to (B, num_classes)."""
        x = self.embed(images).flatten(2).transpose(1, 2)  # (B, T, width)
        x = self.dropout(x + self.position)
        for block in self.blocks:
            x = block(x)
        return self.head(self.norm(x).mean(1))

    def plan(self) -> Plan:
        """Whole heads and parts of the MLPs on each tensor rank; blocks as shard units; two equal pipeline stages.

        The residual stream stays whole on every rank: its tokens (16 for 8×8 digits) would not divide by every degree.
        """
        from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel

        tensor = {
            "blocks.*.attention.qkv": ColwiseParallel(),
            "blocks.*.attention.out": RowwiseParallel(),
            "blocks.*.mlp.up": ColwiseParallel(),
            "blocks.*.mlp.down": RowwiseParallel(),
        }
        return Plan(tensor, {"heads": self.heads}, shard=("blocks.*",), cuts=(f"blocks.{len(self.blocks) // 2}",))

    def _initialise(self) -> None:
        """Small normal weights, zero biases; what is added to the stream starts smaller the deeper the network is."""
        for name, module in self.named_modules():
            if isinstance(module, nn.Linear):
                added = name.endswith(("attention.out", "mlp.down"))
                spread = module.in_features**-0.5 / ((2 * len(self.blocks)) ** 0.5 if added else 1.0)
                nn.init.trunc_normal_(module.weight, std=spread)
                nn.init.zeros_(module.bias)
        nn.init.trunc_normal_(self.position, std=0.5)  # as large as embedded patches: place tells as much as content
        # small, not zero: a first softmax that is exactly even gives gradients of rounding alone, which Adam enlarges
        nn.init.normal_(self.head.weight, std=0.02)


def patch_for(image_size: int) -> int:
    """The patch size that divides the image and comes nearest to 8 patches a side (above 96 pixels: 14)."""
    wanted = 8 if image_size <= 96 else 14
    return min(_patches(image_size), key=lambda patch: abs(image_size // patch - wanted))


def _patches(image_size: int) -> list[int]:
    """Patch sizes of two pixels or more that divide the image."""
    return [patch for patch in range(2, image_size + 1) if image_size % patch == 0]
