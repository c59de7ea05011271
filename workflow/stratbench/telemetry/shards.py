"""Gets local shards and full tensors of DTensors, and frees parameters that FSDP2 has gathered."""

from __future__ import annotations

import torch
from torch import Tensor, nn


def get_local_shard(tensor: Tensor) -> Tensor:
    """Return this rank's shard of a DTensor, in the same memory and without padding.

    A plain tensor is returned as it is.
    """
    return tensor.to_local() if hasattr(tensor, "to_local") else tensor


def gather_full_tensor(tensor: Tensor) -> Tensor:
    """Return the full tensor of a DTensor, or a plain tensor itself.

    Every rank must call the function for a DTensor.
    """
    return tensor.full_tensor() if hasattr(tensor, "full_tensor") else tensor


def free_gathered_parameters(model: nn.Module) -> None:
    """Free the gathered parameters that FSDP2 keeps after forward; the shards stay."""
    if not torch.distributed.is_available():
        return
    from torch.distributed.fsdp import FSDPModule

    for module in model.modules():
        if isinstance(module, FSDPModule):
            module.reshard()
