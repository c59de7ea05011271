"""Defines a cell (one training run of a study): coordinates, paths, settings, record, and run folder."""
