"""The rollout function, the episode that it plays, and the result."""
