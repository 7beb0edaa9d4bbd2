"""Messages to token ids, and generated ids back to messages."""
