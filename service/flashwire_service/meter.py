"""Every metric that a process counts by itself: its name, meaning and labels; and how to count.

Standard library only: workers and the supervisor count, too. Front ends add up what all have
counted, and add what they read elsewhere (front/metrics.py). docs/observability.md has the whole
list. No label is a caller's to choose: each has few values.
"""

from __future__ import annotations

import bisect
import os
import time
from dataclasses import dataclass
from typing import Literal

from flashwire_service.ipc.board import Region

# OpenTelemetry's advice for http.server.request.duration, in seconds.
BUCKETS = (
    0.005, 0.01, 0.025, 0.05, 0.075, 0.1, 0.25, 0.5, 0.75, 1.0, 2.5, 5.0, 7.5, 10.0,
)  # fmt: skip


@dataclass(frozen=True, slots=True)
class Family:
    """A metric. A counter's name ends in _total, which the text format wants, too."""

    name: str
    kind: Literal["counter", "gauge", "histogram"]
    meaning: str
    labels: tuple[str, ...] = ()
    buckets: tuple[float, ...] = BUCKETS

    @property
    def numbers(self) -> int:
        """Of a row: a histogram has a count for each bucket and beyond, and the sum."""
        return len(self.buckets) + 2 if self.kind == "histogram" else 1


# Of front ends
REQUEST_DURATION = Family(
    "http_server_request_duration_seconds", "histogram",
    "From the request's head to the last byte handed to the network.",
    ("http_request_method", "http_route", "http_response_status_code", "error_type"),
)  # fmt: skip
IN_FLIGHT = Family("flashwire_requests_in_flight", "gauge", "Requests not yet answered.")
RECEIVED = Family("flashwire_request_body_bytes_total", "counter", "Bytes of request bodies.")
SENT = Family("flashwire_response_body_bytes_total", "counter", "Bytes of response bodies.")
REJECTED = Family(
    "flashwire_rejected_requests_total", "counter", "Requests that ended in an error.", ("code",)
)
CONNECTIONS = Family("flashwire_connections", "gauge", "Connections that are open.")
LOCAL_CONNECTIONS = Family(
    "flashwire_local_connections", "gauge", "Connections of callers that share memory."
)
SHARED_BYTES = Family(
    "flashwire_shared_memory_bytes", "gauge", "Memory of callers that is held for their requests."
)
UPLOADS = Family("flashwire_uploads", "gauge", "Bodies that are being received.")
UPLOAD_BYTES = Family("flashwire_upload_held_bytes", "gauge", "Memory that these bodies take.")

# Of workers
QUEUE_REQUESTS = Family("flashwire_queue_requests", "gauge", "Requests that wait.", ("worker",))
QUEUE_BYTES = Family("flashwire_queue_bytes", "gauge", "Bytes of their bodies.", ("worker",))
QUEUE_DEVICE_BYTES = Family(
    "flashwire_queue_device_bytes", "gauge",
    "Device memory that they are estimated to need.", ("worker",),
)  # fmt: skip
QUEUE_WAIT = Family(
    "flashwire_queue_wait_seconds", "histogram",
    "From a request's being sent to a worker to the begin of its computing.",
)  # fmt: skip
COMPUTE = Family(
    "flashwire_compute_seconds", "histogram",
    "Computing, copies to the device included.", ("route", "backend"),
)  # fmt: skip
BATCH = Family(
    "flashwire_batch_requests", "histogram",
    "Requests for attention or gradients that were computed together, each time.",
    buckets=(1, 2, 4, 8, 16, 32, 64),
)  # fmt: skip
TRANSFER = Family(
    "flashwire_transfer_seconds", "histogram",
    "Copies of tensors: in, from a body to the device; out, from the device into a reply.",
    ("direction",),
)  # fmt: skip
RESIDUALS = Family("flashwire_residuals", "gauge", "Saved forwards.", ("worker",))
RESIDUAL_BYTES = Family("flashwire_residual_bytes", "gauge", "Bytes of them.", ("worker",))
DEVICE_MEMORY = Family(
    "flashwire_device_memory_allocated_bytes", "gauge",
    "Memory of the GPU that torch has given out.", ("worker",),
)  # fmt: skip
DEVICE_MEMORY_PEAK = Family(
    "flashwire_device_memory_peak_bytes", "gauge",
    "The most that it ever was in this process.", ("worker",),
)  # fmt: skip

# Of the supervisor
WORKER_RESTARTS = Family(
    "flashwire_worker_restarts_total", "counter",
    "Workers that ended and were replaced, by how they ended.", ("cause",),
)  # fmt: skip
FRONTEND_RESTARTS = Family(
    "flashwire_frontend_restarts_total", "counter",
    "Front ends that ended and were replaced, by how they ended.", ("cause",),
)  # fmt: skip
QUARANTINED = Family(
    "flashwire_quarantined_requests", "gauge",
    "Requests that are refused since they ended workers.",
)  # fmt: skip

# Of any process
RELOAD_FAILURES = Family(
    "flashwire_reload_failures_total", "counter",
    "Keys, or a certificate, that SIGHUP had read and that could not be used.", ("what",),
)  # fmt: skip
LOG_LINES_DROPPED = Family(
    "flashwire_log_lines_dropped_total", "counter",
    "Lines of the log that stderr did not take in time.",
)  # fmt: skip

FAMILIES = (
    REQUEST_DURATION, IN_FLIGHT, RECEIVED, SENT, REJECTED, CONNECTIONS, LOCAL_CONNECTIONS,
    SHARED_BYTES, UPLOADS, UPLOAD_BYTES,
    QUEUE_REQUESTS, QUEUE_BYTES, QUEUE_DEVICE_BYTES, QUEUE_WAIT, COMPUTE, BATCH, TRANSFER,
    RESIDUALS, RESIDUAL_BYTES, DEVICE_MEMORY, DEVICE_MEMORY_PEAK,
    WORKER_RESTARTS, FRONTEND_RESTARTS, QUARANTINED, RELOAD_FAILURES, LOG_LINES_DROPPED,
)  # fmt: skip
_GAUGES = frozenset(family.name for family in FAMILIES if family.kind == "gauge")


class Meter:
    """Counts for one process, on its region of the board."""

    def __init__(self, region: Region | None = None) -> None:
        """Takes the place of whoever wrote there before; None: nobody else reads it."""
        self.region = Region.alone() if region is None else region
        self._found: dict[tuple[str, tuple[str, ...]], memoryview[float]] = {}
        leave(self.region)
        self.region.begin(os.getpid(), time.time())

    def add(self, family: Family, amount: float = 1.0, *labels: str) -> None:
        """More of a counter, or more or less of a gauge; 0 makes it known."""
        self._row(family, labels)[0] += amount

    def set(self, family: Family, value: float, *labels: str) -> None:
        """What a gauge stands at."""
        self._row(family, labels)[0] = value

    def observe(self, family: Family, value: float, *labels: str) -> None:
        """One more value of a histogram."""
        row = self._row(family, labels)
        row[bisect.bisect_left(family.buckets, value)] += 1
        row[-1] += value

    def value(self, family: Family, *labels: str) -> float:
        """What a counter or gauge stands at."""
        return self._row(family, labels)[0]

    def _row(self, family: Family, labels: tuple[str, ...]) -> memoryview[float]:
        row = self._found.get((family.name, labels))
        if row is None:
            row = self.region.row((family.name, *labels), family.numbers)
            self._found[family.name, labels] = row
        return row


def leave(region: Region) -> None:
    """Its process has ended: what it had is gone, what it counted stays."""
    region.end()
    for key, numbers in region.rows():
        if key[0] in _GAUGES:
            numbers[0] = 0.0
