"""Computes the temporary memory that a sum on CUDA needs in addition to its result.

PyTorch divides few sums of many numbers, as in the gradient of a bias, over several blocks of threads.
These blocks write their partial sums to a buffer. The module does not import torch.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Iterable, Sequence
from dataclasses import dataclass

#: Threads per block of PyTorch's reduction kernel, and threads per warp.
BLOCK_THREADS, WARP = 512, 32
#: Minimum and maximum number of terms per thread, if PyTorch divides a sum over blocks of threads.
MIN_NUMBERS, MAX_NUMBERS = 16, 256
#: Bytes of each counter of finished thread blocks, which follow the partial sums in the buffer.
COUNTER_BYTES = 4
#: Stride and size of a dimension of a tensor.
StrideAndSize = tuple[int, int]


@dataclass(frozen=True)
class Reduction:
    """A reduction on CUDA: `outputs` sums of `inputs` numbers each.

    Numbers that are neighbours in memory belong to different sums. Sums along neighbours are left out, since
    their buffers are tiny.

    Attributes:
        sums_per_thread: Sums that a thread computes at once: 1, 2 or 4.
        partial_sum_bytes: Bytes of a partial sum.
    """

    outputs: int
    inputs: int
    sums_per_thread: int
    partial_sum_bytes: int

    @classmethod
    def from_tensor_layout(
        cls,
        shape: Sequence[int],
        strides: Sequence[int],
        dims: Collection[int],
        offset: int,
        item_bytes: int,
    ) -> Reduction | None:
        """Return a tensor's reduction over `dims`, or None if neighbours are added up.

        Neighbours are numbers that are contiguous in memory. 16-bit numbers are added up in 32 bits.

        Args:
            shape: Shape of the tensor.
            strides: Strides, in numbers.
            dims: Dimensions to sum over, counted from 0.
            offset: Offset of the tensor in its storage, in numbers.
            item_bytes: Bytes of a number.
        """
        dims_of = [(strides[d], shape[d], d in dims) for d in range(len(shape)) if shape[d] > 1]
        # PyTorch orders the result's dimensions by their distance in memory. The last dimension is the
        # nearest.
        merged = _merge_contiguous_dimensions(
            (stride, size) for stride, size, is_added in reversed(dims_of) if not is_added
        )
        added = _merge_contiguous_dimensions(
            sorted((stride, size) for stride, size, is_added in dims_of if is_added)
        )
        if not merged or not added or merged[0][0] > added[0][0]:
            return None
        together = 4 if merged[0][0] == 1 else 1
        others = [stride for stride, _ in merged[1:] + added]
        while any(n % together for n in (offset, merged[0][1], *others)):
            together //= 2
        return cls(
            _multiply_dimension_sizes(merged),
            _multiply_dimension_sizes(added),
            together,
            max(4, item_bytes),
        )

    def compute_kernel_buffer_bytes(self, resident_threads: int) -> int:
        """Return the bytes of the buffer and its counters on a GPU.

        The GPU holds `resident_threads` threads at once. The formula is that of PyTorch 2.11 (setReduceConfig
        and global_memory_size, ATen/native/cuda/Reduce.cuh).
        """
        most = BLOCK_THREADS // self.sums_per_thread
        width = min(_round_down_to_power_of_two(self.outputs // self.sums_per_thread, most), WARP)
        height = min(_round_down_to_power_of_two(self.inputs, most), most // width)
        width = min(
            _round_down_to_power_of_two(self.outputs // self.sums_per_thread, most), most // height
        )
        if self.inputs < min(height * MIN_NUMBERS, MAX_NUMBERS):
            return 0  # one warp computes each sum, without a buffer
        each = _divide_rounding_up(self.inputs, height)
        blocks = _divide_rounding_up(self.outputs // self.sums_per_thread, width)
        at_once = resident_threads // (width * height)
        if each < MAX_NUMBERS or blocks > at_once:
            return 0  # one thread block computes each sum, without a buffer
        parts = max(
            min(_divide_rounding_up(at_once, blocks), _divide_rounding_up(each, MIN_NUMBERS)),
            _divide_rounding_up(each, MAX_NUMBERS),
        )
        if parts == 1:
            return 0
        # The buffer is larger than its content, since PyTorch counts the sums of a thread block twice.
        buffer_bytes = self.partial_sum_bytes * self.outputs * parts * width * self.sums_per_thread
        return buffer_bytes + COUNTER_BYTES * blocks


def _merge_contiguous_dimensions(dims: Iterable[StrideAndSize]) -> list[StrideAndSize]:
    """Merge neighbouring dimensions that are contiguous, given as (stride, size) pairs."""
    merged: list[StrideAndSize] = []
    for stride, size in dims:
        if merged and merged[-1][0] * merged[-1][1] == stride:
            merged[-1] = (merged[-1][0], merged[-1][1] * size)
        else:
            merged.append((stride, size))
    return merged


def _multiply_dimension_sizes(dims: list[StrideAndSize]) -> int:
    return math.prod(size for _, size in dims)


def _round_down_to_power_of_two(n: int, maximum: int) -> int:
    """Return the largest power of two that is at most `n`.

    The result is `maximum` if `n` reaches it.
    """
    return maximum if n >= maximum else 1 << (max(n, 1).bit_length() - 1)


def _divide_rounding_up(dividend: int, divisor: int) -> int:
    """Return the quotient of two integers, rounded up."""
    return -(-dividend // divisor)
