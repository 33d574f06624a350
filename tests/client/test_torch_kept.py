"""What a server keeps for a graph is freed when the graph is, however it goes."""

import gc
import logging
import os
import subprocess
import sys
import threading
import time
from typing import Any

import pytest
import torch

from flashwire import Client
from flashwire.torch import flash_attention, kept


@pytest.fixture
def x() -> torch.Tensor:
    return torch.randn(1, 2, 3, 4, generator=torch.Generator().manual_seed(1)).requires_grad_()


def test_a_graph_that_is_dropped(server: Any, client: Client, x: torch.Tensor) -> None:
    outs = [flash_attention(x, x, x, client=client) for _ in range(3)]
    assert len(server.residuals) == 3
    del outs[:2]
    server.wait_free(1)
    outs[0].sum().backward()
    assert server.residuals == {}
    deletions = [sent.path for sent in server.received if sent.method == "DELETE"]
    assert len(deletions) == 2, "what a backward has freed is not freed again"


def test_a_graph_in_a_cycle(server: Any, client: Client, x: torch.Tensor) -> None:
    cycle: list[Any] = [flash_attention(x, x, x, client=client)]
    cycle.append(cycle)
    del cycle
    assert len(server.residuals) == 1
    gc.collect()
    server.wait_free()


def test_an_exception_between_forward_and_backward(
    server: Any, client: Client, x: torch.Tensor
) -> None:
    def train() -> None:
        loss = flash_attention(x, x, x, client=client).sum()
        raise FloatingPointError(f"a loss of {loss}")

    with pytest.raises(FloatingPointError) as caught:
        train()
    assert len(server.residuals) == 1, "the traceback holds the graph"
    del caught
    gc.collect()
    server.wait_free()


def test_closing_the_client_frees_what_is_kept(server: Any, x: torch.Tensor) -> None:
    with Client(server.url) as client:
        out = flash_attention(x, x, x, client=client)
        assert len(server.residuals) == 1
    assert server.residuals == {}
    assert out.requires_grad


def test_the_end_of_the_interpreter(server: Any) -> None:
    code = f"""
import torch
from flashwire import Client
from flashwire.torch import flash_attention
x = torch.randn(2, 3, requires_grad=True)
client = Client({server.url!r})
graph = flash_attention(x, x, x, client=client)
cycle = [flash_attention(x, x, x, client=client)]
cycle.append(cycle)
"""
    ran = subprocess.run(
        [sys.executable, "-W", "error", "-c", code], capture_output=True, text=True, timeout=60
    )
    assert (ran.returncode, ran.stderr) == (0, "")
    assert server.residuals == {}
    assert sum(sent.method == "DELETE" for sent in server.received) == 2


def test_dropping_a_graph_does_not_wait_for_the_network(
    client: Client, x: torch.Tensor, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Nor for a lock, nor does it raise: it may happen within any line."""
    freed: list[tuple[str, threading.Thread]] = []
    stalled, done = threading.Event(), threading.Event()

    def release(self: Client, saved: str, **_: Any) -> None:
        assert stalled.wait(20)
        freed.append((saved, threading.current_thread()))
        done.set()

    monkeypatch.setattr(Client, "release", release)
    out = flash_attention(x, x, x, client=client)
    with kept._lock:
        del out
    assert not freed
    stalled.set()
    assert done.wait(20)
    assert freed[0][1] is not threading.current_thread()


def test_a_release_that_fails_is_noted_and_left_to_time(
    server: Any, client: Client, x: torch.Tensor, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.DEBUG, kept.__name__)
    out = flash_attention(x, x, x, client=client)
    server.script = [server.problem(500, "internal", "a fault")]
    del out
    end = time.monotonic() + 20
    while not caplog.records:
        assert time.monotonic() < end
        time.sleep(0.005)
    assert "left to expire: a fault" in caplog.records[0].getMessage()
    second = flash_attention(x, x, x, client=client)
    del second
    server.wait_free(1)


@pytest.mark.filterwarnings("ignore:.*fork:DeprecationWarning")
def test_a_child_frees_nothing_of_its_parents(server: Any, client: Client, x: torch.Tensor) -> None:
    out = flash_attention(x, x, x, client=client)
    child = os.fork()
    if child == 0:
        del out
        with Client(server.url) as own:
            flash_attention(x, x, x, client=own)
        os._exit(0)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
    server.wait_free(1)
    out.sum().backward()
    assert server.residuals == {}
    assert "residual" in server.last.options


def test_saved_tensors_may_be_copied(server: Any, client: Client, x: torch.Tensor) -> None:
    """A copy of the ticket is worth nothing, and the tensors travel."""
    with torch.autograd.graph.saved_tensors_hooks(torch.clone, lambda t: t):
        out = flash_attention(x, x, x, client=client)
    server.wait_free()
    found = torch.autograd.grad(out.sum(), x)
    assert "residual" not in server.last.options
    want = torch.autograd.grad(flash_attention(x, x, x, client=client).sum(), x)
    assert torch.equal(*found, *want)
