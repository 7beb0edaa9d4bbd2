"""How a bucket reaches a server."""
