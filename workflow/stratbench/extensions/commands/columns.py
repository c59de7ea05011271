"""Columns that cells of users' commands add to cells.csv."""

from __future__ import annotations

# fmt: off
#: Columns of cells.csv: name, kind, unit, path in the record, definition (the arguments of `Column`).
COLUMNS = (
    ("same_work", "text", "", None,
           "For a cell that a user's command trained: `yes` if its samples, batch, parameters and score "
           "agree with the cells that it is compared with, else the reason. Empty for all other cells."),
    ("command_workers", "number", "", "program.self_reported.workers"),
    ("command_batch", "number", "samples", "program.self_reported.batch"),
    ("command_cpu_time_s", "number", "s", "program.external.cpu_time_s"),
    ("command_rss_bytes", "number", "bytes", "program.external.node_rss_bytes"),
    ("command_gpu_bytes", "number", "bytes", "program.external.gpu_bytes"),
)
# fmt: on
