"""The run's other router processes, reached over Redis."""
