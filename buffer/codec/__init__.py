"""Records as bytes."""
