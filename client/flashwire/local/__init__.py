"""Callers on the same machine: bodies in memory that both sides map, and a packet beside them.

docs/wire.md, "Shared memory", has the same in words.
"""
