"""Tests of compiled kernels: gathered only by who asks for them.

Gathering them imports triton, and tests/kernels must first have it interpret.
"""


def pytest_ignore_collect(collection_path, config):
    wanted = config.getoption("markexpr")
    return True if not wanted or "not gpu" in wanted else None
