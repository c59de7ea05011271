"""Data sets: sources, prepared arrays, and batches on the device."""
