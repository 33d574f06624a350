"""Spans of requests, collected in memory; and what settings and variables say of them."""

from __future__ import annotations

import time
from collections.abc import AsyncIterator, Callable
from typing import Any

import httpx
import pytest

from flashwire_service import cli, settings, tracing
from flashwire_service.errors import Refusal
from flashwire_service.front.app import create_app
from flashwire_service.front.pool import Answer, Work
from flashwire_service.ipc.frames import Reply, State
from flashwire_service.keys import listed
from flashwire_service.logs import Log
from flashwire_service.settings import Settings

pytest.importorskip("opentelemetry.sdk.trace")
from opentelemetry.sdk.trace import ReadableSpan, TracerProvider
from opentelemetry.sdk.trace.export import SimpleSpanProcessor
from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter
from opentelemetry.sdk.trace.sampling import ALWAYS_OFF
from opentelemetry.trace import SpanKind, StatusCode

from flashwire_service.front.traces import Traces

SMALL: dict[str, Any] = {"q": [[1, 0]], "k": [[1, 0]], "v": [[1, 2]]}
TRACE, PARENT = "0af7651916cd43dd8448eb211c80319c", "b7ad6b7169203331"
KEY = {"authorization": "Bearer a-key-of-alice"}


class OneWorker:
    """Answers after 20 ms in the queue and 30 ms of computing, or refuses."""

    ready, draining, state = True, False, State()
    facts: dict[int, dict[str, Any]] = {3: {"device": "cpu"}}  # noqa: RUF012
    refusal: Refusal | None = None

    async def run(self, work: Work, worker: int | None = None) -> Answer:
        if self.refusal is not None:
            raise self.refusal
        self.started = time.monotonic() - 0.03
        reply = Reply(
            id=1, size=2, body=b"{}", backend="cpu", queue_ms=20.0, compute_ms=30.0,
            started=self.started,
        )  # fmt: skip
        return Answer(reply, None, 3)


class Traced:
    """An application, a client of it, and the spans of its requests."""

    def __init__(self, **options: Any) -> None:
        self.exporter = InMemorySpanExporter()
        provider = TracerProvider(shutdown_on_exit=False, **options)
        provider.add_span_processor(SimpleSpanProcessor(self.exporter))
        self.traces = Traces(provider)
        self.pool = OneWorker()
        chosen = Settings(api_keys=listed("a-key-of-alice"))
        app = create_app(chosen, self.pool, Log("front", "error"), traces=self.traces)
        transport = httpx.ASGITransport(app)
        self.http = httpx.AsyncClient(transport=transport, base_url="http://test", headers=KEY)

    @property
    def spans(self) -> dict[str, ReadableSpan]:
        return {span.name: span for span in self.exporter.get_finished_spans()}


@pytest.fixture
async def traced() -> AsyncIterator[Traced]:
    made = Traced()
    async with made.http:
        yield made


async def test_a_request_is_a_span_with_queue_and_compute_in_it(traced: Traced) -> None:
    before = time.time_ns()
    headers = {"traceparent": f"00-{TRACE}-{PARENT}-01", "x-request-id": "mine"}
    await traced.http.post("/attention", json=SMALL, headers=headers)
    server, queue, compute = (traced.spans[n] for n in ("POST /attention", "queue", "compute"))
    assert server.kind is SpanKind.SERVER
    assert server.parent is not None
    assert (server.parent.trace_id, server.parent.span_id) == (int(TRACE, 16), int(PARENT, 16))
    assert server.parent.is_remote
    for child in (queue, compute):
        assert child.parent is not None
        assert child.parent.span_id == server.context.span_id
        assert child.context.trace_id == int(TRACE, 16)
    assert server.status.status_code is StatusCode.UNSET
    attributes = dict(server.attributes or {})
    assert attributes.pop("http.request.body.size") > 30
    assert attributes == {
        "http.request.method": "POST", "http.route": "/attention", "url.scheme": "http",
        "http.response.status_code": 200, "http.response.body.size": 2,
        "flashwire.request_id": "mine", "flashwire.key": "env:1",
        "flashwire.worker": 3, "flashwire.backend": "cpu",
    }  # fmt: skip
    assert before - 10**6 <= server.start_time <= server.end_time <= time.time_ns() + 10**6
    assert queue.end_time == compute.start_time
    assert queue.end_time - queue.start_time == pytest.approx(20e6, abs=2)
    assert compute.end_time - compute.start_time == pytest.approx(30e6, abs=2)
    offset = time.time_ns() / 1e9 - time.monotonic()
    assert compute.start_time / 1e9 - offset == pytest.approx(traced.pool.started, abs=0.01)


async def test_errors_are_named_and_only_those_of_ours_are_marked(traced: Traced) -> None:
    for code, status in (("queue_full", StatusCode.UNSET), ("no_worker", StatusCode.ERROR)):
        traced.exporter.clear()
        traced.pool.refusal = Refusal(code, "no")
        await traced.http.post("/attention", json=SMALL)
        (span,) = traced.exporter.get_finished_spans()
        assert span.status.status_code is status
        assert (span.attributes or {})["error.type"] == code
        assert span.parent is None


async def test_no_path_of_a_stranger_is_told_and_no_probe_is_traced(traced: Traced) -> None:
    for path in ("/healthz", "/readyz", "/metrics"):
        await traced.http.get(path)
    assert not traced.spans
    await traced.http.delete("/attention/residual/secret")
    await traced.http.get("/secret")
    assert set(traced.spans) == {"DELETE /attention/residual/{residual}", "GET"}
    assert not [s for s in traced.spans.values() if "secret" in str(dict(s.attributes or {}))]


async def test_a_sampler_is_asked_and_a_bad_parent_is_none() -> None:
    unsampled = Traced(sampler=ALWAYS_OFF)
    async with unsampled.http:
        await unsampled.http.post("/attention", json=SMALL)
    assert not unsampled.spans
    traced = Traced()
    async with traced.http:
        await traced.http.post("/attention", json=SMALL, headers={"traceparent": "00-nonsense"})
    assert traced.spans["POST /attention"].parent is None


def test_a_collector_that_does_not_answer_is_not_waited_for(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    traced = Traced()
    closed: list[str] = []

    class Slow:
        def __init__(self, target: Callable[[], None], daemon: bool) -> None:
            assert daemon

        def start(self) -> None:
            closed.append("start")

        def join(self, timeout: float) -> None:
            closed.append(f"join {timeout:g}")

    monkeypatch.setattr("threading.Thread", Slow)
    traced.traces.close()
    assert closed == ["start", "join 1"]


def test_what_is_asked_for_and_not_done_is_a_mistake() -> None:
    wrong = {"OTEL_TRACES_EXPORTER": "zipkin", "OTEL_EXPORTER_OTLP_PROTOCOL": "grpc"}
    assert not settings.load({}, wrong).traces
    with pytest.raises(settings.SettingsError) as caught:
        settings.load({"traces": "true"}, wrong)
    assert [line.split(":")[0] for line in caught.value.mistakes] == list(wrong)
    fine = {"OTEL_TRACES_EXPORTER": "otlp", "OTEL_EXPORTER_OTLP_PROTOCOL": "http/protobuf"}
    assert settings.load({}, {**fine, "FLASHWIRE_TRACES": "true"}).traces


def test_without_the_packages_it_says_so_and_ends(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    assert tracing.installed()
    monkeypatch.setattr(tracing, "_MODULES", ("opentelemetry.nothing.at_all",))
    assert not tracing.installed()
    assert cli.main(["--traces", "--port", "0"]) == 72
    assert "pip install 'flashwire[otel]'" in capsys.readouterr().err
