"""Checkpoints, and the attempts of a cell that goes on from them after it was ended before its time."""
