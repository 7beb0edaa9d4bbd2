"""Episodes, leases and conversations as Redis holds them."""
