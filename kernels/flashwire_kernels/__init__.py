"""Exact attention, forward and backward, as a library."""
