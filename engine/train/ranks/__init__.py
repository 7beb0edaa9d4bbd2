"""The processes of the trainer, and what they exchange."""
