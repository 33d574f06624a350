"""What the settings and OpenTelemetry's own variables say of traces, read before anything starts.

Where to send them, how many and with which headers is said by variables that the SDK reads itself
(OTEL_EXPORTER_OTLP_ENDPOINT, OTEL_TRACES_SAMPLER, OTEL_SERVICE_NAME and so on). Checked here is
what it would not: that what is asked for is what is done.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from importlib.util import find_spec

PROTOCOL = "http/protobuf"
_EXPORTER = "OTEL_TRACES_EXPORTER"
_MODULES = ("opentelemetry.sdk.trace", "opentelemetry.exporter.otlp.proto.http.trace_exporter")


def installed() -> bool:
    """Whether the packages of the extra `otel` are there. Imports none of them whole."""
    try:
        return all(find_spec(module) is not None for module in _MODULES)
    except ModuleNotFoundError:  # a parent
        return False


def mistakes(environ: Mapping[str, str]) -> Iterator[str]:
    """A line for each variable that asks for what is not done."""
    exporter = environ.get(_EXPORTER, "").strip()
    if exporter not in ("", "otlp"):
        yield f"{_EXPORTER}: traces are sent by otlp, not {exporter!r}"
    for name in ("OTEL_EXPORTER_OTLP_TRACES_PROTOCOL", "OTEL_EXPORTER_OTLP_PROTOCOL"):
        protocol = environ.get(name, "").strip()
        if protocol not in ("", PROTOCOL):
            yield f"{name}: only {PROTOCOL} is spoken, not {protocol!r}"
