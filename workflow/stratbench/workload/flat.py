"""Stores several tensors one after the other in one flat tensor, as views of it."""

from __future__ import annotations

import torch

#: Alignment of each tensor's start, as in PyTorch's own allocations. With another alignment, kernels may
#: round differently than for separate tensors.
ALIGN_BYTES = 64


def compute_element_offsets_and_count(tensors: list[torch.Tensor]) -> tuple[list[int], int]:
    """Return each tensor's first index in the flat tensor, and the flat tensor's length.

    Both are in elements.
    """
    starts, end = [], 0
    for tensor in tensors:
        align = max(1, ALIGN_BYTES // tensor.element_size())
        starts.append(end)
        end = -(-(end + tensor.numel()) // align) * align
    return starts, end


def view_part_of_flat_tensor(
    tensor_like: torch.Tensor, flat_tensor: torch.Tensor, first_element: int
) -> torch.Tensor:
    """Return a view of a part of a flat tensor. The view has the shape and strides of `tensor_like`.

    Args:
        tensor_like: Tensor that has the shape and strides.
        flat_tensor: Flat tensor.
        first_element: Index in the flat tensor where the part begins.
    """
    dense = (
        tensor_like.numel() == 0
        or 1
        + sum(
            (size - 1) * stride
            for size, stride in zip(tensor_like.shape, tensor_like.stride(), strict=True)
        )
        == tensor_like.numel()
    )
    if not dense:
        raise ValueError(
            f"a tensor of shape {list(tensor_like.shape)} has gaps in memory; make it contiguous"
        )
    return torch.as_strided(flat_tensor, tensor_like.shape, tensor_like.stride(), first_element)


def copy_into_flat_tensor(
    source: torch.Tensor, flat_tensor: torch.Tensor, first_element: int
) -> torch.Tensor:
    """Copy a tensor into a flat tensor. Return the view of the copy, which has the tensor's shape.

    Args:
        source: Tensor to copy.
        flat_tensor: Flat tensor.
        first_element: Index in the flat tensor where the part begins.
    """
    view = view_part_of_flat_tensor(source, flat_tensor, first_element)
    view.copy_(source)
    return view


def get_tensor_bytes(tensor: torch.Tensor) -> memoryview:
    """Return the bytes of a contiguous CPU tensor of any dtype, writable, without a copy."""
    return memoryview(tensor.view(torch.uint8).numpy())
