"""The process that claims tasks and plays episodes."""
