"""Attention as a compute endpoint: the client."""
