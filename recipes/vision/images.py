"""Images and labels that lie in memory as tensors."""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor
from torch.utils.data import Dataset


@dataclass(frozen=True)
class Images(Dataset):
    """Images (N, C, H, W) and labels (N,) in memory, taken a whole batch at a time."""

    images: Tensor
    labels: Tensor

    def __len__(self) -> int:
        return len(self.labels)

    def __getitem__(self, index: int) -> tuple[Tensor, Tensor]:
        return self.images[index], self.labels[index]

    def batch(self, indices: Tensor) -> tuple[Tensor, Tensor]:
        """Gather the images and labels of these indices."""
        return self.images.index_select(0, indices), self.labels.index_select(0, indices)
