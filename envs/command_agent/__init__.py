"""An agent that is a command line, and what scores it."""
