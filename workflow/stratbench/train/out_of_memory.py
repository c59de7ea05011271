"""Detects out-of-memory errors, in exceptions and logs. The launcher uses this module without torch."""

from __future__ import annotations

import errno

#: Parts of out-of-memory messages of the host's and CUDA's allocators, the driver, NCCL, cuBLAS and cuDNN.
SIGNS = (
    "allocate memory", "out of memory", "not enough memory", "ALLOC_FAILED", "ALLOCATION_FAILED",
    "bad_alloc", "Failed to CUDA calloc", "Failed to CUDA malloc", "Failed to CUDA host alloc",
)  # fmt: skip
#: Further parts of out-of-memory messages in the output of a program: of Python and NumPy.
_IN_LOGS = ("MemoryError", "Unable to allocate")


def find_out_of_memory_line(lines: list[str]) -> str | None:
    """Return the last line of a log that reports a lack of memory. None without such a line."""
    matching = (x for x in reversed(lines) if any(sign in x for sign in (*SIGNS, *_IN_LOGS)))
    return next(matching, None)


def is_out_of_memory_error(e: BaseException) -> bool:
    """Return whether an exception means that the device or the host had no memory left."""
    import torch

    if isinstance(e, (MemoryError, torch.OutOfMemoryError)):
        return True
    if isinstance(e, OSError):
        return e.errno == errno.ENOMEM
    if not isinstance(e, RuntimeError):
        return False
    if any(sign in str(e) for sign in SIGNS):
        return True
    # cuDNN has this message for several causes. One is that no engine got memory for its workspace
    # (pytorch#108645).
    return "was unable to find an engine to execute" in str(e) and _is_gpu_full()


def _is_gpu_full() -> bool:
    """Return whether PyTorch's allocator has failed or the GPU's memory is almost full.

    Memory is almost full if less than a tenth is free. The allocator's cached memory counts as free.
    """
    import torch

    if not torch.cuda.is_initialized():
        return False
    try:
        free_bytes, total_bytes = torch.cuda.mem_get_info()
    except RuntimeError:  # torch raises this if CUDA does not work
        return False
    cached_bytes = torch.cuda.memory_reserved() - torch.cuda.memory_allocated()
    refused = torch.cuda.memory_stats().get("num_ooms", 0)
    return refused > 0 or free_bytes + cached_bytes < total_bytes / 10
