"""What happens beside the training of a worker: what all of it has, and the profiler's trace."""
