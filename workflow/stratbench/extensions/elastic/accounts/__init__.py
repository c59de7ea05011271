"""Computes a record's entries on elastic workers: their jobs, pauses and GPU-seconds."""
