"""Where a run's numbers, settings and episodes go beside its own folder."""
