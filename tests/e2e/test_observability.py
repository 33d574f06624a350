"""Metrics, log and traces of a real service: two front ends, two workers, keys."""

from __future__ import annotations

import contextlib
import json
import os
import re
import signal
import threading
import time
from collections.abc import Callable, Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import httpx
import pytest
from prometheus_client.parser import text_string_to_metric_families

from flashwire_service import tracing

DOC = (Path(__file__).parents[2] / "docs/observability.md").read_text(encoding="utf-8")
ALICE, SCRAPER = "key-of-alice", "key-to-scrape"
PATIENCE_S = 30.0
DURATION = "http_server_request_duration_seconds"
ON_A_GPU = {"flashwire_device_memory_allocated_bytes", "flashwire_device_memory_peak_bytes"}


SMALL: dict[str, Any] = {"q": [[1, 0]], "k": [[1, 0], [0, 1]], "v": [[1, 2], [3, 4]], "scale": 1.0}


class Collector(ThreadingHTTPServer):
    """Takes what is sent by OpenTelemetry's protocol. `received` are bodies by path."""

    def __init__(self) -> None:
        self.received: list[tuple[str, bytes]] = []
        super().__init__(("127.0.0.1", 0), _Collecting)


class _Collecting(BaseHTTPRequestHandler):
    server: Collector

    def do_POST(self) -> None:
        body = self.rfile.read(int(self.headers["content-length"]))
        self.server.received.append((self.path, body))
        self.send_response(200)
        self.end_headers()

    def log_message(self, format: str, *args: Any) -> None:
        """Nothing."""


@pytest.fixture(scope="module")
def collector() -> Iterator[Collector]:
    with Collector() as made:
        serving = threading.Thread(target=made.serve_forever)
        serving.start()
        yield made
        made.shutdown()
        serving.join()


@pytest.fixture(scope="module")
def keys(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The file of keys."""
    return tmp_path_factory.mktemp("keys") / "keys.toml"


@pytest.fixture(scope="module")
def service(
    tmp_path_factory: pytest.TempPathFactory,
    start_in: Callable[..., Any],
    collector: Collector,
    keys: Path,
) -> Iterator[Any]:
    directory = tmp_path_factory.mktemp("observed")
    keys.write_text(f'alice = "{ALICE}"\nscraper = {{ key = "{SCRAPER}", may = ["metrics"] }}\n')
    keys.chmod(0o600)
    flags = ["--frontends", "2", "--workers", "2", "--queue-requests", "7"]
    flags += ["--api-keys-file", str(keys)] + ["--traces"] * tracing.installed()
    with pytest.MonkeyPatch.context() as patch:
        where = f"http://127.0.0.1:{collector.server_port}"
        patch.setenv("OTEL_EXPORTER_OTLP_ENDPOINT", where)
        patch.setenv("OTEL_SERVICE_NAME", "attention-of-mine")
        patch.setenv("OTEL_BSP_SCHEDULE_DELAY", "50")
        running = start_in(directory, *flags)
    running.wait_ready(workers=2)
    yield running
    assert running.stop() == 0, running.log


def ask(service: Any, body: dict[str, Any], key: str = ALICE, **headers: str) -> httpx.Response:
    """Over a connection of its own: any front end may take it."""
    headers["authorization"] = f"Bearer {key}"
    return httpx.post(service.url + "/attention", json=body, headers=headers, timeout=60)


def scrape(service: Any) -> dict[str, Any]:
    """What one of the front ends says, by family."""
    headers = {"authorization": f"Bearer {SCRAPER}"}
    text = httpx.get(service.url + "/metrics", headers=headers).text
    return {family.name: family for family in text_string_to_metric_families(text)}


def value(families: dict[str, Any], name: str, **labels: str) -> float:
    """The sum of a metric's samples with these labels."""
    return sum(
        sample.value
        for family in families.values()
        for sample in family.samples
        if sample.name == name and labels.items() <= sample.labels.items()
    )


def events(service: Any, **wanted: Any) -> list[dict[str, Any]]:
    """Lines of the log that have these values."""
    lines = [json.loads(line) for line in service.log.splitlines()]
    return [line for line in lines if wanted.items() <= line.items()]


def pid_of(service: Any, child: str) -> int:
    """Of the process that was last ready in this place."""
    found: int = events(service, event="ready", child=child)[-1]["pid"]
    return found


@contextlib.contextmanager
def stopped(pid: int) -> Iterator[None]:
    """Shorter than a front end may be silent."""
    os.kill(pid, signal.SIGSTOP)
    try:
        yield
    finally:
        os.kill(pid, signal.SIGCONT)


def until(check: Callable[[], Any]) -> Any:
    end = time.monotonic() + PATIENCE_S
    while not (found := check()):
        assert time.monotonic() < end, "waited in vain"
        time.sleep(0.02)
    return found


def documented() -> dict[str, tuple[str, set[str]]]:
    """Type and labels of each metric in the tables."""
    rows = re.findall(r"^\| `(\w+)` \| (counter|gauge|histogram) \|([^|]*)\|", DOC, re.MULTILINE)
    return {name: (kind, set(re.findall(r"`(\w+)`", labels))) for name, kind, labels in rows}


def test_the_documentation_lists_every_metric_and_its_labels(service: Any) -> None:
    assert ask(service, SMALL).status_code == 200
    assert ask(service, {}).status_code == 422
    told = {}
    for family in scrape(service).values():
        name = family.name + "_total" * (family.type == "counter")
        labels = {label for sample in family.samples for label in sample.labels} - {"le"}
        told[name] = (family.type, labels)
    known = documented()
    assert told.keys() == known.keys()
    for name, (kind, labels) in known.items():
        seen = set() if name in ON_A_GPU or not told[name][1] else labels
        assert told[name] == (kind, seen), name
    mishaps = {"flashwire_frontend_restarts_total", "flashwire_reload_failures_total"}
    untold = {name for name, (_, labels) in known.items() if labels and not told[name][1]}
    assert ON_A_GPU <= untold <= mishaps | ON_A_GPU


def test_every_front_end_tells_of_all(service: Any) -> None:
    route = {"http_route": "/attention", "http_response_status_code": "200"}
    before = scrape(service)
    for asked in range(2):
        with stopped(pid_of(service, f"front-{1 - asked}")):
            for _ in range(5):
                reply = ask(service, SMALL, **{"x-request-id": f"of-front-{asked}"})
                assert reply.status_code == 200
            after = scrape(service)
        for name in (f"{DURATION}_count", f"{DURATION}_bucket"):
            wanted = route if name.endswith("count") else {**route, "le": "+Inf"}
            assert value(after, name, **wanted) - value(before, name, **wanted) == 5 + 5 * asked
        lines = events(service, request_id=f"of-front-{asked}")
        assert [line["process"] for line in lines] == [f"front-{asked}"] * 5
    assert value(after, "flashwire_worker_up") == 2
    assert value(after, "flashwire_queue_limit_requests") == 7
    assert value(after, "flashwire_transfer_seconds_count", direction="out") >= 10
    compute = {"route": "attention", "backend": "cpu"}
    assert value(after, "flashwire_compute_seconds_count", **compute) >= 10
    for process in ("supervisor", "front-0", "front-1", "worker-0", "worker-1"):
        assert value(after, "flashwire_process_resident_memory_bytes", process=process) > 2**20


def test_counters_outlive_their_processes(service: Any) -> None:
    saved = ask(service, {**SMALL, "save_for_backward": True})
    assert saved.status_code == 200
    before = until(lambda: (m := scrape(service)) and value(m, "flashwire_residuals") and m)
    holder = max(range(2), key=lambda i: value(before, "flashwire_residuals", worker=str(i)))
    for child in ("front-1", f"worker-{holder}"):
        os.kill(pid_of(service, child), signal.SIGKILL)
        until(lambda child=child: len(events(service, event="ready", child=child)) == 2)
    service.wait_ready(workers=2)
    after = until(lambda: (m := scrape(service)) and value(m, "flashwire_worker_up") == 2 and m)
    for name, *labels in (
        (f"{DURATION}_count", "http_route", "/attention"),
        ("flashwire_request_body_bytes_total",),
        ("flashwire_compute_seconds_count",),
        ("flashwire_queue_wait_seconds_sum",),
    ):
        chosen = dict([labels]) if labels else {}
        assert value(after, name, **chosen) >= value(before, name, **chosen) > 0
    assert value(after, "flashwire_residuals") == 0
    for name in ("worker", "frontend"):
        assert value(after, f"flashwire_{name}_restarts_total", cause="SIGKILL") == 1
    assert value(after, "flashwire_requests_in_flight") == 1  # this very request


def test_keys_that_cannot_be_used_are_counted(service: Any, keys: Path) -> None:
    good = keys.read_text()
    keys.write_text("alice = 7")
    service.process.send_signal(signal.SIGHUP)
    failed = ("flashwire_reload_failures_total", "keys")
    until(lambda: value(scrape(service), failed[0], what=failed[1]) == 1)
    keys.write_text(good)
    service.process.send_signal(signal.SIGHUP)
    until(lambda: events(service, event="keys read"))
    assert value(scrape(service), failed[0], what=failed[1]) == 1


def test_strangers_make_no_labels(service: Any) -> None:
    httpx.get(service.url + "/secret/path")
    httpx.request("PROPFIND", service.url + "/attention")
    service.raw(b"secret garbage\r\n\r\n")
    families = until(
        lambda: (
            (m := scrape(service))
            and value(m, "flashwire_rejected_requests_total", code="malformed")
            and m
        )
    )
    labels = {text for f in families.values() for s in f.samples for text in s.labels.values()}
    assert not [text for text in labels if re.search("secret|PROPFIND|alice", text)]
    assert value(families, f"{DURATION}_count", http_route="unmatched", error_type="not_found") == 1
    assert value(families, f"{DURATION}_count", http_request_method="_OTHER") == 1


def test_a_request_is_one_line(service: Any) -> None:
    reply = ask(service, SMALL, **{"x-request-id": "good.one"})
    assert reply.headers["x-request-id"] == "good.one"
    (line,) = until(lambda: events(service, request_id="good.one"))
    assert (line["event"], line["level"]) == ("request", "info")
    assert (line["method"], line["route"], line["status"]) == ("POST", "/attention", 200)
    assert (line["key"], line["backend"]) == ("alice", "cpu")
    assert line["sent_bytes"] == len(reply.content)
    assert line["received_bytes"] == len(reply.request.content)
    timings = reply.json()["meta"]["timings_ms"]
    assert line["compute_ms"] == pytest.approx(timings["compute"], abs=1e-3)
    assert 0 <= line["queue_ms"] <= line["duration_ms"]
    assert "code" not in line
    assert line["worker"] in (0, 1)

    refused = ask(service, {**SMALL, "scale": "x"}, **{"x-request-id": "bad.one"})
    (line,) = until(lambda: events(service, request_id="bad.one"))
    assert (line["status"], line["code"]) == (422, refused.json()["code"])
    assert "worker" not in line
    stranger = ask(service, SMALL, "key-of-nobody", **{"x-request-id": "not valid"})
    made = stranger.headers["x-request-id"]
    assert made == stranger.json()["request_id"] != "not valid"
    (line,) = until(lambda: events(service, request_id=made))
    assert (line["status"], line["code"]) == (401, "unauthorized")
    assert "key" not in line
    got = service.raw(b"garbage\r\n\r\n")
    found = re.search(rb"x-request-id: (\w+)", got)
    assert found
    (line,) = until(lambda: events(service, request_id=found[1].decode()))
    assert (line["status"], line["code"]) == (400, "malformed")
    for secret in (ALICE, SCRAPER, "key-of-nobody", "1.5378"):
        assert secret not in service.log


def test_a_collector_gets_the_spans(service: Any, collector: Collector) -> None:
    requests = pytest.importorskip("opentelemetry.proto.collector.trace.v1.trace_service_pb2")
    trace_id, parent = "0af7651916cd43dd8448eb211c80319c", "b7ad6b7169203331"
    caller = {"traceparent": f"00-{trace_id}-{parent}-01", "x-request-id": "traced"}
    assert ask(service, SMALL, **caller).status_code == 200

    def sent() -> dict[str, Any] | None:
        found = {}
        for path, body in list(collector.received):
            assert path == "/v1/traces"
            for part in requests.ExportTraceServiceRequest.FromString(body).resource_spans:
                name = {a.key: a.value.string_value for a in part.resource.attributes}
                assert name["service.name"] == "attention-of-mine"
                spans = [span for scope in part.scope_spans for span in scope.spans]
                found |= {s.name: s for s in spans if s.trace_id.hex() == trace_id}
        return found or None

    spans = until(sent)
    assert spans.keys() == {"POST /attention", "queue", "compute"}
    root = spans["POST /attention"]
    assert root.parent_span_id.hex() == parent
    assert spans["queue"].parent_span_id == spans["compute"].parent_span_id == root.span_id
    (line,) = events(service, request_id="traced")
    assert line["trace_id"] == trace_id
    took = (spans["compute"].end_time_unix_nano - spans["compute"].start_time_unix_nano) / 1e6
    assert took == pytest.approx(line["compute_ms"], abs=0.01)
    assert root.start_time_unix_nano <= spans["queue"].start_time_unix_nano
    assert spans["compute"].end_time_unix_nano <= root.end_time_unix_nano
