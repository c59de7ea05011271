"""The extension `splitting`: tensor and pipeline parallelism."""

from __future__ import annotations

from stratbench.cell.extensions import Extension

EXTENSION = Extension(
    says="tensor and pipeline parallelism",
    strategies={
        "tensor": "stratbench.strategies.splitting.tensor:TensorParallel",
        "pipeline": "stratbench.strategies.splitting.pipeline:Pipeline",
    },
)
