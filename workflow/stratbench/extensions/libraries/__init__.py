"""The extension `libraries`: models of transformers and timm, also with LoRA adapters of peft."""

from __future__ import annotations

from stratbench.cell.extensions import Extension

EXTENSION = Extension(
    summary="models of transformers and timm, named in config.yaml",
    libraries={
        "transformers": "stratbench.extensions.libraries.transformers_models:Transformers",
        "timm": "stratbench.extensions.libraries.timm_models:Timm",
    },
)
