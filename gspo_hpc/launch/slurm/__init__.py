"""A run as a Slurm job: submitted, supervised from within, requeued."""
