"""A device that fails in the middle of a request, in a worker of a whole service."""

import json
import os
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path

import httpx
import pytest

from flashwire_service.process import DEVICE_LOST

HERE = Path(__file__).parent
FATAL_SCALE = 0.123  # lost_worker.py
SCRIPT = """
import sys
from flashwire_service import cli, supervisor
supervisor.WORKER = "lost_worker"
sys.exit(cli.main(["--port", "0", "--threads", "1"]))
"""
PATIENCE_S = 60.0
SMALL = {"q": [[1, 0]], "k": [[1, 0], [0, 1]], "v": [[1, 2], [3, 4]], "scale": 1.0}
SMALL_OUT = [1.5378828427399903, 2.5378828427399903]  # p = e/(e+1), by hand


@pytest.fixture
def service(tmp_path):
    """(an HTTP client, the process, what it has logged so far)"""
    log = tmp_path / "log"
    with log.open("wb") as stderr:
        process = subprocess.Popen(
            [sys.executable, "-c", SCRIPT],
            stdout=subprocess.PIPE, stderr=stderr, text=True, start_new_session=True,
            env={**os.environ, "PYTHONPATH": os.pathsep.join([str(HERE), *sys.path])},
        )  # fmt: skip
    url = process.stdout.readline().split()[-1]
    with httpx.Client(base_url=url, timeout=PATIENCE_S) as client:
        yield client, process, lambda: [json.loads(line) for line in log.read_text().splitlines()]
    if process.poll() is None:
        os.killpg(process.pid, signal.SIGKILL)
        process.wait()
    process.stdout.close()


def wait_until(check):
    deadline = time.monotonic() + PATIENCE_S
    while not check():
        assert time.monotonic() < deadline, "waited in vain"
        time.sleep(0.02)


def test_a_lost_device_ends_its_worker_and_nothing_else(service):
    client, process, log = service
    answers = {}

    def ask(name, body):
        answers[name] = client.post("/attention", json=body)

    def pid():
        return client.get("/info").json()["workers"][0]["pid"]

    def is_ready():
        return client.get("/readyz").status_code == 200

    wait_until(is_ready)
    first = pid()
    saved = client.post("/attention", json={**SMALL, "save_for_backward": True}).json()["residual"]

    running = threading.Thread(target=ask, args=("running", {**SMALL, "scale": FATAL_SCALE}))
    queued = threading.Thread(target=ask, args=("queued", SMALL))
    for thread, in_flight in ((running, 2), (queued, 3)):  # the question itself is one of them
        thread.start()
        gauge = f"flashwire_requests_in_flight {in_flight}.0"
        wait_until(lambda gauge=gauge: gauge in client.get("/metrics").text)
    running.join()
    queued.join()
    assert answers["running"].json()["code"] == "worker_died"
    assert answers["queued"].json()["code"] in ("worker_died", "no_worker")  # if it came too late
    for answer in answers.values():
        assert answer.status_code == 503
        assert int(answer.headers["retry-after"]) >= 1
        assert "CUDA" not in answer.text

    wait_until(is_ready)
    assert pid() != first
    assert client.post("/attention", json=SMALL).json()["out"] == [pytest.approx(SMALL_OUT)]
    asked = {"residual": saved, "dout": [[1, 1]]}
    assert client.post("/attention/backward", json=asked).status_code == 410
    assert 'flashwire_worker_up{worker="0"} 1.0' in client.get("/metrics").text

    died = [event for event in log() if event["event"] == "died"]
    assert [event["reason"] for event in died] == [f"exit code {DEVICE_LOST}"]
    (failure,) = [event for event in log() if event["event"] == "job failed"]
    assert "illegal memory access" in failure["error"]
    process.send_signal(signal.SIGTERM)
    assert process.wait(PATIENCE_S) == 0
