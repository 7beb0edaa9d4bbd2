"""Checkpoints: their format, writing beside training, and what they acknowledge."""
