"""The order in which tasks are played, and from which source."""
