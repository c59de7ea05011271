"""A cell: its coordinates and paths, its settings, its record, and its processes' folder."""
