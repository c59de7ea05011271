"""A model's parameters, gradients and float buffers as views of three flat tensors."""

from __future__ import annotations

import hashlib
import json
import mmap
from collections.abc import Callable

import torch
from torch import nn

from stratbench.extensions.servers.wire.shm import (
    FlatTensors,
    Layout,
    allocate_flat_tensors,
    get_dtype_name,
)
from stratbench.workload.flat import (
    compute_element_offsets_and_count,
    copy_into_flat_tensor,
    view_part_of_flat_tensor,
)

#: First element and end of each shard in the flat tensor.
ShardBounds = list[tuple[int, int]]


def cut_into_shards(numel: int, shard_numel: int) -> ShardBounds:
    """Return the bounds of the shards of a flat tensor with `numel` elements.

    All shards but the last have `shard_numel` elements.
    """
    return [(start, min(start + shard_numel, numel)) for start in range(0, numel, shard_numel)]


def _get_common_dtype(
    named_tensors: list[tuple[str, torch.Tensor]], plural_noun: str
) -> torch.dtype:
    dtypes = {tensor.dtype for _, tensor in named_tensors}
    if len(dtypes) > 1:
        names = ", ".join(sorted(map(str, dtypes)))
        raise ValueError(
            f"the model's {plural_noun} have several dtypes ({names}); use one dtype for all of them"
        )
    return dtypes.pop() if dtypes else torch.float32


class FlatSpace:
    """Moves a model's trainable parameters, gradients and float buffers into flat tensors.

    After construction every `p.data`, `p.grad` and float buffer is a view of `weights`, `grads` or
    `buffers`. These have the shapes [numel], [numel] and [buffer_numel], and the model's own dtype. Padding
    between tensors is always zero. Use `zero_grads()` instead of `zero_grad()`, which would drop the
    views. Buffers of other dtypes (`num_batches_tracked`) and frozen parameters stay where they
    are: evaluation does not read the former, and nobody changes the latter.

    On a CUDA model `host` mirrors the three in pinned memory; on a CPU it is the same tensors.
    `shared` puts `host` in memory that a server on this host can map. `allocate_flat_tensors` makes `host`.
    """

    def __init__(
        self,
        model: nn.Module,
        shared: bool = True,
        allocate: Callable[[Layout, bool], FlatTensors] = allocate_flat_tensors,
    ) -> None:
        named = [(n, p) for n, p in model.named_parameters() if p.requires_grad]
        named_buffers = [(n, b) for n, b in model.named_buffers() if b.is_floating_point()]
        if not named:
            raise ValueError("the model has no trainable parameters")
        self.parameters = [p for _, p in named]
        buffers = [b for _, b in named_buffers]
        self.starts, numel = compute_element_offsets_and_count(self.parameters)
        buffer_starts, buffer_numel = compute_element_offsets_and_count(buffers)
        described = [
            (name, list(t.shape), list(t.stride()), start)
            for (name, t), start in zip(
                named + named_buffers, self.starts + buffer_starts, strict=True
            )
        ]
        self.layout = Layout(
            numel,
            get_dtype_name(_get_common_dtype(named, "parameters")),
            buffer_numel,
            get_dtype_name(_get_common_dtype(named_buffers, "float buffers")),
            hashlib.sha256(json.dumps(described).encode()).hexdigest(),
        )
        self.device = self.parameters[0].device
        self.host: FlatTensors = allocate(self.layout, shared)
        self._allocate_device_tensors()
        for parameter, start in zip(self.parameters, self.starts, strict=True):
            parameter.data = copy_into_flat_tensor(parameter.data, self.weights, start)
            parameter.grad = view_part_of_flat_tensor(parameter, self.grads, start)
        for buffer, start in zip(buffers, buffer_starts, strict=True):
            buffer.data = copy_into_flat_tensor(buffer.data, self.buffers, start)
        self._grads = [p.grad for p in self.parameters]

    @property
    def has_host_copies(self) -> bool:
        """Whether `host` has copies of the tensors, because the model is on a GPU."""
        return self.weights is not self.host.weights

    def _allocate_device_tensors(self) -> None:
        host = self.host
        if self.device.type == "cpu":
            self.weights, self.grads, self.buffers = host.weights, host.grads, host.buffers
            return
        for tensor in (host.weights, host.grads, host.buffers):
            if tensor.numel():
                _pin_memory(tensor)
        self.weights = torch.zeros_like(host.weights, device=self.device)
        self.grads = torch.zeros_like(host.grads, device=self.device)
        self.buffers = torch.zeros_like(host.buffers, device=self.device)

    def zero_grads(self) -> None:
        """Set all gradients to zero in place. Call this method before the backward of a step."""
        self.grads.zero_()

    def check_gradient_views(self) -> None:
        """Raise RuntimeError if a gradient is no longer a view of `grads`."""
        for parameter, grad in zip(self.parameters, self._grads, strict=True):
            if parameter.grad is not grad:
                raise RuntimeError(
                    "a parameter's gradient was replaced; call FlatSpace.zero_grads() instead of zero_grad()"
                )

    def load_tensors(self, weights: torch.Tensor, buffers: torch.Tensor) -> None:
        """Copy flat tensors, such as a snapshot's, to the model's parameters and float buffers."""
        self.weights.copy_(weights)
        self.buffers.copy_(buffers)


def make_host_scalar(device: torch.device, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    """Return a host tensor of shape [1], to which `device` can copy asynchronously."""
    scalar = torch.frombuffer(mmap.mmap(-1, mmap.PAGESIZE), dtype=dtype, count=1)
    if device.type == "cuda":
        _pin_memory(scalar)
    return scalar


def _pin_memory(tensor: torch.Tensor) -> None:
    """Page-lock memory that torch did not allocate, so that copies to the device are asynchronous.

    Complete pages are locked, and a page can be locked once. So the memory must be mapped, not taken from the
    heap, where two tensors may share a page.
    """
    cudart = torch.cuda.cudart()
    status = cudart.cudaHostRegister(tensor.data_ptr(), tensor.nbytes, 0)
    if int(status) != 0:
        # If the host has no memory left for page-locking, the reason is "out of memory".
        reason = cudart.cudaGetErrorString(status)
        raise RuntimeError(f"cudaHostRegister refused to pin {tensor.nbytes} bytes: {reason}")
