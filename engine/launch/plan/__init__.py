"""Memory, speed and price of a run before it starts: closed forms, each with its source."""
