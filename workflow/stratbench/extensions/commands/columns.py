"""The columns of cells.csv on the user's own trainers."""

from __future__ import annotations

# fmt: off
#: The arguments of `analysis.records.columns.Column`.
COLUMNS = (
    ("same_work", "text", "", None,
           "Of a cell that a command of the user's trained: whether its samples, batch, parameters and "
           "score are those of the cells beside it; if not, why. Empty for others, which share one loop."),
    ("command_workers", "number", "", "program.self_reported.workers"),
    ("command_batch", "number", "samples", "program.self_reported.batch"),
    ("command_cpu_time_s", "number", "s", "program.external.cpu_time_s"),
    ("command_rss_bytes", "number", "bytes", "program.external.node_rss_bytes"),
    ("command_gpu_bytes", "number", "bytes", "program.external.gpu_bytes"),
)
# fmt: on
