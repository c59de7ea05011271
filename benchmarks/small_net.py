"""A small network for images of digits, which learns MNIST within an epoch on a CPU: for families.yaml."""

from __future__ import annotations

from torch import Tensor, nn


class SmallNet(nn.Module):
    """Two convolutions and two dense layers, without normalisation; 57,722 parameters on MNIST."""

    def __init__(self, classes: int, channels: int, image_size: int) -> None:
        super().__init__()
        side = image_size // 4
        self.features = nn.Sequential(
            nn.Conv2d(channels, 16, 5, stride=2, padding=2),
            nn.ReLU(),
            nn.Conv2d(16, 16, 5, stride=2, padding=2),
            nn.ReLU(),
        )
        self.head = nn.Sequential(
            nn.Flatten(), nn.Linear(16 * side * side, 64), nn.ReLU(), nn.Linear(64, classes)
        )

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.features(x))
