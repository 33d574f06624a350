"""Keys, certificates and what replies tell, on real servers."""

from __future__ import annotations

import contextlib
import json
import os
import re
import signal
import socket
import ssl
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import httpx
import msgpack
import numpy as np
import pytest

from flashwire import Client, errors
from flashwire_service.errors import ROWS

HERE = Path(__file__).parent
SMALL: dict[str, Any] = {"q": [[1, 0]], "k": [[1, 0], [0, 1]], "v": [[1, 2], [3, 4]]}
RAISE, DIE, SLEEP = 6001.0, 6002.0, 6003.0  # faults of faulty_worker.py
CONNECTIONS = 8
PATIENCE_S = 30.0


def until(check: Callable[[], Any]) -> Any:
    end = time.monotonic() + PATIENCE_S
    while not (found := check()):
        assert time.monotonic() < end, "waited in vain"
        time.sleep(0.02)
    return found


def bearer(key: str) -> dict[str, str]:
    return {"authorization": f"Bearer {key}"}


# Keys


@pytest.fixture
def keys(tmp_path: Path) -> Callable[[str], str]:
    """Write the file of keys, all at once; its path."""
    path = tmp_path / "keys.toml"

    def write(text: str) -> str:
        fresh = tmp_path / "fresh"
        fresh.write_text(text)
        fresh.chmod(0o600)
        fresh.replace(path)
        return str(path)

    return write


def test_a_stranger_is_refused_before_the_body_comes(narrow: Any) -> None:
    head = b"POST /attention HTTP/1.1\r\nhost: x\r\ncontent-length: 1000000\r\n"
    for key in (b"", b"authorization: Bearer wrong-key\r\n"):
        assert narrow.raw(head + key + b"\r\n").startswith(b"HTTP/1.1 401 ")


def reload(server: Any, event: str) -> dict[str, Any]:
    """SIGHUP, and what the supervisor logs of it."""
    before = server.log.count(event)
    server.process.send_signal(signal.SIGHUP)
    until(lambda: server.log.count(event) > before)
    (*_, line) = [line for line in server.log.splitlines() if event in line]
    logged: dict[str, Any] = json.loads(line)
    return logged


def test_keys_come_and_go_while_it_serves(
    start_server: Callable[..., Any], keys: Callable[[str], str]
) -> None:
    path = keys('alice = "key-of-alice"\nscraper = { key = "key-to-scrape", may = ["metrics"] }')
    server = start_server("--api-keys-file", path, "--frontends", "2")

    def status(key: str, path: str = "/info") -> int:
        with httpx.Client(base_url=server.url, headers=bearer(key)) as http:  # any front end
            return http.get(path).status_code

    assert (status("key-of-alice"), status("key-of-bob"), status("key-to-scrape")) == (
        200,
        401,
        403,
    )
    assert status("key-to-scrape", "/metrics") == 200
    slow = np.zeros((8, 8, 1024, 16), np.float32)
    answers: list[Any] = []

    def ask() -> None:
        with Client(server.url, api_key="key-of-alice", retries=0) as client:
            answers.append(client.attention(slow, slow, slow, backend="reference"))

    asking = threading.Thread(target=ask)
    asking.start()
    until(lambda: any(
        "flashwire_requests_in_flight 2.0"
        in httpx.get(server.url + "/metrics", headers=bearer("key-to-scrape")).text
        for _ in range(4)
    ))  # fmt: skip
    keys('bob = "key-of-bob"')
    assert reload(server, "keys read")["names"] == ["bob"]
    until(lambda: [status("key-of-alice") for _ in range(8)] == [401] * 8)
    assert [status("key-of-bob") for _ in range(8)] == [200] * 8
    asking.join()
    assert answers[0].out.shape == slow.shape  # what was in flight ended as if nothing had been

    keys('bob = "secret"\neve = "key-of-eve"')
    said = reload(server, "keys not read")["mistakes"]
    assert said == ["'bob': key: must be 8 to 512 printable ASCII characters, no spaces; "
                    "or sha256: and 64 hexadecimal digits"]  # fmt: skip
    assert (status("key-of-bob"), status("key-of-eve")) == (200, 401)
    for pid in front_pids(server):  # a new front end has the keys that hold, not those of the start
        os.kill(pid, signal.SIGKILL)
    with contextlib.suppress(httpx.TransportError):
        status("key-of-bob")
    until(lambda: len(front_pids(server)) == 4)
    server.http.headers.update(bearer("key-of-bob"))
    server.wait_ready()
    assert (status("key-of-alice"), status("key-of-bob")) == (401, 200)
    assert "secret" not in server.log
    assert "key-of" not in server.log
    assert server.stop() == 0


def front_pids(server: Any) -> list[int]:
    """Of every front end that became ready."""
    lines = [json.loads(line) for line in server.log.splitlines() if '"ready"' in line]
    return [line["pid"] for line in lines if line["child"].startswith("front")]


# TLS


def test_tls(
    start_server: Callable[..., Any],
    make_certificate: Callable[[str], Any],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    made, other = make_certificate("a"), make_certificate("b")
    server = start_server(*made.flags, ca=made.cert)
    assert server.url.startswith("https://")
    reply = server.http.get("/healthz")
    assert reply.headers["strict-transport-security"].startswith("max-age=")
    x = np.random.default_rng(0).standard_normal((1, 1, 1, 2**20)).astype(np.float32)
    with httpx.Client(verify=server.trust) as http, Client(server.url, http=http) as client:
        one = np.ones((1, 1, 1, 1), np.float32)
        np.testing.assert_array_equal(client.attention(one, one, x).out, x)
        check_only_tls(server)
        with monkeypatch.context() as patched:
            patched.setenv("SSL_CERT_FILE", str(made.cert))
            with Client(server.url) as trusting:
                assert trusting.ready()
        check_versions(server)
        check_refusals(server)

        first = ssl.get_server_certificate((server.host, server.port))
        made.cert.write_text("broken")
        reload(server, "certificate not read")
        assert ssl.get_server_certificate((server.host, server.port)) == first
        made.cert.write_bytes(other.cert.read_bytes())
        made.key.write_bytes(other.key.read_bytes())
        reload(server, "certificate read")
        assert ssl.get_server_certificate((server.host, server.port)) == other.cert.read_text()
        np.testing.assert_array_equal(client.attention(one, one, x).out, x)  # its connection lives
    assert server.stop() == 0


def check_only_tls(server: Any) -> None:
    with Client(server.url, retries=0) as client, pytest.raises(errors.ConnectionLost) as caught:
        client.info()
    assert "certificate is not trusted" in str(caught.value)
    plain = server.url.replace("https", "http")
    with Client(plain, retries=0) as client, pytest.raises(errors.ConnectionLost):
        client.info()


def check_versions(server: Any) -> None:
    """1.2 and 1.3 are spoken, and what is older is not."""
    for version, spoken in (
        (ssl.TLSVersion.TLSv1_1, False), (ssl.TLSVersion.TLSv1_2, True),
        (ssl.TLSVersion.TLSv1_3, True),
    ):  # fmt: skip
        old = pytest.warns(DeprecationWarning, match="TLSv1_1 is deprecated")
        with contextlib.nullcontext() if spoken else old:
            asking = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
            asking.set_ciphers("ALL:@SECLEVEL=0")
            asking.load_verify_locations(cadata=server_certificate(server))
            asking.minimum_version = asking.maximum_version = version
        with contextlib.ExitStack() as stack:
            sock = stack.enter_context(socket.create_connection((server.host, server.port), 10))
            if not spoken:
                stack.enter_context(pytest.raises((ssl.SSLError, ConnectionError)))
            with asking.wrap_socket(sock, server_hostname=server.host) as connection:
                assert connection.version() == version.name.replace("_", ".")


def server_certificate(server: Any) -> str:
    return ssl.get_server_certificate((server.host, server.port))


def check_refusals(server: Any) -> None:
    """A client in full swing reads why; one that speaks no HTTP does too, with the headers."""
    head = b"POST /attention HTTP/1.1\r\nhost: x\r\ncontent-length: 99999999999\r\n\r\n"
    for sent, status in ((head + bytes(2**20), b"413"), (b"garbage\r\n\r\n", b"400")):
        with (
            socket.create_connection((server.host, server.port), 10) as sock,
            server.trust.wrap_socket(sock, server_hostname=server.host) as connection,
        ):
            connection.sendall(sent)
            received = b""
            while b"request_id" not in received:
                received += connection.recv(65536)
        assert received.startswith(b"HTTP/1.1 " + status)
        assert b"strict-transport-security" in received
        assert b"\r\nx-content-type-options: nosniff\r\n" in received


def test_nothing_a_request_says_makes_the_server_call_anyone(server: Any) -> None:
    """No URL in it is fetched: every socket of its processes is a caller's, or leads to another."""
    url = "http://192.0.2.1/x"
    for change in ({"layout": url}, {"backend": url}, {"q": url}, {url: url}, {"residual": url}):
        server.post("/attention", json=SMALL | change, headers={"origin": url, "referer": url})
    server.http.get("/", headers={"x-forwarded-for": url, "x-forwarded-host": "192.0.2.1"})
    server.raw(f"GET {url} HTTP/1.1\r\nhost: x\r\nconnection: close\r\n\r\n".encode())
    assert {port for pid in processes(server) for port in tcp_ports(pid)} == {server.port}


def processes(server: Any) -> list[int]:
    children = Path(f"/proc/{server.process.pid}/task/{server.process.pid}/children").read_text()
    return [server.process.pid, *map(int, children.split())]


def tcp_ports(pid: int) -> set[int]:
    """Its own ports of every TCP socket that a process has."""
    inodes = set()
    for fd in Path(f"/proc/{pid}/fd").iterdir():
        with contextlib.suppress(FileNotFoundError):
            inodes.add(os.readlink(fd).removeprefix("socket:[").removesuffix("]"))
    rows = [line.split() for table in ("tcp", "tcp6")
            for line in Path(f"/proc/{pid}/net/{table}").read_text().splitlines()[1:]]  # fmt: skip
    return {int(row[1].rpartition(":")[2], 16) for row in rows if row[9] in inodes}


# What replies tell

LEAKS = re.compile(
    r"Traceback|\bFile \"|\bline [0-9]|site-packages|\.py\b|\.so\b|0x[0-9a-f]{6}"
    r"|(?<![\w/:])/[\w.-]+/[\w.-]+"  # a path of two names or more
    r"|secret-of"
)


class Provoked:
    """Replies to requests that fail, by code. `secret-of-alice` is all over what Alice sent."""

    def __init__(self, server: Any) -> None:
        self.server = server
        self.texts: dict[str, str] = {}
        # No connection is kept: the server ends one that was idle for a second, maybe just then.
        self.http = httpx.Client(
            base_url=server.url, headers=bearer("key-of-bob"), timeout=60,
            limits=httpx.Limits(max_keepalive_connections=0),
        )  # fmt: skip

    def note(self, status: int, body: bytes, headers: str) -> str:
        document = json.loads(body)
        code: str = document["code"]
        assert status == document["status"] == ROWS[code].status
        del document["type"]
        self.texts[code] = json.dumps(document) + headers
        return code

    def ask(self, method: str, path: str, **more: Any) -> str:
        reply = self.http.request(method, path, **more)
        if reply.status_code < 400:
            return ""
        return self.note(reply.status_code, reply.content, str(reply.headers))

    def post(self, change: dict[str, Any], **more: Any) -> str:
        return self.ask("POST", "/attention", json=SMALL | change, **more)

    def raw(self, sent: bytes) -> str:
        head, _, body = self.server.raw(sent).partition(b"\r\n\r\n")
        return self.note(int(head.split()[1]), body, head.decode())


def alice_was_here(server: Any) -> None:
    """Her tensors, options and ids hold a word that nobody else may ever see."""
    secret = np.frombuffer(b"secret-of-alice!" * 4096, np.float32).reshape(1, 8, -1, 8)
    headers = bearer("key-of-alice") | {"x-request-id": "secret-of-alice"}
    with httpx.Client(base_url=server.url, headers=headers) as http:
        tensor = {"dtype": "float32", "shape": secret.shape, "data": secret.tobytes()}
        body = msgpack.packb(dict.fromkeys("qkv", tensor) | {"save_for_backward": True})
        assert http.post("/attention", content=body).status_code == 200
        wrong = SMALL | {"secret-of-alice": 1, "layout": "secret-of-alice"}
        assert "secret-of-alice" in http.post("/attention", json=wrong).text


def provoke(bob: Provoked) -> None:
    """Failures of requests, of which the service knows nothing afterwards."""
    with httpx.Client(base_url=bob.server.url) as stranger:
        reply = stranger.get("/info")
        assert bob.note(reply.status_code, reply.content, str(reply.headers)) == "unauthorized"
    assert bob.ask("GET", "/metrics") == "forbidden"
    assert bob.ask("GET", "/etc/passwd") == "not_found"
    assert bob.ask("PUT", "/attention") == "method_not_allowed"
    assert bob.ask("POST", "/attention", content=b"\xc1") == "malformed"
    assert bob.post({}, headers={"content-encoding": "br"}) == "unsupported_media_type"
    assert bob.ask("POST", "/attention", content=bytes(5000)) == "too_large"
    assert bob.raw(b"GET / HTTP/1.1\r\nx: " + b"y" * 99_999 + b"\r\n\r\n") == "headers_too_large"
    assert bob.raw(b"GET / HTTP/1.1\r\nhost: x\r\n") == "request_timeout"
    assert bob.post({"scale": "wide", "layout": 3, "q": [[]]}) == "invalid"
    assert bob.post({"backend": "triton"}) == "unsupported_backend"
    saved = bob.http.post("/attention", json=SMALL | {"save_for_backward": True}).json()
    residual = f"/attention/residual/{saved['residual']}"
    assert bob.ask("DELETE", residual) == ""
    assert bob.ask("DELETE", residual) == "gone"
    long = {"q": [[1]] * 60, "k": [[1]] * 60, "v": [[1]] * 60}
    assert bob.ask("POST", "/attention/check", json={"request": long}) == "not_enough_memory"
    assert bob.post({"scale": RAISE}) == "internal"


def provoke_the_clock(bob: Provoked) -> None:
    """One request computes, one waits, and there is no place for a third."""
    sleep = {"scale": SLEEP}
    assert bob.post(sleep, headers={"flashwire-timeout-ms": "100"}) == "deadline_exceeded"
    codes: list[str] = []
    threads = [threading.Thread(target=lambda: codes.append(bob.post(sleep))) for _ in range(3)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert "queue_full" in codes


def provoke_a_crowd(bob: Provoked) -> None:
    """Every place is taken by a request whose head is half there."""
    for _ in range(10):
        if "too_many_connections" in bob.texts:
            return
        with contextlib.ExitStack() as crowd:
            for _ in range(CONNECTIONS):
                address = (bob.server.host, bob.server.port)
                crowd.enter_context(socket.create_connection(address)).sendall(b"GET /info HT")
            bob.raw(b"GET /no-such-thing HTTP/1.1\r\nhost: x\r\nconnection: close\r\n\r\n")
    raise AssertionError("there was always room")


def provoke_deaths(bob: Provoked) -> None:
    """The one worker dies of a request, and its successor of the same one."""
    for code in ("worker_died", "quarantined"):
        assert bob.post({"scale": DIE}) == code
        assert bob.post({}) == "no_worker"
        bob.server.wait_ready()
        assert bob.post({}) == ""
    assert bob.post({"scale": DIE}) == "quarantined"
    assert bob.post({}) == ""


def provoke_the_end(bob: Provoked) -> None:
    """What is in flight when the grace period is over."""
    codes: list[str] = []
    thread = threading.Thread(target=lambda: codes.append(bob.post({"scale": SLEEP})))
    thread.start()
    time.sleep(0.5)
    bob.server.process.send_signal(signal.SIGTERM)
    thread.join()
    assert codes == ["draining"]


def test_no_failure_tells_what_is_not_its_callers(
    start_server: Callable[..., Any], keys: Callable[[str], str]
) -> None:
    path = keys(
        'alice = "key-of-alice"\n'
        'bob = { key = "key-of-bob", may = ["compute"], max_body_bytes = 4096 }'
    )
    server = start_server(
        "--api-keys-file", path, "--queue-requests", "1", "--keep-alive-s", "1", "--grace-s", "0.1",
        "--max-materialise-bytes", "16KiB", "--max-connections", str(CONNECTIONS),
        program=(str(HERE / "faulty_service.py"),),
    )  # fmt: skip
    alice_was_here(server)
    bob = Provoked(server)
    for stage in (provoke, provoke_the_clock, provoke_a_crowd, provoke_deaths, provoke_the_end):
        stage(bob)
    assert set(bob.texts) == set(ROWS)
    for code, text in bob.texts.items():
        assert not LEAKS.search(text), (code, text)
    assert "secret-of-alice" not in server.log.replace('"request_id": "secret-of-alice"', "")


@pytest.mark.parametrize(
    "text",
    ["Traceback (most recent call last)", 'File "x"', "at /home/me/x", "(/usr/lib)", "in worker.py",
     "at 0x7f12ab", "'/root/.ssh'"],
)  # fmt: skip
def test_the_pattern_of_leaks_finds_them(text: str) -> None:
    assert LEAKS.search(text)
