"""Data sets: sources, prepared arrays, partitions, and batches on the device."""
