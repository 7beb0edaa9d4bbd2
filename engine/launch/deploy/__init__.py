"""A run on machines that others manage: placement under Slurm, descriptions for clusters."""
