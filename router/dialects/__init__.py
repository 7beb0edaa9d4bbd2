"""Wire formats of OpenAI and Anthropic, decoded to a turn request and encoded from its result."""
