"""Advantages, losses and corrections, each with its source."""
