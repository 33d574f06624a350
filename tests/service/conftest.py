"""What several tests of the service need."""

from __future__ import annotations

import contextlib
import resource
from collections.abc import Callable, Iterator

import pytest

Starved = Callable[[], contextlib.AbstractContextManager[None]]


@contextlib.contextmanager
def _without_descriptors() -> Iterator[None]:
    before = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (3, before[1]))  # 0, 1 and 2 are taken
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, before)


@pytest.fixture
def starved() -> Starved:
    """`with starved():` this process gets no new file descriptor; those it has go on."""
    return _without_descriptors
