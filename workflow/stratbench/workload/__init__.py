"""The workload of a cell: models, data sets and their precision."""
