"""The extension `deepspeed`: a strategy that trains by DeepSpeed's engine."""

from __future__ import annotations

from stratbench.cell.extensions import Extension

EXTENSION = Extension(
    summary="DeepSpeed as an engine",
    strategies={
        "deepspeed": "stratbench.extensions.deepspeed.strategy:DeepSpeed",
    },
)
