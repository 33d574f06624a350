"""What batching is worth: small requests per second of many callers, with it and without.

    python bench/batching.py [--rounds 9] [--seconds 1.5] [--tokens 8192] [--quick]

Two services, alike but for `--batch-tokens`, in one run. In each round both are asked, in an order
that turns, by 8 and by 16 callers, for requests of mixed and of equal lengths; ratios are medians
over rounds. Callers are connections of one process that sends what was encoded before: what is
left of the machine is the service's. Before that, what a worker computes of eight such requests one
by one and together, by the time of its own thread, whatever else the machine does. Nothing is
promised on a CPU.
"""

from __future__ import annotations

import argparse
import re
import selectors
import socket
import statistics
import time
import urllib.request
from collections.abc import Callable, Iterator, Sequence

import torch

from cpu import processor
from flashwire import wire
from flashwire_kernels import api
from flashwire_kernels.packing import Packing
from flashwire_kernels.types import AttentionSpec
from load.service import Service

HEADS, DIM = 4, 64
LENGTHS = {"mixed": (8, 13, 21, 34, 55, 17, 40, 27), "equal": (27,) * 8}
CALLERS = (8, 16)
_HEAD_END = b"\r\n\r\n"


def main(chosen: argparse.Namespace) -> None:
    rounds, seconds = (1, 0.3) if chosen.quick else (chosen.rounds, chosen.seconds)
    print(f"{processor()}; {HEADS} heads, D {DIM}, float32, causal; {rounds} rounds of {seconds} s")
    for lengths, sizes in LENGTHS.items():
        one_by_one, together = _computing(sizes, 5 if chosen.quick else 200)
        print(
            f"{lengths} lengths, computing {len(sizes)} of them: one by one {one_by_one:.2f} ms, "
            f"together {together:.2f} ms, ratio {one_by_one / together:.2f}"
        )
    with Service() as off, Service("--batch-tokens", str(chosen.tokens)) as on:
        services = {"off": off, "on": on}
        for service in services.values():
            service.wait_whole()
        for lengths, sizes in LENGTHS.items():
            bodies = [_request(length) for length in sizes]
            for callers in CALLERS:
                _report(lengths, callers, services, bodies, rounds, seconds)


def _computing(sizes: Sequence[int], rounds: int) -> tuple[float, float]:
    """Milliseconds, medians: forwards one by one, and packed together."""
    torch.set_num_threads(1)
    requests = [_tensors(length) for length in sizes]
    spec = AttentionSpec(causal=True)

    def one_by_one() -> object:
        return [api.forward(*request, spec=spec) for request in requests]

    def together() -> object:
        calls = [
            api.Call.of(spec, dict(zip("qkv", request, strict=True)), {}) for request in requests
        ]
        packing = Packing.of(calls, "cpu")
        return packing and [out.contiguous() for out, _ in packing.forward()]

    found: dict[Callable[[], object], list[float]] = {one_by_one: [], together: []}
    for _ in range(rounds):
        for compute, times in found.items():
            started = time.thread_time()
            compute()
            times.append(1000 * (time.thread_time() - started))
    first, second = (statistics.median(times) for times in found.values())
    return first, second


def _tensors(length: int) -> list[torch.Tensor]:
    """q, k and v."""
    generator = torch.Generator().manual_seed(length)
    return [torch.randn(1, HEADS, length, DIM, generator=generator) for _ in range(3)]


def _report(
    lengths: str,
    callers: int,
    services: dict[str, Service],
    bodies: Sequence[bytes],
    rounds: int,
    seconds: float,
) -> None:
    rates: dict[str, list[float]] = {name: [] for name in services}
    before = _batches(services["on"])
    for number in range(rounds):
        for name in sorted(services, reverse=bool(number % 2)):
            rates[name].append(_rate(services[name], callers, bodies, seconds))
    batches, requests = (a - b for a, b in zip(_batches(services["on"]), before, strict=True))
    ratio = statistics.median(a / b for a, b in zip(rates["on"], rates["off"], strict=True))
    off, on = (statistics.median(rates[name]) for name in ("off", "on"))
    print(
        f"{lengths} lengths, {callers:2} callers: off {off:5.0f}/s, on {on:5.0f}/s, "
        f"ratio {ratio:.2f}; {requests / batches:.1f} requests a batch"
    )


def _request(length: int) -> bytes:
    """A whole HTTP request."""
    header = wire.Header("float32", (1, HEADS, length, DIM))
    data = (bytes(t.numpy()) for t in _tensors(length))
    payloads = {name: (header, raw) for name, raw in zip("qkv", data, strict=True)}
    body = wire.encode({"causal": True}, payloads)
    head = f"POST /attention HTTP/1.1\r\nhost: flashwire\r\ncontent-length: {len(body)}"
    return head.encode() + _HEAD_END + body


def _rate(service: Service, callers: int, bodies: Sequence[bytes], seconds: float) -> float:
    """Replies per second to so many connections, each with one request under way."""
    with selectors.DefaultSelector() as selector:
        for caller in range(callers):
            sock = socket.create_connection((service.host, service.port))
            selector.register(sock, selectors.EVENT_READ, _Caller(sock, bodies, caller))
        end, answered = time.monotonic() + seconds, 0
        for key in list(selector.get_map().values()):
            key.data.send()
        while time.monotonic() < end:
            for key, _ in selector.select(0.1):
                answered += key.data.receive()
        for key in list(selector.get_map().values()):
            key.data.sock.close()
    return answered / seconds


class _Caller:
    """A connection that asks again as soon as it is answered."""

    def __init__(self, sock: socket.socket, bodies: Sequence[bytes], first: int) -> None:
        self.sock = sock
        self._bodies = _turning(bodies, first)
        self._got = bytearray()

    def send(self) -> None:
        self._got.clear()
        self.sock.sendall(next(self._bodies))

    def receive(self) -> bool:
        """Whether a reply is complete; the next request is then under way."""
        piece = self.sock.recv(2**18)
        if not piece:
            raise ConnectionError("the service closed a connection")
        self._got += piece
        head, found, body = bytes(self._got).partition(_HEAD_END)
        if not found:
            return False
        if not head.startswith(b"HTTP/1.1 200 "):
            raise RuntimeError(head.decode())
        length = re.search(rb"content-length: (\d+)", head, re.I)
        if length is None or len(body) < int(length[1]):
            return False
        self.send()
        return True


def _turning(bodies: Sequence[bytes], first: int) -> Iterator[bytes]:
    while True:
        yield bodies[first % len(bodies)]
        first += 1


def _batches(service: Service) -> tuple[float, float]:
    """How many there were, and the requests in all of them."""
    with urllib.request.urlopen(f"http://{service.host}:{service.port}/metrics") as reply:
        text = reply.read().decode()
    count, total = (
        float(found[1])
        if (found := re.search(rf"flashwire_batch_requests_{name} (\S+)", text))
        else 0.0
        for name in ("count", "sum")
    )
    return count, total


if __name__ == "__main__":
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    )
    parser.add_argument("--rounds", type=int, default=9)
    parser.add_argument("--seconds", type=float, default=1.5, help="of each measurement")
    parser.add_argument(
        "--tokens", type=int, default=8192, help="--batch-tokens of the one service"
    )
    parser.add_argument("--quick", action="store_true", help="only that it runs")
    main(parser.parse_args())
