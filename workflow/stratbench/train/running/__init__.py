"""Runs a cell's processes: the runner for workers that start and end together (a gang), and totals."""
