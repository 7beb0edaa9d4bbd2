"""What evaluations found, in the run's folder, and what may be concluded from it."""
