"""The extension `splitting`: strategies with tensor and pipeline parallelism."""

from __future__ import annotations

from stratbench.cell.extensions import Extension

EXTENSION = Extension(
    summary="tensor and pipeline parallelism",
    strategies={
        "tensor": "stratbench.extensions.splitting.tensor:TensorParallel",
        "pipeline": "stratbench.extensions.splitting.pipeline:Pipeline",
    },
)
