"""Follows a study's jobs on SLURM: reads nodes and job states, and explains why jobs wait or fail."""
