"""Connections, keys and scripts."""
