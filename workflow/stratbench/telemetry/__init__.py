"""Measures around the training: clocks, memory, counters and provenance.

Nothing is imported here: `sampler`, `timeline`, `nvml` and `hardware` must stay importable without torch.
"""
