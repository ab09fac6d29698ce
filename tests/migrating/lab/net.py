"""The network of three of the programs, and of the runs that replace them: nothing changes in it."""

from torch import Tensor, nn


class Net(nn.Module):
    """Grey pictures (B, 1, 28, 28) to scores (B, classes)."""

    def __init__(self, num_classes: int = 10) -> None:
        super().__init__()
        self.features = nn.Sequential(
            *(nn.Conv2d(1, 16, 3, padding=1), nn.ReLU(), nn.MaxPool2d(2)),  # (B, 16, 14, 14)
            *(nn.Conv2d(16, 32, 3, padding=1), nn.ReLU(), nn.MaxPool2d(2)),  # (B, 32, 7, 7)
        )
        self.head = nn.Linear(32 * 7 * 7, num_classes)

    def forward(self, images: Tensor) -> Tensor:
        return self.head(self.features(images).flatten(1))
