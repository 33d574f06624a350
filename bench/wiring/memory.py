"""What a service's processes hold together, as proportional set size: a page that two of them map
counts half in each, so that what they share counts once.
"""

from __future__ import annotations

import re
import threading
from collections.abc import Callable, Sequence
from pathlib import Path

_PSS = re.compile(r"^Pss:\s+(\d+) kB", re.MULTILINE)
_EVERY_S = 0.002


def held(pids: Sequence[int]) -> int:
    """Bytes, of all of them."""
    found = 0
    for pid in pids:
        pss = _PSS.search(Path(f"/proc/{pid}/smaps_rollup").read_text())
        found += 1024 * int(pss[1]) if pss else 0
    return found


def peak(pids: Sequence[int], work: Callable[[], object]) -> int:
    """The most that is seen while `work` runs. Looking is slow: repeat the work in it."""
    most, done = 0, threading.Event()

    def look() -> None:
        nonlocal most
        while not done.wait(_EVERY_S):
            most = max(most, held(pids))

    looking = threading.Thread(target=look)
    looking.start()
    try:
        work()
    finally:
        done.set()
        looking.join()
    return most
