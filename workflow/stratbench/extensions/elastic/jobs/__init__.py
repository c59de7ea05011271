"""How elastic workers come to be: jobs of a SLURM cluster, or processes of this machine."""
