"""Starts and supervises elastic workers: jobs of a SLURM cluster, or processes of this machine."""
