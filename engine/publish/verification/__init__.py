"""Proof that a server holds the weights that were published."""
