"""Sharded tensors (DTensor, FSDP2): the local shard, the full tensor, and gathered memory."""

from __future__ import annotations

import torch
from torch import Tensor, nn


def local_part(tensor: Tensor) -> Tensor:
    """Return this rank's shard of `tensor`, without padding, in the same memory, or a plain tensor."""
    return tensor.to_local() if hasattr(tensor, "to_local") else tensor


def whole_tensor(tensor: Tensor) -> Tensor:
    """Return all of `tensor` on every rank.

    For a DTensor it is a collective: every rank must call it.
    """
    return tensor.full_tensor() if hasattr(tensor, "full_tensor") else tensor


def free_gathered(model: nn.Module) -> None:
    """Free the full parameters that FSDP2 retains after a forward pass, but not the shards."""
    if not torch.distributed.is_available():
        return
    from torch.distributed.fsdp import FSDPModule

    for module in model.modules():
        if isinstance(module, FSDPModule):
            module.reshard()
