"""One optimizer update, and the logprobs that it needs."""
