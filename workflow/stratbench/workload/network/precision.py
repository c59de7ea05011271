"""What a cell's `precision` setting means for its tensors: dtype and memory format."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import torch


def weights_dtype(precision: str) -> torch.dtype:
    """The dtype of the weights, of the batches and of all that autocast does not convert."""
    import torch

    return torch.float64 if precision == "fp64" else torch.float32


def batch_format(precision: str, device_type: str) -> torch.memory_format:
    """The memory format of the batches; weights are contiguous for every strategy.

    Tensor cores want channels_last. A convolution computes in the format of its input, whatever the
    format of its weight, and every layer passes it on. FSDP2 takes contiguous weights only.
    """
    import torch

    wanted = device_type == "cuda" and precision in ("fp16", "bf16", "tf32")
    return torch.channels_last if wanted else torch.contiguous_format
