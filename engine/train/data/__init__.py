"""Groups of episodes to samples, and samples to packed rows."""
