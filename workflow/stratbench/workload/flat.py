"""Maps several tensors to views of one flat tensor."""

from __future__ import annotations

import torch

#: Tensors are aligned like torch's own allocations. With another alignment, vectorised kernels may round
#: differently, and a run must equal one without flat tensors bit for bit.
ALIGN_BYTES = 64


def compute_flat_offsets(tensors: list[torch.Tensor]) -> tuple[list[int], int]:
    """Return each tensor's start in the flat tensor, and its total length, in elements."""
    starts, end = [], 0
    for tensor in tensors:
        align = max(1, ALIGN_BYTES // tensor.element_size())
        starts.append(end)
        end = -(-(end + tensor.numel()) // align) * align
    return starts, end


def get_flat_view(like: torch.Tensor, flat: torch.Tensor, start: int) -> torch.Tensor:
    """Return the view of `flat` at `start` with the shape and strides of `like`.

    Args:
        like: Tensor with the shape and strides.
        flat: Flat tensor.
        start: First element.
    """
    dense = (
        like.numel() == 0
        or 1
        + sum((size - 1) * stride for size, stride in zip(like.shape, like.stride(), strict=True))
        == like.numel()
    )
    if not dense:
        raise ValueError(f"a tensor of shape {list(like.shape)} is not dense in memory")
    return torch.as_strided(flat, like.shape, like.stride(), start)


def copy_into_flat(data: torch.Tensor, flat: torch.Tensor, start: int) -> torch.Tensor:
    """Copy the tensor `data` to `flat` at `start`. Return the view with the shape and strides of `data`.

    Args:
        data: Tensor to copy.
        flat: Flat tensor.
        start: First element.
    """
    view = get_flat_view(data, flat, start)
    view.copy_(data)
    return view


def get_tensor_bytes(tensor: torch.Tensor) -> memoryview:
    """Return the bytes of a contiguous CPU tensor of any dtype, writable, without a copy."""
    return memoryview(tensor.view(torch.uint8).numpy())
