"""Writes the emitted file: one module per target of `--to`, such as Accelerate, and shared code."""
