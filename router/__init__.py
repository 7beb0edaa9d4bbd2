"""The OpenAI-compatible front: an asynchronous process between agents and inference servers."""
