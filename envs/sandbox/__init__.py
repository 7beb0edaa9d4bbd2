"""Sandboxes for code that a policy wrote."""
