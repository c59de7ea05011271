"""The machine of a run: its hardware, its environment, and who else uses it."""
