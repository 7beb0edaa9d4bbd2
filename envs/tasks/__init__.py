"""The tasks of a run: files, splits and conversations."""
