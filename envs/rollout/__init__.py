"""A rollout function, the episode it plays, and the result."""
