"""Tasks, the programs that play them, the verifiers that score them."""
