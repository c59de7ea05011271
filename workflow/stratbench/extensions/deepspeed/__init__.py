"""The extension `deepspeed`: DeepSpeed as an engine."""

from __future__ import annotations

from stratbench.cell.extensions import Extension

EXTENSION = Extension(
    says="DeepSpeed as an engine",
    strategies={
        "deepspeed": "stratbench.extensions.deepspeed.strategy:DeepSpeed",
    },
)
