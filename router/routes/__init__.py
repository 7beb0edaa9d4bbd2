"""Which URL does what: turns, runner, admin, upstream models."""
