"""`outloop doctor --on`: the same findings on every node of a run, and what exists between them."""
