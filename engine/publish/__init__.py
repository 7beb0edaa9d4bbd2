"""A policy version from the trainer to every server, as a transaction."""
