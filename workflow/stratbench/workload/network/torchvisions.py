"""Declares how workers can divide torchvision's models: VGG and the vision transformer (ViT)."""

from __future__ import annotations

import torch
from torch import Tensor, nn


def flatten_samples(_model: nn.Module, x: Tensor) -> Tensor:
    """Flatten each sample to one dimension."""
    return torch.flatten(x, 1)


def embed_patches(model: nn.Module, images: Tensor) -> Tensor:
    """Return the input of a vision transformer's first layer for a batch of images.

    It consists of the class token and one vector per patch.
    """
    x = model._process_input(images)
    x = torch.cat([model.class_token.expand(len(x), -1, -1), x], dim=1)
    return model.encoder.dropout(x + model.encoder.pos_embedding)


def compute_class_scores(model: nn.Module, x: Tensor) -> Tensor:
    """Return the scores of a vision transformer, given the output of its last layer."""
    return model.heads(model.encoder.ln(x)[:, 0])


VGG = ("features.*", "avgpool", (flatten_samples, ()), "classifier.*")
VIT = (
    (embed_patches, ("conv_proj", "class_token", "encoder.pos_embedding", "encoder.dropout")),
    "encoder.layers.*",
    (compute_class_scores, ("encoder.ln", "heads")),
)

#: How tensor-parallel workers divide each module of a vision transformer, by module path.
VIT_TENSOR_PLAN = {
    "encoder.layers.*.self_attention": "heads",
    "encoder.layers.*.mlp.0": "colwise",
    "encoder.layers.*.mlp.3": "rowwise",
}
