"""Step times on counts of workers that nobody has, with their intervals, from counts that were measured."""
