"""Memory that one caller has used and another gets: nothing of the first is ever in it.

Alice fills the memory of every process with a word. Then Bob asks for all that a reply may hold
without having been computed: rows that see nothing, rows of no sequence, gradients of hidden keys,
padding. A page, a buffer or a cache that was passed on uncleared would show her word, or at least
not the zeros that must be there.
"""

from __future__ import annotations

import socket
import threading
from typing import Any

import msgpack
import numpy as np
import pytest

from flashwire import wire
from flashwire_service.ipc.memory import Memory

WORD = b"secret-of-alice!"
ROWS = 8192
AFTER_ALICE = pytest.mark.usefixtures("alice")
BACKENDS = pytest.mark.parametrize("backend", ["cpu", "reference"])


def filled(*shape: int) -> np.ndarray[Any, Any]:
    """float32 whose bytes are the word, again and again."""
    count = int(np.prod(shape)) * 4 // len(WORD)
    return np.frombuffer(WORD * count, np.float32).reshape(shape)


def body(options: dict[str, Any], **tensors: Any) -> bytes:
    ready = {
        name: (wire.Header(str(a.dtype), a.shape), memoryview(a.tobytes()))
        for name, a in tensors.items()
    }
    return wire.encode(options, ready)


@pytest.fixture
def alice(server: Any) -> None:
    """Her word is in every buffer there is: inputs, results, residuals, shared memory."""
    x, one = filled(16, 8, 32, 128), np.ones((16, 8, 32, 128), np.float32)  # 2 MiB
    for backend in ("cpu", "reference"):
        options = {"backend": backend, "window": [0, 0]}
        reply = server.post("/attention", content=body(options, q=one, k=one, v=x))
        assert WORD in reply.content  # each row sees itself alone: out is v
        saved = body({**options, "save_for_backward": True}, q=x, k=x, v=x)
        assert server.post("/attention", content=saved).is_success
        back = body(options, q=x, k=x, v=x, dout=x)
        assert server.post("/attention/backward", content=back).is_success


def arrays(content: bytes) -> dict[str, np.ndarray[Any, Any]]:
    """The tensors of a reply. The decoder has seen that padding is zeros."""
    assert WORD not in content
    message = wire.decode(content, wire.REPLY)
    found = {}
    for name, ref in message.tensors.items():
        raw = b"".join(content[at : at + size] for at, size in ref.segments)
        found[name] = np.frombuffer(raw, ref.dtype).reshape(ref.shape)
    return found


@AFTER_ALICE
@BACKENDS
def test_rows_of_no_sequence(server: Any, backend: str) -> None:
    """One sequence of one row, and thousands of rows behind it."""
    x = np.ones((ROWS, 4, 16), np.float32)
    one = np.array([0, 1], np.int64)
    options = {"backend": backend}
    tensors = {"q": x, "k": x, "v": x, "cu_seqlens_q": one, "cu_seqlens_k": one}
    asked = body({**options, "return_lse": True}, **tensors)
    got = arrays(server.post("/attention", content=asked).content)
    assert (got["out"][:1] == 1).all()
    assert not got["out"][1:].any()
    assert (got["lse"][1:] == -np.inf).all()
    asked = body(options, **tensors, dout=x)
    got = arrays(server.post("/attention/backward", content=asked).content)
    for name in ("dq", "dk", "dv"):
        assert not got[name][1:].any()


@AFTER_ALICE
@BACKENDS
def test_rows_that_see_nothing(server: Any, backend: str) -> None:
    """Of 1024 keys each hidden, and of no key at all."""
    q, k = np.ones((1, 4, 1024, 32), np.float32), np.ones((1, 4, 1024, 32), np.float32)
    mask = np.zeros((1, 1, 1024, 1024), bool)
    options = {"backend": backend}
    for more in (
        {"q": q, "k": k, "v": k, "mask": mask},
        {"q": q, "k": k[:, :, :0], "v": k[:, :, :0]},
    ):
        asked = body({**options, "return_lse": True}, **more)
        got = arrays(server.post("/attention", content=asked).content)
        assert not got["out"].any()
        assert (got["lse"] == -np.inf).all()
        asked = body(options, **more, dout=q)
        got = arrays(server.post("/attention/backward", content=asked).content)
        assert not any(got[name].any() for name in ("dq", "dk", "dv"))


@AFTER_ALICE
@BACKENDS
def test_padding_and_odd_sizes(server: Any, backend: str) -> None:
    """Sizes that leave gaps in every allocation, and a reply with five payloads to align."""
    rng = np.random.default_rng(0)
    for length, dim in ((1, 1), (7, 3), (129, 33), (1000, 5)):
        q, k, v, dout = (rng.standard_normal((3, length, dim), np.float32) for _ in range(4))
        bias, sinks = rng.standard_normal((length, length)), rng.standard_normal(3)
        options = {"backend": backend, "bias_grad": True, "sinks_grad": True}
        asked = body(options, q=q, k=k, v=v, dout=dout, bias=bias, sinks=sinks)
        got = arrays(server.post("/attention/backward", content=asked).content)
        assert set(got) == {"dq", "dk", "dv", "dbias", "dsinks"}
        for array in got.values():
            assert np.abs(array).max() < 1e4  # her word is 1e30, taken for a number


@AFTER_ALICE
def test_a_body_that_ends_early_is_not_filled_up(server: Any) -> None:
    """What was promised and did not come is nobody's: there is no answer made of it."""
    x = np.ones((1, 1, 2**18, 1), np.float32)
    whole = body({}, q=x[:, :, :1], k=x, v=x)
    half = whole[: len(whole) // 2]
    head = b"POST /attention HTTP/1.1\r\nhost: x\r\n"
    with socket.create_connection((server.host, server.port), 10) as sock:
        sock.sendall(head + b"content-length: %d\r\n\r\n" % len(whole) + half)
        sock.shutdown(socket.SHUT_WR)
        received = b""
        while piece := sock.recv(65536):
            received += piece
    assert not received.startswith(b"HTTP/1.1 2")
    chunked = b"connection: close\r\ntransfer-encoding: chunked\r\n\r\n"
    received = server.raw(head + chunked + b"%x\r\n%b\r\n0\r\n\r\n" % (len(half), half))
    assert received.startswith(b"HTTP/1.1 400 ")
    assert b"truncated" in received
    server.check_unharmed()


def test_a_plain_memfd_is_zeros_whatever_was_there_before() -> None:
    size = 8 * 2**20
    for _ in range(4):
        with Memory.create(size) as memory:
            assert not any(memory.view)
            memory.view[:] = WORD * (size // len(WORD))
            memory.grow(size + 5000)
            assert not any(memory.view[size:])


def test_answers_of_two_callers_at_once_do_not_mix(narrow: Any) -> None:
    """Each sends one value for v, and gets that value back, in every byte, or a refusal."""
    wrong: list[Any] = []

    def ask(key: str, value: float) -> None:
        x = np.full((1, 2, 256, 64), value, np.float32)
        packed = body({}, q=x, k=x, v=x)
        for _ in range(15):
            reply = narrow.http.post(
                "/attention", content=packed, headers={"authorization": f"Bearer {key}"}
            )
            if reply.status_code == 429:
                continue
            content = reply.content
            ref = wire.decode(content, wire.REPLY).tensors["out"]
            got = np.frombuffer(content, np.float32, count=x.size, offset=ref.segments[0][0])
            if not np.allclose(got, value, rtol=1e-5):
                wrong.append((key, got))

    askers = [
        threading.Thread(target=ask, args=(("first-key", "second-key")[n % 2], float(n + 1)))
        for n in range(6)
    ]
    for asker in askers:
        asker.start()
    for asker in askers:
        asker.join()
    assert not wrong


def test_the_word_would_be_found() -> None:
    """As bytes of a reply, and as a number where zeros must be."""
    assert WORD in filled(4, 4).tobytes()
    assert (np.abs(filled(4, 4)) > 1e4).any()
    assert WORD in msgpack.packb(filled(4, 4).tobytes())
