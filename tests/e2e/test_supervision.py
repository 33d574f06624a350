"""Workers that die or hang under requests, in a service of two workers and two front ends."""

from __future__ import annotations

import concurrent.futures
import os
import signal
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import httpx
import pytest

HERE = Path(__file__).parent
DIE, SLEEP = 6002.0, 6003.0  # faults of faulty_worker.py
SMALL: dict[str, Any] = {"q": [[1, 0]], "k": [[1, 0], [0, 1]], "v": [[1, 2], [3, 4]]}
PATIENCE_S = 60.0


def wait_until(check: Callable[[], Any]) -> Any:
    end = time.monotonic() + PATIENCE_S
    while not (result := check()):
        assert time.monotonic() < end, "waited in vain"
        time.sleep(0.05)
    return result


def events(server: Any, name: str) -> list[str]:
    return [line for line in server.log.splitlines() if f'"event": "{name}"' in line]


def wait_ready(server: Any, starts: int) -> None:
    """Until so many workers have become ready, and any front end that is asked knows of two."""

    def everywhere() -> bool:
        replies = [httpx.get(server.url + "/readyz", timeout=PATIENCE_S) for _ in range(8)]
        return all(reply.json().get("workers") == 2 for reply in replies)

    wait_until(lambda: sum('"child": "worker' in e for e in events(server, "ready")) == starts)
    wait_until(everywhere)


def code(reply: httpx.Response) -> str:
    return "" if reply.status_code == 200 else str(reply.json()["code"])


def ask(server: Any, **change: Any) -> httpx.Response:
    """Over a connection of its own, so that any front end may take it."""
    return httpx.post(server.url + "/attention", json=SMALL | change, timeout=PATIENCE_S)


def test_workers_die_and_hang_and_every_request_is_answered(
    start_server: Callable[..., Any],
) -> None:
    server = start_server(
        "--workers", "2", "--frontends", "2", program=(str(HERE / "faulty_service.py"),)
    )
    wait_ready(server, starts=2)
    a_kill_while_it_computes(server)
    a_stop(server)
    a_poison(server)
    a_front_end_that_hangs(server)
    everyone = children(server)
    server.process.kill()
    server.process.wait()
    wait_until(lambda: not any(alive(pid) for pid in everyone))


def a_kill_while_it_computes(server: Any) -> None:
    """The other worker answers what was computing, and what waited behind it."""
    with concurrent.futures.ThreadPoolExecutor() as pool:
        slow = [pool.submit(ask, server, scale=SLEEP) for _ in range(4)]
        time.sleep(1.0)
        os.kill(server.worker_pids()[0], signal.SIGKILL)
        replies = [asked.result() for asked in slow]
    assert [code(reply) for reply in replies] == [""] * 4
    assert all(reply.json()["out"] == replies[0].json()["out"] for reply in replies)
    wait_ready(server, starts=3)


def a_stop(server: Any) -> None:
    """What a stopped worker had taken goes to the other one."""
    stopped = server.worker_pids()[0]
    os.kill(stopped, signal.SIGSTOP)
    with concurrent.futures.ThreadPoolExecutor() as pool:
        replies = list(pool.map(lambda _: ask(server), range(8)))
    assert [code(reply) for reply in replies] == [""] * 8
    wait_until(lambda: not alive(stopped))
    wait_ready(server, starts=4)


def a_poison(server: Any) -> None:
    """It ends both workers, and no more; whichever front end is asked, and asked again."""
    assert code(ask(server, scale=DIE)) == "quarantined"
    unready = server.http.get("/readyz")
    assert unready.status_code == 503
    assert len(unready.json()["reasons"]) == 2
    wait_until(lambda: len(events(server, "suspect")) >= 2)
    wait_ready(server, starts=6)
    died = len(events(server, "died"))
    assert {code(ask(server, scale=DIE)) for _ in range(10)} == {"quarantined"}
    front = next(pid for pid in children(server) if pid not in server.worker_pids())
    os.kill(front, signal.SIGKILL)  # its successor is told, too
    server.http.close()
    server.http = httpx.Client(base_url=server.url, timeout=PATIENCE_S)
    wait_until(lambda: len(events(server, "ready")) > 3 and front not in children(server))
    assert {code(ask(server, scale=DIE)) for _ in range(10)} <= {"quarantined", "no_worker"}
    assert len(events(server, "died")) == died + 1
    wait_until(lambda: not server.http.get("/readyz").is_error)
    counts = {"SIGKILL": 1, "hung": 1, "exit_1": 2}
    metrics = server.http.get("/metrics").text
    assert "flashwire_quarantined_requests 1.0" in metrics
    for cause, count in counts.items():
        assert f'flashwire_worker_restarts_total{{cause="{cause}"}} {count}.0' in metrics
    assert ask(server).json()["out"] == [pytest.approx([1.66, 2.66], abs=0.01)]


def a_front_end_that_hangs(server: Any) -> None:
    hung = next(pid for pid in children(server) if pid not in server.worker_pids())
    os.kill(hung, signal.SIGSTOP)
    wait_until(lambda: any(f'"pid": {hung}' in line for line in events(server, "hung")))
    wait_until(lambda: not alive(hung))
    assert code(ask(server)) == ""


def children(server: Any) -> list[int]:
    text = Path(f"/proc/{server.process.pid}/task/{server.process.pid}/children").read_text()
    return [int(pid) for pid in text.split()]


def alive(pid: int) -> bool:
    """Whether the process is there and no zombie."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rsplit(")", 1)[1].split()[0] != "Z"
    except (FileNotFoundError, ProcessLookupError):
        return False
