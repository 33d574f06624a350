"""What this front end counts, for Prometheus. Each has its own registry: nothing global."""

from __future__ import annotations

import platform
from collections.abc import Iterator, Mapping
from importlib.metadata import version

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram, generate_latest
from prometheus_client.core import CounterMetricFamily
from prometheus_client.registry import Collector

from flashwire_service.ipc.frames import Reply

CONTENT_TYPE = "text/plain; version=0.0.4; charset=utf-8"
# OpenTelemetry's advice for http.server.request.duration, in seconds.
_BUCKETS = (
    0.005, 0.01, 0.025, 0.05, 0.075, 0.1, 0.25, 0.5, 0.75, 1.0, 2.5, 5.0, 7.5, 10.0,
)  # fmt: skip


class _Restarts(Collector):
    """A count that the supervisor keeps."""

    def __init__(self) -> None:
        self.by_cause: Mapping[str, int] = {}

    def collect(self) -> Iterator[CounterMetricFamily]:
        family = CounterMetricFamily(
            "flashwire_worker_restarts",
            "Workers of the whole service that ended and were replaced, by cause.",
            labels=["cause"],
        )
        for cause, count in sorted(self.by_cause.items()):
            family.add_metric([cause], count)
        yield family


class Metrics:
    """The metrics of one front end."""

    def __init__(self) -> None:
        self._registry = CollectorRegistry()
        labels = ("http_request_method", "http_route", "http_response_status_code")
        self._duration = Histogram(
            "http_server_request_duration_seconds",
            "From the request's head to the last byte handed to the network.",
            labels,
            buckets=_BUCKETS,
            registry=self._registry,
        )
        self._queue = self._histogram("flashwire_queue_seconds", "Wait for a worker's compute.")
        self._compute = self._histogram("flashwire_compute_seconds", "Computing in a worker.")
        self._received = self._counter("flashwire_request_body_bytes", "Bytes of request bodies.")
        self._sent = self._counter("flashwire_response_body_bytes", "Bytes of response bodies.")
        self.in_flight = Gauge(
            "flashwire_requests_in_flight", "Requests not yet answered.", registry=self._registry
        )
        self._residuals = self._worker_gauge(
            "flashwire_residual_bytes", "Bytes of saved forwards, as of the last reply."
        )
        self._depth = self._worker_gauge(
            "flashwire_queue_depth", "Requests that wait, as of the last reply."
        )
        self._up = self._worker_gauge("flashwire_worker_up", "1 while the worker takes jobs.")
        self._restarts = _Restarts()
        self._registry.register(self._restarts)
        build = Gauge(
            "flashwire_build_info", "Versions.", ("version", "python"), registry=self._registry
        )
        build.labels(version("flashwire"), platform.python_version()).set(1)

    def answered(self, method: str, route: str, status: int, seconds: float) -> None:
        """A request has been answered. `route` is a template: a path would be unbounded."""
        self._duration.labels(method, route, str(status)).observe(seconds)

    def moved(self, received: int, sent: int) -> None:
        """Bytes of one request's body and of its reply's."""
        self._received.inc(received)
        self._sent.inc(sent)

    def computed(self, worker: int, reply: Reply) -> None:
        """A worker has answered a job."""
        self._queue.observe(reply.queue_ms / 1000)
        self._compute.observe(reply.compute_ms / 1000)
        self._residuals.labels(str(worker)).set(reply.residual_bytes)
        self._depth.labels(str(worker)).set(reply.queue_depth)

    def exposition(
        self, workers: Mapping[int, object], expected: int, restarts: Mapping[str, int]
    ) -> bytes:
        """The text that Prometheus reads. `workers` are the ready ones, `expected` how many there
        should be, `restarts` how often any ended, by cause.
        """
        self._restarts.by_cause = restarts
        for index in range(expected):
            self._up.labels(str(index)).set(index in workers)
            if index not in workers:  # what it held went with it
                self._residuals.labels(str(index)).set(0)
        return generate_latest(self._registry)

    def _histogram(self, name: str, meaning: str) -> Histogram:
        return Histogram(name, meaning, buckets=_BUCKETS, registry=self._registry)

    def _counter(self, name: str, meaning: str) -> Counter:
        return Counter(name, meaning, registry=self._registry)

    def _worker_gauge(self, name: str, meaning: str) -> Gauge:
        return Gauge(name, meaning, ("worker",), registry=self._registry)
