"""What the kernel tells of a service's processes: memory, descriptors, threads, and who is left."""

from __future__ import annotations

import os
from dataclasses import dataclass
from pathlib import Path

from flashwire_service.front import buffers

_PAGE = os.sysconf("SC_PAGE_SIZE")
_TICKS = os.sysconf("SC_CLK_TCK")
_ROLES = {"flashwire_service.compute.worker": "worker", "flashwire_service.front.server": "front"}
_LAZY_THREADS = 2 + min(32, (os.cpu_count() or 1) + 4)  # of asyncio.to_thread; its own, its log's
_GONE = (FileNotFoundError, ProcessLookupError)


@dataclass(frozen=True, slots=True)
class Use:
    """What a process holds. `rss` in bytes, shared memory included."""

    rss: int
    descriptors: int
    threads: int


@dataclass(frozen=True, slots=True)
class Process:
    """A living process of a service. `role` is "supervisor", "worker", "front" or "other"."""

    pid: int
    role: str
    use: Use


def family(supervisor: int) -> list[Process]:
    """The supervisor and its living children."""
    found = [Process(supervisor, "supervisor", use_of(supervisor))]
    for pid in children(supervisor):
        try:
            found.append(Process(pid, _role(pid), use_of(pid)))
        except _GONE:
            continue
    return found


def children(pid: int) -> list[int]:
    """Dead ones that nobody has buried included."""
    tasks = Path(f"/proc/{pid}/task").iterdir()
    return [int(child) for task in tasks for child in (task / "children").read_text().split()]


def use_of(pid: int) -> Use:
    proc = Path(f"/proc/{pid}")
    return Use(
        rss=int((proc / "statm").read_text().split()[1]) * _PAGE,
        descriptors=_descriptors(proc / "fd"),
        threads=len(os.listdir(proc / "task")),
    )


def address_space(pid: int) -> int:
    """Bytes mapped: what RLIMIT_AS counts."""
    return int(Path(f"/proc/{pid}/statm").read_text().split()[0]) * _PAGE


def cpu_seconds(pid: int) -> float:
    """What all threads of a process have used of the processor."""
    fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    return (int(fields[11]) + int(fields[12])) / _TICKS


def _descriptors(folder: Path) -> int:
    """How many are open. A front end keeps some of bodies for the next ones: of those what is
    beyond their bound.
    """
    targets = []
    for entry in folder.iterdir():
        try:
            targets.append(os.readlink(entry))
        except FileNotFoundError:  # closed in the meantime
            continue
    kept = sum(target.startswith(f"/memfd:{buffers.NAME}") for target in targets)
    return len(targets) - min(kept, 2 * buffers.MOST)


def most(processes: list[Process]) -> dict[str, Use]:
    """By role, the most that one process of it holds."""
    found: dict[str, Use] = {}
    for p in processes:
        known = found.get(p.role, Use(0, 0, 0))
        found[p.role] = Use(
            max(known.rss, p.use.rss),
            max(known.descriptors, p.use.descriptors),
            max(known.threads, p.use.threads),
        )
    return found


def added(role: str, before: Use, after: Use) -> list[str]:
    """Descriptors and threads that a process has and had not. A front end's event loop starts the
    threads it may have as they are needed.
    """
    threads = max(before.threads, _LAZY_THREADS if role == "front" else 0)
    found = []
    if after.descriptors > before.descriptors:
        found.append(f"{role}: {before.descriptors} descriptors became {after.descriptors}")
    if after.threads > threads:
        found.append(f"{role}: {before.threads} threads became {after.threads}")
    return found


def of_session(session: int) -> list[int]:
    """Processes of a session: what a service that has ended left behind."""
    found = []
    for entry in Path("/proc").iterdir():
        if not entry.name.isdigit():
            continue
        try:
            # The fields behind the name, which may hold spaces and brackets.
            fields = (entry / "stat").read_text().rpartition(")")[2].split()
        except _GONE:
            continue
        if int(fields[3]) == session and fields[0] != "Z":
            found.append(int(entry.name))
    return found


def shared_memory() -> set[str]:
    """The names in /dev/shm, but for the semaphores of Python's multiprocessing: the judge's."""
    return {name for name in os.listdir("/dev/shm") if not name.startswith("sem.mp-")}  # noqa: S108


def _role(pid: int) -> str:
    arguments = Path(f"/proc/{pid}/cmdline").read_bytes().decode(errors="replace").split("\0")
    return next((role for module, role in _ROLES.items() if module in arguments), "other")
