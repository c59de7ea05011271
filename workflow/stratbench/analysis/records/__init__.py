"""Reads records as tables: cells.csv and epochs.csv, their columns, and values derived from records."""
