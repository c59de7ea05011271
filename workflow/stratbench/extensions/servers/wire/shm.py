"""Memory that a worker shares with the servers on its host, for weights, gradients and buffers.

The memory is an anonymous file (memfd). It has no name, so that no file is left when a process is killed.
Only a process that has got its descriptor over the authenticated local socket can map it. The file is sealed
against shrinking, so that a faulty worker cannot crash the server by truncating it.
"""

from __future__ import annotations

import fcntl
import mmap
import os
from dataclasses import dataclass

import torch

DTYPES = {
    "float64": torch.float64,
    "float32": torch.float32,
    "bfloat16": torch.bfloat16,
    "float16": torch.float16,
}


def get_dtype_name(dtype: torch.dtype) -> str:
    """Return the name that a floating dtype has in the protocol.

    Raises:
        ValueError: If the protocol does not support the dtype.
    """
    for name, known in DTYPES.items():
        if known is dtype:
            return name
    raise ValueError(f"dtype {dtype} is not supported by servers; use one of {', '.join(DTYPES)}")


@dataclass(frozen=True)
class Layout:
    """Sizes and dtypes of a worker's flat tensors, which are the same for all workers of a run."""

    numel: int  # number of elements of the flat parameters, with padding
    dtype: str
    buffer_numel: int
    buffer_dtype: str
    fingerprint: str  # hash of the names, shapes, strides and offsets of all tensors

    def __post_init__(self) -> None:
        if self.dtype not in DTYPES or self.buffer_dtype not in DTYPES:
            raise ValueError(f"{self} has an unknown dtype; known: {', '.join(DTYPES)}")
        if not (type(self.numel) is type(self.buffer_numel) is int):
            raise ValueError(f"{self} has a number of elements that is no whole number")
        if self.numel < 1 or self.buffer_numel < 0:
            raise ValueError(f"{self} has no parameters, or a negative number of elements")

    @property
    def weight_bytes(self) -> int:
        """Bytes of the flat parameters. The flat gradients have the same size."""
        return self.numel * DTYPES[self.dtype].itemsize

    @property
    def buffer_bytes(self) -> int:
        """Bytes of the flat float buffers."""
        return self.buffer_numel * DTYPES[self.buffer_dtype].itemsize


@dataclass(frozen=True)
class FlatTensors:
    """A model's parameters and gradients as flat tensors [numel], and its float buffers [buffer_numel]."""

    weights: torch.Tensor
    grads: torch.Tensor
    buffers: torch.Tensor
    #: File descriptor of the tensors' shared memory. None: the memory is not shared.
    shared_memory_descriptor: int | None = None


def _align_to_pages(n_bytes: int) -> int:
    return -(-n_bytes // mmap.PAGESIZE) * mmap.PAGESIZE


def _count_total_bytes(layout: Layout) -> int:
    return 2 * _align_to_pages(layout.weight_bytes) + _align_to_pages(max(layout.buffer_bytes, 1))


def _view_as_tensors(memory: mmap.mmap, layout: Layout, descriptor: int | None) -> FlatTensors:
    dtype, buffer_dtype = DTYPES[layout.dtype], DTYPES[layout.buffer_dtype]
    stride = _align_to_pages(layout.weight_bytes)
    if layout.buffer_numel:
        buffers = torch.frombuffer(
            memory, dtype=buffer_dtype, count=layout.buffer_numel, offset=2 * stride
        )
    else:
        buffers = torch.empty(0, dtype=buffer_dtype)
    return FlatTensors(
        torch.frombuffer(memory, dtype=dtype, count=layout.numel, offset=0),
        torch.frombuffer(memory, dtype=dtype, count=layout.numel, offset=stride),
        buffers,
        descriptor,
    )


def allocate_flat_tensors(layout: Layout, shared: bool) -> FlatTensors:
    """Allocate flat tensors for a model's parameters, gradients and buffers, filled with zeros.

    Each tensor begins on a page of its own, so that pinning one does not affect the others.

    Args:
        layout: Sizes and dtypes.
        shared: Whether to use a sealed anonymous file, if the system supports it.
    """
    if not (shared and hasattr(os, "memfd_create")):
        return _view_as_tensors(mmap.mmap(-1, _count_total_bytes(layout)), layout, None)
    descriptor = os.memfd_create("stratbench-ps", os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
    os.ftruncate(descriptor, _count_total_bytes(layout))
    seals = fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_GROW | fcntl.F_SEAL_SEAL
    fcntl.fcntl(descriptor, fcntl.F_ADD_SEALS, seals)
    return _view_as_tensors(mmap.mmap(descriptor, _count_total_bytes(layout)), layout, descriptor)


def attach_flat_tensors(descriptor: int, layout: Layout) -> FlatTensors:
    """Return the flat tensors in the memory that a worker shares, and close its descriptor.

    Args:
        descriptor: File descriptor from the worker.
        layout: Sizes and dtypes of the worker's flat tensors.

    Raises:
        ValueError: If the file is not one that `allocate_flat_tensors` has created for this layout.
    """
    try:
        try:
            sealed = fcntl.fcntl(descriptor, fcntl.F_GET_SEALS) & fcntl.F_SEAL_SHRINK
        except OSError:
            sealed = 0
        if not sealed:
            raise ValueError(
                "the worker's shared memory is not sealed and could therefore be truncated"
            )
        size_bytes = os.fstat(descriptor).st_size
        if size_bytes != _count_total_bytes(layout):
            raise ValueError(
                f"the worker's shared memory has {size_bytes} bytes, "
                f"expected {_count_total_bytes(layout)}"
            )
        return _view_as_tensors(mmap.mmap(descriptor, size_bytes), layout, None)
    finally:
        os.close(descriptor)
