"""Several nodes: a program started on each of them, and how their workers find each other."""
