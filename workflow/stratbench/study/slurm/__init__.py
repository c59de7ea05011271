"""The study on SLURM: nodes, live jobs, jobs that are stuck, and cells that share a job."""
