"""Data sets: reads their files, stores them as arrays, and makes batches on the device."""
