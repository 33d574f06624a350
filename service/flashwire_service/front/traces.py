"""A trace of each request, for OpenTelemetry. Loaded only where traces are asked for.

A request's spans are made when it has been answered: then all of it is known, its route and its
times in the worker too. A caller's `traceparent` is their parent.
"""

from __future__ import annotations

import threading
import time
from importlib.metadata import version

from opentelemetry import propagate
from opentelemetry.exporter.otlp.proto.http.trace_exporter import OTLPSpanExporter
from opentelemetry.sdk.resources import OTELResourceDetector, Resource
from opentelemetry.sdk.trace import TracerProvider
from opentelemetry.sdk.trace.export import BatchSpanProcessor
from opentelemetry.trace import SpanKind, StatusCode, format_trace_id, set_span_in_context

from flashwire_service.front.answered import Answered

_CLOSE_S = 1.0  # for the last spans to be sent


class Traces:
    """Makes spans of requests, and has `provider` send them."""

    def __init__(self, provider: TracerProvider) -> None:
        self._provider = provider
        self._tracer = provider.get_tracer("flashwire", version("flashwire"))

    @classmethod
    def to_collector(cls) -> Traces:
        """Sent in the background, where the variables of OpenTelemetry say."""
        named = {"service.name": "flashwire", "service.version": version("flashwire")}
        resource = Resource.create({**named, **OTELResourceDetector().detect().attributes})
        provider = TracerProvider(resource=resource, shutdown_on_exit=False)
        provider.add_span_processor(BatchSpanProcessor(OTLPSpanExporter()))
        return cls(provider)

    def record(self, request: Answered) -> str:
        """Make its spans. Returns the id of its trace, as the log has it."""
        wall = time.time_ns() - time.monotonic_ns()

        def at(monotonic_s: float) -> int:
            return round(monotonic_s * 1e9) + wall

        route = "" if request.route == "unmatched" else request.route
        span = self._tracer.start_span(
            f"{request.method} {route}".strip(),
            context=propagate.extract(request.headers),
            kind=SpanKind.SERVER,
            attributes=_attributes(request, route),
            start_time=at(request.began),
        )
        if request.status >= 500:
            span.set_status(StatusCode.ERROR, request.code)
        if request.answer is not None and span.is_recording():
            reply, within = request.answer.reply, set_span_in_context(span)
            began = reply.started - reply.queue_ms / 1000
            ended = reply.started + reply.compute_ms / 1000
            for name, start, end in (
                ("queue", began, reply.started),
                ("compute", reply.started, ended),
            ):
                child = self._tracer.start_span(name, context=within, start_time=at(start))
                child.end(at(end))
        span.end(at(request.ended))
        return format_trace_id(span.get_span_context().trace_id)

    def close(self) -> None:
        """Send what is left, without waiting for a collector that does not answer."""
        closing = threading.Thread(target=self._provider.shutdown, daemon=True)
        closing.start()
        closing.join(_CLOSE_S)


def _attributes(request: Answered, route: str) -> dict[str, str | int]:
    """By OpenTelemetry's conventions for HTTP servers, and some of our own. No path, no address."""
    answer = request.answer
    attributes: dict[str, str | int | None] = {
        "http.request.method": request.method,
        "http.route": route or None,
        "http.response.status_code": request.status,
        "http.request.body.size": request.received,
        "http.response.body.size": request.sent,
        "url.scheme": request.scheme,
        "error.type": request.code or None,
        "flashwire.request_id": request.request_id,
        "flashwire.key": request.key or None,
        "flashwire.worker": None if answer is None else answer.worker,
        "flashwire.backend": None if answer is None else answer.reply.backend or None,
    }
    return {name: value for name, value in attributes.items() if value is not None}
