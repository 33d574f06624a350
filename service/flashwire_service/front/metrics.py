"""What /metrics says: the numbers of all processes together, whichever front end is asked."""

from __future__ import annotations

import platform
from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping
from importlib.metadata import PackageNotFoundError, version
from itertools import accumulate
from pathlib import Path
from typing import Any

from prometheus_client import generate_latest
from prometheus_client.core import (
    CounterMetricFamily,
    GaugeMetricFamily,
    HistogramMetricFamily,
    Metric,
)
from prometheus_client.registry import Collector, CollectorRegistry
from prometheus_client.utils import floatToGoString

from flashwire_service import meter
from flashwire_service.errors import ROWS
from flashwire_service.front.answered import Answered
from flashwire_service.ipc.board import Board
from flashwire_service.meter import Family, Meter
from flashwire_service.settings import Settings

CONTENT_TYPE = "text/plain; version=0.0.4; charset=utf-8"
# Settings that say how much of something there may be, and the metric that says so: in all front
# ends together, as connections and uploads are counted, or in each worker.
_FRONT_LIMITS = {
    "flashwire_connections_limit": ("max_connections", "Connections that are kept."),
    "flashwire_upload_limit_bytes": ("upload_bytes", "Bytes of bodies received at once."),
}
_WORKER_LIMITS = {
    "flashwire_queue_limit_requests": ("queue_requests", "Requests that a worker lets wait."),
    "flashwire_queue_limit_bytes": ("queue_bytes", "Bytes of their bodies."),
    "flashwire_queue_device_limit_bytes": ("queue_device_bytes", "Device memory they may need."),
    "flashwire_residual_limit_bytes": ("residual_bytes", "Bytes of forwards that a worker saves."),
}


class Metrics:
    """What one front end counts, and the metrics of the whole service."""

    def __init__(self, settings: Settings, board: Board | None = None, index: int = 0) -> None:
        """`board` is shared with all other processes; None: there are none."""
        self._settings = settings
        self._board = board or Board.alone(settings.frontends, settings.workers)
        self.meter = Meter(self._board.regions[f"front-{index}"])
        self._levels: list[tuple[Family, Callable[[], float]]] = []
        for code in ROWS:
            self.meter.add(meter.REJECTED, 0, code)

    def watch(self, family: Family, level: Callable[[], float]) -> None:
        """Have a gauge show what `level` returns, as of the last `refresh`."""
        self._levels.append((family, level))

    def refresh(self) -> None:
        """Look at everything watched. To be called now and then."""
        for family, level in self._levels:
            self.meter.set(family, level())

    def answered(self, request: Answered) -> None:
        """A request has been answered."""
        labels = (request.method, request.route, str(request.status), request.code)
        self.meter.observe(meter.REQUEST_DURATION, request.seconds, *labels)
        self.meter.add(meter.RECEIVED, request.received)
        self.meter.add(meter.SENT, request.sent)
        if request.code in ROWS:
            self.rejected(request.code)

    def rejected(self, code: str) -> None:
        """A request has ended in an error of this code."""
        self.meter.add(meter.REJECTED, 1, code)

    def exposition(self, workers: Mapping[int, Mapping[str, Any]]) -> bytes:
        """The text that Prometheus reads. `workers` are the ready ones and what they are."""
        self.refresh()
        registry = CollectorRegistry()
        registry.register(_Families(self._counted()))
        registry.register(_Families(self._looked_up(workers)))
        return generate_latest(registry)

    def _counted(self) -> Iterator[Metric]:
        """What processes have counted, added up."""
        sums: dict[str, dict[tuple[str, ...], list[float]]] = defaultdict(dict)
        for region in self._board.regions.values():
            for (name, *labels), numbers in region.rows():
                row = sums[name].setdefault(tuple(labels), [0.0] * len(numbers))
                row[:] = [a + b for a, b in zip(row, numbers, strict=True)]
        for family in meter.FAMILIES:
            yield _metric(family, sums[family.name])

    def _looked_up(self, workers: Mapping[int, Mapping[str, Any]]) -> Iterator[Metric]:
        """What can be seen, and need not be counted."""
        up = GaugeMetricFamily(
            "flashwire_worker_up", "1 while the worker takes jobs.", labels=["worker"]
        )
        for index in range(self._settings.workers):
            up.add_metric([str(index)], index in workers)
        yield up
        yield _info(
            "flashwire_worker_info",
            "Where a worker that takes jobs computes.",
            *(
                {"worker": str(i), **{k: str(facts.get(k)) for k in ("device", "device_name")}}
                for i, facts in sorted(workers.items())
            ),
            labels=("worker", "device", "device_name"),
        )
        for limits, times in ((_FRONT_LIMITS, self._settings.frontends), (_WORKER_LIMITS, 1)):
            for name, (setting, meaning) in limits.items():
                limit = times * getattr(self._settings, setting)
                yield GaugeMetricFamily(name, meaning, value=limit)
        yield from self._processes()
        versions = {name: _version(name) for name in ("torch", "triton")}
        build = {"version": version("flashwire"), "python": platform.python_version(), **versions}
        yield _info("flashwire_build_info", "Versions.", build, labels=tuple(build))

    def _processes(self) -> Iterator[Metric]:
        """Since when each process runs, and its memory."""
        started, resident, peak = (
            GaugeMetricFamily(f"flashwire_process_{name}", meaning, labels=["process"])
            for name, meaning in (
                ("start_time_seconds", "When the process started, since 1970."),
                ("resident_memory_bytes", "Memory that it takes, shared memory included."),
                ("resident_memory_peak_bytes", "The most that it ever was."),
            )
        )
        for name, region in self._board.regions.items():
            if region.pid:
                started.add_metric([name], region.started)
                memory = _memory_of(region.pid)
                for family, line in ((resident, "VmRSS"), (peak, "VmHWM")):
                    if line in memory:
                        family.add_metric([name], memory[line])
        yield from (started, resident, peak)


class _Families(Collector):
    """Families that are there already, as generate_latest wants them."""

    def __init__(self, families: Iterator[Metric]) -> None:
        self._families = families

    def describe(self) -> list[Metric]:  # or `register` would collect
        return []

    def collect(self) -> Iterator[Metric]:
        yield from self._families


def _metric(family: Family, rows: Mapping[tuple[str, ...], list[float]]) -> Metric:
    name, meaning, labels = family.name, family.meaning, family.labels
    if family.kind == "histogram":
        histogram = HistogramMetricFamily(name, meaning, labels=labels)
        bounds = [*map(floatToGoString, family.buckets), "+Inf"]
        for values, (*counts, total) in sorted(rows.items()):
            buckets = list(zip(bounds, accumulate(counts), strict=True))
            histogram.add_metric(values, buckets, total)
        return histogram
    kind = CounterMetricFamily if family.kind == "counter" else GaugeMetricFamily
    plain = kind(name, meaning, labels=labels)
    if not labels:
        rows = rows or {(): [0.0]}
    for values, (number,) in sorted(rows.items()):
        plain.add_metric(values, number)
    return plain


def _info(
    name: str, meaning: str, *rows: Mapping[str, str], labels: tuple[str, ...]
) -> GaugeMetricFamily:
    """A 1 for each row, whose labels are what matters."""
    family = GaugeMetricFamily(name, meaning, labels=labels)
    for row in rows:
        family.add_metric([row[label] for label in labels], 1)
    return family


def _version(package: str) -> str:
    """Without importing it; "" where it is not installed."""
    try:
        return version(package)
    except PackageNotFoundError:
        return ""


def _memory_of(pid: int) -> dict[str, int]:
    """Sizes in bytes, by their names in proc(5); none when the process has ended."""
    try:
        lines = Path(f"/proc/{pid}/status").read_text(encoding="ascii", errors="replace")
    except OSError:
        return {}
    rows = (line.split() for line in lines.splitlines() if line.endswith(" kB"))
    return {row[0].rstrip(":"): int(row[1]) * 1024 for row in rows}
