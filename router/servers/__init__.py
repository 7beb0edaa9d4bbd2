"""The inference servers: which one gets a turn, and how it is asked to generate."""
