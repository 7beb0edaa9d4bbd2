"""The hand-off between the parts, through Redis."""
