"""Measurements around the training: clocks, memory, counters, provenance.

Nothing is imported here: `sampler`, `timeline`, `nvml` and `hardware` must stay importable without torch.
"""
