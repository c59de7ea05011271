"""Defines number formats, memory format and autocast for each value of the setting `precision`."""

from __future__ import annotations

from contextlib import AbstractContextManager, nullcontext
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import torch


#: Value of `precision` (as in Lightning) for weights, gradients and optimizer states in bfloat16.
PURE_BF16 = "bf16-true"


def get_weights_dtype(precision: str) -> torch.dtype:
    """Return the dtype of weights, batches and other tensors that autocast does not convert."""
    import torch

    return {"fp64": torch.float64, PURE_BF16: torch.bfloat16}.get(precision, torch.float32)


def convert_scores_for_loss(outputs: torch.Tensor, precision: str) -> torch.Tensor:
    """Return a model's scores in the number format in which the loss is computed."""
    return outputs.float() if precision == PURE_BF16 else outputs


def get_batch_memory_format(precision: str, device_type: str) -> torch.memory_format:
    """Return the memory format of batches of images.

    Tensor cores are faster with channels_last. A convolution computes in the format of its input, whatever
    the format of its weight, and every layer keeps this format. FSDP2 needs contiguous weights.
    """
    import torch

    wanted = device_type == "cuda" and precision in ("fp16", "bf16", PURE_BF16, "tf32")
    return torch.channels_last if wanted else torch.contiguous_format


def get_autocast_dtype(precision: str) -> torch.dtype | None:
    """Return the dtype of autocast, or None if `precision` is not mixed precision."""
    import torch

    return {"bf16": torch.bfloat16, "fp16": torch.float16}.get(precision)


def create_autocast_context(precision: str, device: torch.device) -> AbstractContextManager:
    """Return autocast's context manager, or one without effect if `precision` is not mixed precision."""
    import torch

    dtype = get_autocast_dtype(precision)
    return nullcontext() if dtype is None else torch.autocast(device.type, dtype=dtype)


def get_weights_and_compute_dtypes(precision: str, device: torch.device) -> dict[str, str]:
    """Return the number formats that a device uses for weights and for computation."""
    weights = str(get_weights_dtype(precision)).removeprefix("torch.")
    compute = {"bf16": "bfloat16 (autocast)", "fp16": "float16 (autocast)", "tf32": "tf32"}
    used = compute.get(precision, weights)
    if precision == "tf32" and (lacking := _name_device_lacking_tf32(device)):
        used = f"float32 (no TensorFloat-32 on {lacking})"
    return {"weights_dtype": weights, "compute_dtype": used}


def _name_device_lacking_tf32(device: torch.device) -> str | None:
    """Return a noun for a device without TensorFloat-32, such as `a CPU`.

    The result is None if the device has TensorFloat-32.
    """
    import torch

    if device.type != "cuda":
        return "a CPU"
    major, minor = torch.cuda.get_device_capability(device)
    return None if major >= 8 else f"a GPU of compute capability {major}.{minor}"
