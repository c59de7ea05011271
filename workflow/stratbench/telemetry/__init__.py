"""Measures what happens while a cell trains: times, memory, counters of the machine, and provenance.

Nothing is imported here: `sampler`, `timeline`, `nvml` and `hardware` must stay importable without torch.
"""
