"""The study on SLURM: nodes, live jobs, and jobs that are stuck."""
