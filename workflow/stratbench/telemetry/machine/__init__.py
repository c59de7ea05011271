"""The machine of a run: its hardware, its environment, and foreign processes."""
