"""Activities of a worker besides its training: their interface, and the profiler."""
