"""Runs a cell's processes, and sums up their results for the record."""
