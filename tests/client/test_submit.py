"""Client.submit and flashwire.torch.submit: calls beside each other."""

import threading
from concurrent.futures import CancelledError
from typing import Any

import numpy as np
import pytest
import torch

from flashwire import Client, errors
from flashwire.torch import flash_attention, submit


class Gate:
    """A call that counts who is in it, and waits to be let go."""

    def __init__(self) -> None:
        self.inside, self.most, self.entered = 0, 0, threading.Semaphore(0)
        self.open, self._lock = threading.Event(), threading.Lock()

    def __call__(self, value: int) -> int:
        with self._lock:
            self.inside += 1
            self.most = max(self.most, self.inside)
        self.entered.release()
        assert self.open.wait(20)
        with self._lock:
            self.inside -= 1
        return value


def test_calls_run_beside_each_other_up_to_a_limit(server: Any) -> None:
    gate = Gate()
    with Client(server.url, concurrency=3) as client:
        futures = [client.submit(gate, n) for n in range(7)]
        for _ in range(3):
            assert gate.entered.acquire(timeout=20)
        assert not gate.entered.acquire(timeout=0.05)
        gate.open.set()
        assert [future.result(20) for future in futures] == list(range(7))
    assert gate.most == 3


def test_results_are_those_of_the_call(client: Client, qkv: Any) -> None:
    q, k, v = qkv
    futures = [client.submit(client.attention, q * n, k, v, causal=True) for n in range(5)]
    for n, future in enumerate(futures):
        want = client.attention(q * n, k, v, causal=True)
        np.testing.assert_array_equal(future.result(20).out, want.out)


def test_errors_are_those_of_the_call(server: Any, client: Client, qkv: Any) -> None:
    server.script = [server.problem(422, "invalid", "does not fit", field="k")]
    with pytest.raises(errors.Invalid, match="does not fit"):
        client.submit(client.attention, *qkv).result(20)
    with pytest.raises(TypeError, match="'causl'"):
        client.submit(client.attention, *qkv, causl=True).result(20)


def test_what_waits_can_be_cancelled(server: Any) -> None:
    gate = Gate()
    with Client(server.url, concurrency=1) as client:
        running, waiting = client.submit(gate, 1), client.submit(gate, 2)
        assert gate.entered.acquire(timeout=20)
        assert not running.cancel()
        assert waiting.cancel()
        last = client.submit(gate, 3)
        closing = threading.Thread(target=client.close)
        closing.start()
        with pytest.raises(CancelledError):
            last.result(20)
        gate.open.set()
        closing.join(20)
        assert running.result(20) == 1
        with pytest.raises(errors.FlashwireError, match="closed"):
            client.submit(gate, 4)


def test_a_client_without_submit_has_no_threads(server: Any, qkv: Any) -> None:
    before = threading.active_count()
    with Client(server.url) as client:
        client.attention(*qkv)
        client.submit(client.attention, *qkv).result(20)
    assert not [t for t in threading.enumerate() if t.name.startswith("flashwire_")]
    assert threading.active_count() <= before + 1  # the stub's own, for a connection
    with pytest.raises(ValueError, match="concurrency must be at least 1, got 0"):
        Client(server.url, concurrency=0)


@pytest.fixture
def leaves() -> list[torch.Tensor]:
    generator = torch.Generator().manual_seed(2)
    return [torch.randn(1, 2, 3, 4, generator=generator).requires_grad_() for _ in "qkv"]


def test_graphs_are_those_of_the_call(client: Client, leaves: list[torch.Tensor]) -> None:
    def gradients(outs: list[torch.Tensor]) -> Any:
        return torch.autograd.grad(sum(out.square().sum() for out in outs), leaves)  # type: ignore[arg-type]

    scales = (0.5, 1.0, 2.0)
    futures = [submit(*leaves, scale=s, client=client) for s in scales]
    found = gradients([future.result(20) for future in futures])
    wanted = gradients([flash_attention(*leaves, scale=s, client=client) for s in scales])
    for got, want in zip(found, wanted, strict=True):
        assert torch.equal(got, want)


def test_the_moment_of_the_call_counts(server: Any, client: Client, leaves: Any) -> None:
    """Its grad mode, its autocast, and the order in which it draws seeds."""
    with torch.no_grad():
        out = submit(*leaves, client=client).result(20)
    assert not out.requires_grad
    with torch.autocast("cpu", torch.bfloat16):
        future = submit(*leaves, client=client)
    assert future.result(20).dtype == torch.bfloat16
    torch.manual_seed(1)
    futures = [submit(*leaves, dropout=0.5, client=client) for _ in range(2)]
    for future in futures:
        future.result(20)
    sent = [received.options.get("dropout") for received in server.received]
    drawn = {dropout["seed"] for dropout in sent if dropout}
    torch.manual_seed(1)
    assert drawn == {int(torch.randint(-(2**63), 2**63 - 1, ())) % 2**64 for _ in range(2)}
    with pytest.raises(errors.Invalid, match="causal"):
        submit(*leaves, causal="yes", client=client)  # type: ignore[arg-type]
