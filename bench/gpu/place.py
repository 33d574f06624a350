"""Where checks and clocks run: a GPU or, in a dry run, the CPU with the kernels interpreted."""

from __future__ import annotations

import functools
import platform
import statistics
import subprocess
import sys
import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping
from typing import Any

import numpy as np
import torch
import triton

Run = Callable[[], object]

_CACHE_BYTES = 512 << 20  # more than any L2 cache holds


class Place(ABC):
    """A device and its clock. Times are in milliseconds."""

    dry: bool
    device: torch.device

    @abstractmethod
    def synchronise(self) -> None:
        """Wait for everything. Raises what a kernel that failed has left."""

    @abstractmethod
    def milliseconds(self, run: Run, host_ms: float) -> float:
        """How long the device takes for `run`, nothing of it in the cache; the host takes host_ms
        to ask for it, which does not count.
        """

    @abstractmethod
    def free_bytes(self) -> int:
        """Device memory that can be had."""

    @abstractmethod
    def keep_busy(self) -> None:
        """Give the device something else to do, beside what comes next."""

    @abstractmethod
    def facts(self) -> dict[str, Any]:
        """What the device is called, and what it can do."""

    @abstractmethod
    def start_reading(self) -> Callable[[], dict[str, float | str]]:
        """Read power and clocks while what comes next runs; the result tells them."""


class Gpu(Place):
    """The first CUDA or ROCm device."""

    dry = False

    def __init__(self) -> None:
        self.device = torch.device("cuda", 0)
        self._properties = torch.cuda.get_device_properties(self.device)

    @functools.cached_property
    def _cache(self) -> torch.Tensor:
        return torch.empty(_CACHE_BYTES, dtype=torch.int8, device=self.device)

    @functools.cached_property
    def _beside(self) -> torch.cuda.Stream:
        return torch.cuda.Stream(self.device)

    @functools.cached_property
    def _factor(self) -> torch.Tensor:
        return torch.ones((2048, 2048), dtype=torch.bfloat16, device=self.device)

    def synchronise(self) -> None:
        torch.cuda.synchronize(self.device)

    def milliseconds(self, run: Run, host_ms: float) -> float:
        start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        self._cache.zero_()
        # The device waits until the host has asked for everything, so that gaps do not count.
        torch.cuda._sleep(int(1e6 * min(20.0, 0.2 + 3 * host_ms)))
        start.record()
        run()
        end.record()
        end.synchronize()
        return float(start.elapsed_time(end))

    def free_bytes(self) -> int:
        torch.cuda.empty_cache()
        return int(torch.cuda.mem_get_info(self.device)[0])

    def keep_busy(self) -> None:
        with torch.cuda.stream(self._beside):
            for _ in range(16):
                torch.mm(self._factor, self._factor)

    def facts(self) -> dict[str, Any]:
        properties = self._properties
        return {
            "device": properties.name,
            "capability": list(torch.cuda.get_device_capability(self.device)),
            "processors": properties.multi_processor_count,
            "memory_bytes": properties.total_memory,
            "cuda": torch.version.cuda,
            "hip": torch.version.hip,
            "driver": self._smi("driver_version")().get("driver_version"),
        }

    def start_reading(self) -> Callable[[], dict[str, float | str]]:
        return self._smi("power.draw,power.limit,clocks.sm,clocks.mem,temperature.gpu")

    def _smi(self, query: str) -> Callable[[], dict[str, float | str]]:
        """Ask nvidia-smi, and collect what it says; nothing where there is none."""
        which = ["-i", f"GPU-{self._properties.uuid}"]
        command = ["nvidia-smi", *which, f"--query-gpu={query}", "--format=csv,noheader,nounits"]
        try:
            asked = subprocess.Popen(
                command, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True
            )
        except OSError:
            return dict

        def collect() -> dict[str, float | str]:
            words = asked.communicate()[0].strip().split(", ")
            if asked.returncode:
                return {}
            return {name: _number(w) for name, w in zip(query.split(","), words, strict=True)}

        return collect


class Host(Place):
    """The CPU, for a dry run. Its times mean nothing."""

    dry = True

    def __init__(self) -> None:
        self.device = torch.device("cpu")

    def synchronise(self) -> None:
        """Nothing is ever under way."""

    def milliseconds(self, run: Run, host_ms: float) -> float:
        start = time.perf_counter()
        run()
        return 1e3 * (time.perf_counter() - start)

    def free_bytes(self) -> int:
        return 1 << 30

    def keep_busy(self) -> None:
        """There is no stream beside."""

    def facts(self) -> dict[str, Any]:
        return {"device": f"{platform.machine()}, interpreted", "dry_run": True}

    def start_reading(self) -> Callable[[], dict[str, float | str]]:
        return dict


def versions() -> dict[str, str]:
    """Of what everything depends on."""
    return {
        "python": sys.version.split()[0],
        "torch": torch.__version__,
        "triton": triton.__version__,
        "numpy": np.__version__,
    }


def interleaved(place: Place, runs: Mapping[str, Run], seconds: float) -> dict[str, list[float]]:
    """Milliseconds of each, in rounds of one after the other, for about `seconds` in all: what
    else changes on the device falls on all alike.
    """
    host = {name: _host_milliseconds(place, run) for name, run in runs.items()}
    once = sum(place.milliseconds(run, host[name]) + host[name] for name, run in runs.items())
    rounds = 1 if place.dry else max(5, min(50, int(1e3 * seconds / once)))
    times: dict[str, list[float]] = {name: [] for name in runs}
    for _ in range(rounds):
        for name, run in runs.items():
            times[name].append(place.milliseconds(run, host[name]))
    return times


def ratio(some: list[float], others: list[float]) -> float:
    """The median of others / some, round by round."""
    return statistics.median(b / a for a, b in zip(some, others, strict=True))


def _host_milliseconds(place: Place, run: Run) -> float:
    """How long the host takes to ask for a run that has run before."""
    run()
    place.synchronise()
    start = time.perf_counter()
    run()
    taken = time.perf_counter() - start
    place.synchronise()
    return 1e3 * taken


def _number(word: str) -> float | str:
    try:
        return float(word)
    except ValueError:
        return word
