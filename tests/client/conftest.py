"""A small server that speaks the contract over a real socket, and does as it is told."""

import itertools
import json
import socket
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

import numpy as np
import pytest
import torch

from flashwire import Client, wire

Answer = tuple[int, dict[str, str], bytes]
MSGPACK = {"content-type": wire.MEDIA_TYPE}


@dataclass
class Received:
    method: str
    path: str
    headers: dict[str, str]  # lower-case names
    body: bytes
    peer: Any = None
    options: dict[str, Any] = field(default_factory=dict)
    tensors: dict[str, torch.Tensor] = field(default_factory=dict)


class Server:
    """`script` holds what to do with the next requests: an Answer, or "drop"; None computes."""

    def __init__(self) -> None:
        self.received: list[Received] = []
        self.script: list[Answer | str | None] = []
        self.residuals: dict[str, Received] = {}
        self._numbers = itertools.count(1)
        self.drop_after_reply = False  # close kept connections, as a server tired of idling does
        self._http = ThreadingHTTPServer(("127.0.0.1", 0), _handler(self))
        self._http.daemon_threads = True
        self.url = f"http://127.0.0.1:{self._http.server_port}"
        self._thread = threading.Thread(target=self._http.serve_forever, args=(0.01,))
        self._thread.start()

    def close(self) -> None:
        self._http.shutdown()
        self._http.server_close()
        self._thread.join()

    @property
    def last(self) -> Received:
        return self.received[-1]

    def answer(self, request: Received) -> Answer | str:
        self.received.append(request)
        told = self.script.pop(0) if self.script else None
        if told is not None:
            return told
        if request.path.startswith("/attention/residual/"):
            name = request.path.rpartition("/")[2]
            if self.residuals.pop(name, None) is None:
                return self.problem(410, "gone", "it has expired")
            return 204, {}, b""
        schemas = {"/attention": wire.ATTENTION, "/attention/backward": wire.BACKWARD}
        message = wire.decode(request.body, schemas[request.path])
        request.options = message.options
        request.tensors = {n: as_torch(ref, request.body) for n, ref in message.tensors.items()}
        routes: dict[str, Callable[[Received], Answer]] = {
            "/attention": self.attention, "/attention/backward": self.backward,
        }  # fmt: skip
        return routes[request.path](request)

    def attention(self, request: Received) -> Answer:
        out, lse = attend(request.tensors, request.options)
        options: dict[str, Any] = {"meta": {"backend": "cpu", "precision": "ieee"}}
        if "dropout" in request.options:
            options["meta"]["seed"] = request.options["dropout"].get("seed", 99)
        if request.options.get("save_for_backward"):
            name = options["residual"] = f"id-{next(self._numbers)}_"
            self.residuals[name] = request
        tensors = {"out": out.to(request.tensors["q"].dtype)}
        if request.options.get("return_lse"):
            tensors["lse"] = lse.float()
        return 200, MSGPACK, reply(options, tensors)

    def backward(self, request: Received) -> Answer:
        forward = request
        if "residual" in request.options:
            name = request.options["residual"]
            if name not in self.residuals:
                return self.problem(410, "gone", "it has expired")
            forward = self.residuals[name]
            if request.options.get("release"):
                del self.residuals[name]
        leaves = {
            name: forward.tensors[name].double().requires_grad_()
            for name in ("q", "k", "v", "bias", "sinks")
            if name in forward.tensors
        }
        out, lse = attend({**forward.tensors, **leaves}, forward.options)
        grads = [request.tensors["dout"].double()]
        grads += [request.tensors["dlse"].double()] if "dlse" in request.tensors else []
        found = torch.autograd.grad((out, lse)[: len(grads)], list(leaves.values()), grads)
        tensors = {
            f"d{name}": grad.to(forward.tensors[name].dtype)
            for name, grad in zip(leaves, found, strict=True)
            if name in "qkv" or request.options.get(f"{name}_grad")
        }
        return 200, MSGPACK, reply({"meta": {"backend": "cpu"}}, tensors)

    def wait_free(self, kept: int = 0) -> None:
        """Until no more than that is kept: clients free what they have dropped by themselves."""
        end = time.monotonic() + 20
        while len(self.residuals) > kept:
            assert time.monotonic() < end, self.residuals
            time.sleep(0.005)

    @staticmethod
    def problem(status: int, code: str, detail: str, **more: Any) -> Answer:
        headers = {"content-type": "application/problem+json"}
        if "retry_after" in more:
            headers["retry-after"] = str(more.pop("retry_after"))
        body = {"status": status, "code": code, "detail": detail, "request_id": "req-1", **more}
        return status, headers, json.dumps(body).encode()


def attend(tensors: dict[str, torch.Tensor], options: dict[str, Any]) -> tuple[Any, Any]:
    """(out, lse) in float64, by the formula; dense, one key head for each query head."""
    q, k, v = (tensors[name].double() for name in "qkv")
    s = q @ k.mT * options.get("scale", q.shape[-1] ** -0.5)
    if "bias" in tensors:
        s = s + tensors["bias"].double()
    if options.get("causal"):
        rows, columns = s.shape[-2:]
        s = s.masked_fill(torch.ones(rows, columns).triu(columns - rows + 1).bool(), -torch.inf)
    if "sinks" in tensors:
        sink = tensors["sinks"].double()[:, None, None].expand(*s.shape[:-1], 1)
        s = torch.cat([s, sink], -1)
        v = torch.cat([v, torch.zeros_like(v[..., :1, :])], -2)
    lse = s.logsumexp(-1)
    return (s - lse[..., None]).exp() @ v, lse


def as_torch(ref: wire.TensorRef, body: bytes) -> torch.Tensor:
    raw = b"".join(body[at : at + n] for at, n in ref.segments)
    dtype = getattr(torch, ref.dtype)
    if not raw:
        return torch.empty(ref.shape, dtype=dtype)
    return torch.frombuffer(bytearray(raw), dtype=dtype).reshape(ref.shape)


def reply(options: dict[str, Any], tensors: dict[str, torch.Tensor]) -> bytes:
    packed = {}
    for name, tensor in tensors.items():
        flat = tensor.detach().contiguous().reshape(-1).view(torch.uint8).numpy()
        header = wire.Header(str(tensor.dtype).removeprefix("torch."), tuple(tensor.shape))
        packed[name] = (header, flat.data)
    return wire.encode(options, packed)


def _handler(server: Server) -> type[BaseHTTPRequestHandler]:
    class Handler(BaseHTTPRequestHandler):
        protocol_version = "HTTP/1.1"

        def log_message(self, *args: object) -> None:
            pass

        def handle_any(self) -> None:
            body = self.rfile.read(int(self.headers.get("content-length", 0)))
            headers = {name.lower(): value for name, value in self.headers.items()}
            request = Received(self.command, self.path, headers, body, self.client_address)
            answer = server.answer(request)
            if isinstance(answer, str):
                self.close_connection = True
                if answer == "half":
                    self.wfile.write(b"HTTP/1.1 200 OK\r\ncontent-length: 1000\r\n\r\nabc")
                self.connection.shutdown(socket.SHUT_RDWR)
                return
            status, reply_headers, content = answer
            self.send_response(status)
            for name, value in reply_headers.items():
                self.send_header(name, value)
            self.send_header("content-length", str(len(content)))
            self.end_headers()
            self.wfile.write(content)
            self.close_connection = server.drop_after_reply

        do_GET = do_POST = do_DELETE = handle_any  # noqa: N815

    return Handler


@pytest.fixture
def server() -> Iterator[Server]:
    started = Server()
    yield started
    started.close()


@pytest.fixture
def client(server: Server) -> Iterator[Client]:
    with Client(server.url, timeout=20) as connected:
        yield connected


@pytest.fixture
def waits(monkeypatch: pytest.MonkeyPatch) -> list[float]:
    """Waits between tries, noted and not slept."""
    noted: list[float] = []
    monkeypatch.setattr("flashwire.client.time.sleep", noted.append)
    return noted


@pytest.fixture
def qkv() -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    rng = np.random.default_rng(5)
    return tuple(rng.standard_normal((2, 3, 4, 5), np.float32) for _ in range(3))
