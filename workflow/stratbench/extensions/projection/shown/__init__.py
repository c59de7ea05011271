"""What `projection.csv` says of workers that nobody has: to decisions, and to the report."""
