"""A process whose children the parts are, so that they outlive their launcher."""
