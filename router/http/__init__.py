"""Bytes to exchange and back: limits, compression, the OpenAPI document."""
