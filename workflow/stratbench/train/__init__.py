"""Trains a cell: launches its processes, times the training, and classifies how the cell ended."""
