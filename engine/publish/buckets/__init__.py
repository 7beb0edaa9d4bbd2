"""Tensors packed into buckets of bounded size."""
