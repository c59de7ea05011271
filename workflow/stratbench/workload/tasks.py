"""What a model learns: its loss, and how often it is right.

One rule does for images and for text: scores [..., classes] are held to targets [...], the class of
each image or the next token after each. Importing this file imports torch.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor


def mean_loss(scores: Tensor, targets: Tensor) -> Tensor:
    """The mean cross-entropy over all targets, in nats."""
    return F.cross_entropy(scores.flatten(0, -2), targets.flatten())


def loss_and_hits(scores: Tensor, targets: Tensor) -> Tensor:
    """The summed cross-entropy in nats, and the number of right answers: float64 [2].

    Computed in float64, so that a sum over a large test set loses nothing.
    """
    scores, targets = scores.double().flatten(0, -2), targets.flatten()
    loss = F.cross_entropy(scores, targets, reduction="sum")
    return torch.stack([loss, (scores.argmax(1) == targets).sum().double()])
