"""Commands that look into a run's buffer."""
