"""The table of errors of docs/contract.md, row by row, on one real server.

After each row a good request goes over the same connection, where the reply leaves it open, and
over another one where it does not. What a row says in many ways has all of them in test_errors.py.
"""

from __future__ import annotations

import http.client
import json
import os
import signal
import socket
import threading
import time
from collections.abc import Callable, Iterator
from typing import Any

import msgpack
import numpy as np
import pytest

from load import processes
from load.service import Service

USER, SCRAPER = "key-of-a-user", "key-to-scrape"
GOOD = {"q": [[1, 0]], "k": [[1, 0], [0, 1]], "v": [[1, 2], [3, 4]], "scale": 1.0}
GOOD_OUT = [1.5378828427399903, 2.5378828427399903]  # p = e/(e+1), by hand
JSON, MSGPACK = {"content-type": "application/json"}, {"content-type": "application/msgpack"}
FLAGS = (
    "--max-body-bytes", "1MiB", "--queue-requests", "1", "--residual-ttl-s", "0.3",
    "--max-materialise-bytes", "1GiB", "--grace-s", "0.5",
)  # fmt: skip


@pytest.fixture(scope="module")
def service(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Service]:
    keys = tmp_path_factory.mktemp("keys") / "keys.toml"
    keys.write_text(f'user = "{USER}"\nscraper = {{ key = "{SCRAPER}", may = ["metrics"] }}')
    keys.chmod(0o600)
    with Service(*FLAGS, "--api-keys-file", str(keys)) as running:
        running.wait_whole()
        yield running


class Caller:
    """One connection, and another one once a reply has ended it."""

    def __init__(self, service: Service) -> None:
        self._address = service.host, service.port
        self._socket: socket.socket | None = None
        self.connections = 0

    def send(self, sent: bytes) -> None:
        if self._socket is None:
            self._socket = socket.create_connection(self._address, 60)
            self.connections += 1
        self._socket.sendall(sent)

    def reply(self) -> tuple[int, dict[str, str], bytes]:
        assert self._socket is not None
        response = http.client.HTTPResponse(self._socket)
        response.begin()
        body = response.read()
        headers = {name.lower(): value for name, value in response.getheaders()}
        if headers.get("connection") == "close":
            self.close()
        return response.status, headers, body

    def post(
        self, body: Any = b"", path: str = "/attention", method: str = "POST", **headers: str
    ) -> None:
        """A dict goes as JSON, bytes as they are; `key` is a header's shorthand."""
        kind = JSON if isinstance(body, dict) else MSGPACK
        data = json.dumps(body).encode() if isinstance(body, dict) else body
        key = headers.pop("key", USER)
        lines = {"host": "x", "content-length": str(len(data)), **kind}
        lines |= {"authorization": f"Bearer {key}"} if key else {}
        lines |= {name.replace("_", "-"): value for name, value in headers.items()}
        head = "".join(f"{name}: {value}\r\n" for name, value in lines.items())
        self.send(f"{method} {path} HTTP/1.1\r\n{head}\r\n".encode() + data)

    def ask(self, *asked: Any, **how: Any) -> tuple[int, dict[str, str], bytes]:
        self.post(*asked, **how)
        return self.reply()

    def refused(self, status: int, code: str, *asked: Any, **how: Any) -> dict[str, Any]:
        """The problem document that is the answer."""
        return problem(self.ask(*asked, **how), status, code)

    def is_served(self) -> None:
        status, _, body = self.ask(GOOD)
        assert status == 200, body
        assert json.loads(body)["out"] == [pytest.approx(GOOD_OUT, rel=1e-6)]

    def close(self) -> None:
        if self._socket is not None:
            self._socket.close()
            self._socket = None


def problem(reply: tuple[int, dict[str, str], bytes], status: int, code: str) -> dict[str, Any]:
    got, headers, body = reply
    document: dict[str, Any] = json.loads(body)
    assert (got, document["code"], document["status"]) == (status, code, status), document
    assert headers["content-type"] == "application/problem+json"
    assert headers["x-request-id"] == document["request_id"]
    assert document["error"] == document["detail"]
    assert {"type", "title"} <= document.keys()
    assert b"Traceback" not in body
    if status in (429, 503):
        assert int(headers["retry-after"]) >= 1
    return document


@pytest.fixture
def caller(service: Service) -> Iterator[Caller]:
    """Its connection is the same throughout, unless the test says otherwise."""
    made = Caller(service)
    made.is_served()
    yield made
    made.close()


def tensor(**changes: Any) -> dict[str, Any]:
    return {"dtype": "float32", "shape": [1, 1], "data": b"\0\0\0\0"} | changes


def message(**changes: Any) -> bytes:
    packed: bytes = msgpack.packb({name: tensor() for name in "qkv"} | changes)
    return packed


def floats(*shape: int) -> dict[str, Any]:
    return {"dtype": "float32", "shape": list(shape), "data": np.zeros(shape, "f4").tobytes()}


LONG = message(**{name: floats(24, 1, 1000, 2) for name in "qkv"}, backend="reference")
ENDLESS = {name: floats(80_000, 1) for name in "qkv"}  # seconds and seconds
TWICE = msgpack.packb({"dtype": "float32"})[1:] + msgpack.packb({"shape": [1, 1]})[1:] * 2


@pytest.mark.parametrize(
    ("body", "field"),
    [
        pytest.param(b"\xc1", None, id="not msgpack"),
        pytest.param(message()[:-1], None, id="truncated"),
        pytest.param(message() + b"\0", None, id="trailing bytes"),
        pytest.param(b"\x82\xa6causal\xc2\xa6causal\xc3", "causal", id="a repeated key"),
        pytest.param(b"\x81\xa1q\x83" + TWICE, "q.shape", id="a repeated key in a tensor"),
        pytest.param(b"\x81\x01\xc2", None, id="a key that is no string"),
        pytest.param(message(q=tensor(shape=[-1, 1])), "q", id="a negative size"),
        pytest.param(message(q=tensor(shape="1,1")), "q", id="a shape that is no list"),
        pytest.param(message(v=tensor(shape=[1, 2])), "v", id="data of another length"),
        pytest.param(message(window=[[[[[[[[[1]]]]]]]]]), "window", id="nesting"),
        pytest.param(message(dropout={f"x{n}": 1 for n in range(65)}), "dropout", id="header map"),
    ],
)
def test_400(caller: Caller, body: bytes, field: str | None) -> None:
    document = caller.refused(400, "malformed", body)
    assert document.get("field") == field
    caller.is_served()
    assert caller.connections == 1


def test_401_and_403(caller: Caller) -> None:
    for key in ("", "key-of-nobody"):
        caller.refused(401, "unauthorized", GOOD, key=key)
        caller.is_served()
    caller.refused(403, "forbidden", GOOD, key=SCRAPER)
    caller.is_served()
    assert caller.connections == 1


def test_404_and_410(caller: Caller) -> None:
    _, _, body = caller.ask(GOOD | {"save_for_backward": True})
    residual = json.loads(body)["residual"]
    time.sleep(0.4)  # residual_ttl_s is 0.3
    for given, status, code in ((residual, 410, "gone"), ("A" * 46, 404, "not_found")):
        asked = {"residual": given, "dout": [[1, 1]]}
        caller.refused(status, code, asked, "/attention/backward")
        caller.is_served()
        caller.refused(status, code, path=f"/attention/residual/{given}", method="DELETE")
        caller.is_served()
    caller.refused(404, "not_found", path="/nowhere")
    caller.is_served()
    assert caller.connections == 1


def test_405(caller: Caller) -> None:
    caller.refused(405, "method_not_allowed", path="/attention", method="PUT")
    caller.is_served()
    assert caller.connections == 1


@pytest.mark.parametrize("told", [True, False], ids=["Content-Length", "chunked"])
def test_413_ends_the_connection(caller: Caller, told: bool) -> None:
    """Told beforehand, it is answered before any of the body came; else as the count passes."""
    head = f"POST /attention HTTP/1.1\r\nhost: x\r\nauthorization: Bearer {USER}\r\n".encode()
    if told:
        caller.send(head + b"content-length: 99999999\r\n\r\n")
    else:
        data = msgpack.packb({"mask": {"dtype": "bool", "shape": [2**21], "data": bytes(2**21)}})
        caller.send(head + b"transfer-encoding: chunked\r\n\r\n%x\r\n" % len(data))
        caller.send(data[: 2**20 + 4096])
    problem(caller.reply(), 413, "too_large")
    caller.is_served()
    assert caller.connections == 2


@pytest.mark.parametrize(
    "headers", [{"content_type": "text/plain"}, {"content_encoding": "gzip"}], ids=str
)
def test_415(caller: Caller, headers: dict[str, str]) -> None:
    caller.refused(415, "unsupported_media_type", b"x", **headers)
    caller.is_served()
    assert caller.connections == 1


def test_408_ends_the_connection(service: Service, caller: Caller) -> None:
    """An upload that stands still. Meanwhile others are served."""
    slow = Caller(service)
    head = f"POST /attention HTTP/1.1\r\nhost: x\r\nauthorization: Bearer {USER}\r\n"
    slow.send(f"{head}content-length: 1000000\r\n\r\n".encode() + b"\x81")
    caller.is_served()
    problem(slow.reply(), 408, "request_timeout")
    slow.is_served()
    assert slow.connections == 2
    slow.close()


def test_431_ends_the_connection(caller: Caller) -> None:
    caller.refused(431, "headers_too_large", GOOD, x_filler="y" * 60_000)
    caller.is_served()
    assert caller.connections == 2


@pytest.mark.parametrize(
    ("change", "field"),
    [
        pytest.param({"q": None}, "q", id="a missing key"),
        pytest.param({"k": [[1, 0, 0]]}, "k", id="shapes that do not fit"),
        pytest.param({"q": {"dtype": "float31", "data": [[1, 0]]}}, "q", id="an unknown dtype"),
        pytest.param({"cusal": True}, "cusal", id="an unknown option"),
        pytest.param({"causal": "yes"}, "causal", id="a wrong type"),
        pytest.param({"window": [-2, 0]}, "window", id="a value out of range"),
    ],
)
def test_422(caller: Caller, change: dict[str, Any], field: str) -> None:
    document = caller.refused(422, "invalid", GOOD | change)
    assert field in {reason.partition(":")[0] for reason in document["reasons"]}
    if field == "cusal":
        assert "'causal'" in document["detail"]
    caller.is_served()
    assert caller.connections == 1


def test_422_of_a_backend_gives_every_reason(caller: Caller) -> None:
    document = caller.refused(422, "unsupported_backend", GOOD | {"backend": "triton"})
    assert document["reasons"]
    caller.is_served()
    assert caller.connections == 1


def test_429(service: Service, caller: Caller) -> None:
    """One computes, one waits, and a third is one too many."""
    others = [threading.Thread(target=ask_alone, args=(service,)) for _ in range(2)]
    for other in others:
        other.start()
    until(lambda: b"flashwire_requests_in_flight 3.0" in metrics(service))
    refusals = [caller.ask(LONG)]
    while any(other.is_alive() for other in others) and refusals[-1][0] != 429:
        refusals.append(caller.ask(LONG))
    for other in others:
        other.join()
    problem(refusals[-1], 429, "queue_full")
    caller.is_served()
    assert caller.connections == 1


def test_504(caller: Caller) -> None:
    caller.refused(504, "deadline_exceeded", LONG, flashwire_timeout_ms="20")
    caller.is_served()
    assert caller.connections == 1


def test_507(caller: Caller) -> None:
    large = message(**{name: floats(12_000, 1) for name in "qkv"}, backend="reference")
    document = caller.refused(507, "not_enough_memory", large)
    assert "1073741824" in document["detail"].replace(",", "")  # what there is
    caller.is_served()
    assert caller.connections == 1


def test_503_and_back_on_the_same_connection(service: Service, caller: Caller) -> None:
    """A worker that dies under a request, then none, then another one, which dies under the same
    request: it is refused from then on (422). And the end of it all.
    """
    deadly = message(**ENDLESS)
    for status, code in ((503, "worker_died"), (422, "quarantined")):
        asking = computing(service, deadly)
        (victim,) = service.pids("worker")
        os.kill(victim, signal.SIGKILL)
        problem(asking.reply(), status, code)
        asking.close()
        caller.refused(503, "no_worker", GOOD)
        service.wait_whole()
        caller.is_served()
    caller.refused(422, "quarantined", deadly)
    caller.is_served()
    assert caller.connections == 1

    asking = computing(service, message(**ENDLESS, causal=True))
    service.terminate()
    problem(asking.reply(), 503, "draining")
    asking.close()
    assert service.wait() == 0
    assert service.left_behind() == []


def computing(service: Service, asked: bytes) -> Caller:
    """Someone whose request is being computed, and will be for as long as anyone waits."""
    (worker,) = service.pids("worker")
    before = processes.cpu_seconds(worker)
    asking = Caller(service)
    asking.post(asked)
    until(lambda: processes.cpu_seconds(worker) > before + 0.2)  # more than anything but computing
    return asking


def ask_alone(service: Service) -> None:
    alone = Caller(service)
    alone.ask(LONG)
    alone.close()


def metrics(service: Service) -> bytes:
    scraping = Caller(service)
    _, _, body = scraping.ask(path="/metrics", method="GET", key=SCRAPER)
    scraping.close()
    return body


def until(condition: Callable[[], bool]) -> None:
    end = time.monotonic() + 30
    while not condition():
        assert time.monotonic() < end, "waited in vain"
        time.sleep(0.01)
