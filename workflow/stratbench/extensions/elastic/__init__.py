"""The extension `elastic`: workers that join and leave during the training."""

from __future__ import annotations

from stratbench.cell.extensions import Extension

EXTENSION = Extension(
    says="workers that come and go",
    needs=("checkpoints", "servers"),
    keys={
        "experiment": "stratbench.extensions.elastic.keys:Elastic",
        "cluster": "stratbench.extensions.elastic.keys:ElasticCluster",
    },
    rules=("elastic.smk",),
    request="stratbench.extensions.elastic.request:request_workers",
    runner="stratbench.extensions.elastic.runner:ElasticRunner",
    reading="stratbench.extensions.elastic.evidence:READING",
    columns="stratbench.extensions.elastic.columns:COLUMNS",
)
