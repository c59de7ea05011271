"""Division of torchvision's models: as chains of pieces, and by layers.

Importing this file imports torch.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn

from stratbench.workload.network.pieces import Plan


def flatten(_model: nn.Module, x: Tensor) -> Tensor:
    """Return all numbers of a sample in one row."""
    return torch.flatten(x, 1)


def patches(model: nn.Module, images: Tensor) -> Tensor:
    """Return a vision transformer's input: a vector for each patch, the class token before them."""
    x = model._process_input(images)
    x = torch.cat([model.class_token.expand(len(x), -1, -1), x], dim=1)
    return model.encoder.dropout(x + model.encoder.pos_embedding)


def class_scores(model: nn.Module, x: Tensor) -> Tensor:
    """Return its output: the scores of what has become of the class token."""
    return model.heads(model.encoder.ln(x)[:, 0])


VGG: Plan = ("features.*", "avgpool", (flatten, ()), "classifier.*")
VIT: Plan = (
    (patches, ("conv_proj", "class_token", "encoder.pos_embedding", "encoder.dropout")),
    "encoder.layers.*",
    (class_scores, ("encoder.ln", "heads")),
)

#: How workers divide a vision transformer's layers (`extensions/splitting/tensor.py`). Its scores are whole.
VIT_TENSOR_PLAN = {
    "encoder.layers.*.self_attention": "heads",
    "encoder.layers.*.mlp.0": "colwise",
    "encoder.layers.*.mlp.3": "rowwise",
}
