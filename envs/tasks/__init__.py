"""The tasks of a run: files, splits, conversations."""
