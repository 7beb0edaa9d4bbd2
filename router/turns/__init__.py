"""One turn from request to record."""
