"""The files and the config of the network that test_own.py brings to the workflow."""

NETWORK = """
from torch import nn
from my_layers import Block

class MyNet(nn.Module):
    def __init__(self, classes, image_size, channels, width=16, depth=3):
        super().__init__()
        self.stem = nn.Linear(image_size * channels, width)
        self.blocks = nn.ModuleList(Block(width) for _ in range(depth))
        self.again = nn.Linear(width, width)
        self.again.weight = self.blocks[0].second.weight  # tied
        self.head = nn.Linear(width, classes)

    def forward(self, x):
        x = self.stem(x.transpose(1, 2).flatten(2))
        for block in self.blocks:
            x = block(x)
        return self.head(self.again(x).mean(1))

class Spared(MyNet):
    def __init__(self, classes, image_size, channels):
        super().__init__(classes, image_size, channels)
        self.spare = nn.Linear(4, 4)

class TwoAnswers(MyNet):
    def forward(self, x):
        return super().forward(x), x
"""
LAYERS = """
from torch import nn

class Block(nn.Module):
    def __init__(self, width):
        super().__init__()
        self.first = nn.Linear(width, width)
        self.second = nn.Linear(width, width)

    def forward(self, x):
        return x + self.second(self.first(x).relu())
"""
