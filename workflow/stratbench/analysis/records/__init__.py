"""Records as tables: cells.csv and epochs.csv, their columns, and what is derived from them."""
