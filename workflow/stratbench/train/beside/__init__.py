"""Activities besides a worker's training, such as checkpoints: their interface, and the profiler's trace."""
