"""Computes a record's entries on elastic workers: jobs, pauses, GPU-seconds and history of members."""
