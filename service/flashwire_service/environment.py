"""Environments of children: how many threads their libraries may start, and how they wait."""

from __future__ import annotations

import contextlib
import os

from flashwire_service.settings import Settings

FRONT_ENVIRONMENT = {
    "OPENBLAS_NUM_THREADS": "1",  # numpy would start a pool it never uses
    "MALLOC_TRIM_THRESHOLD_": "131072",  # glibc's own value, which it raises unless it is given
}


def worker_environment(settings: Settings) -> dict[str, str]:
    """Thread counts and wait policy, which OpenMP and MKL read once, when torch is loaded.

    Passive: an idle thread that spins would steal a core from the front ends. The caches are those
    of compiled matrix products in half precision, which checks use: about a megabyte for each shape
    that anybody sends, and 1024 of them if not told otherwise.
    """
    threads = str(worker_threads(settings))
    return {
        "OMP_NUM_THREADS": threads,
        "MKL_NUM_THREADS": threads,
        "OMP_WAIT_POLICY": "PASSIVE",
        "KMP_BLOCKTIME": "0",
        "ONEDNN_PRIMITIVE_CACHE_CAPACITY": "16",
        "LRU_CACHE_CAPACITY": "16",  # ideep's, on top of oneDNN's own
    }


def worker_threads(settings: Settings) -> int:
    """As set, else the worker's share of the cores that this process may use."""
    return settings.threads or max(1, usable_cores() // settings.workers)


def usable_cores() -> int:
    """Cores that this process may use: its affinity, and its container's quota."""
    cores = len(os.sched_getaffinity(0))
    with contextlib.suppress(OSError, ValueError):  # no cgroup v2, or "max": no quota
        with open("/sys/fs/cgroup/cpu.max") as quota_file:
            quota, period = map(int, quota_file.read().split())
        cores = min(cores, max(1, quota // period))
    return cores
