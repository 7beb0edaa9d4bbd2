"""What each trainer rank does of a publish: it sends a share of the weights."""
