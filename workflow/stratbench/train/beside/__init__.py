"""Activities next to a worker's training: their interface, and the profiler's trace."""
