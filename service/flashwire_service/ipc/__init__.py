"""Frames and memory between the service's processes."""
