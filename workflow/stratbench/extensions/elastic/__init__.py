"""The extension `elastic`: workers that come and go."""

from __future__ import annotations

from stratbench.cell.extensions import Extension

EXTENSION = Extension(
    says="workers that come and go",
    needs=("checkpoints",),
    keys={"experiment": "stratbench.train.elastic:Elastic"},
    rules=("elastic.smk",),
    runner="stratbench.train.elastic.runner:ElasticRunner",
)
