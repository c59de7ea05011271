"""How those who run out of memory say so."""

from __future__ import annotations

#: The allocators of the host and of CUDA, the driver, NCCL, cuBLAS and cuDNN each say it their way.
SIGNS = (
    "allocate memory", "out of memory", "not enough memory", "ALLOC_FAILED", "ALLOCATION_FAILED",
    "bad_alloc", "Failed to CUDA calloc", "Failed to CUDA malloc", "Failed to CUDA host alloc",
)  # fmt: skip
#: Python and NumPy, in the output of a program.
_IN_LOGS = ("MemoryError", "Unable to allocate")


def says_out_of_memory(text: str) -> bool:
    """Whether an error's text means that there was no memory left."""
    return any(sign in text for sign in SIGNS)


def line_out_of_memory(lines: list[str]) -> str | None:
    """The last line of a log that says so; None without one."""
    found = (x for x in reversed(lines) if any(sign in x for sign in (*SIGNS, *_IN_LOGS)))
    return next(found, None)
