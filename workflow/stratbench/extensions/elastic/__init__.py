"""The extension `elastic`: workers that join and leave during the training."""

from __future__ import annotations

from stratbench.cell.extensions import Extension

EXTENSION = Extension(
    summary="workers that come and go",
    required_extensions=("checkpoints", "servers"),
    keys={
        "experiment": "stratbench.extensions.elastic.keys:Elastic",
        "cluster": "stratbench.extensions.elastic.keys:ElasticCluster",
    },
    rule_files=("elastic.smk",),
    build_job_request="stratbench.extensions.elastic.request:request_workers",
    runner_class="stratbench.extensions.elastic.runner:ElasticRunner",
    report_additions="stratbench.extensions.elastic.evidence:READING",
    columns="stratbench.extensions.elastic.columns:COLUMNS",
)
