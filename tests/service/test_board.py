"""Numbers on shared memory: one process counts, others read, its successor goes on with them."""

from __future__ import annotations

import functools
import os

import pytest

from flashwire_service import meter
from flashwire_service.front.answered import Answered
from flashwire_service.front.metrics import Metrics
from flashwire_service.ipc import board as boards
from flashwire_service.ipc.board import Board, Region
from flashwire_service.ipc.memory import Memory
from flashwire_service.meter import Meter
from flashwire_service.settings import Settings

SETTINGS = Settings(frontends=2, workers=2)
FACTS = {0: {"device": "cpu", "device_name": 'A "CPU"'}}


@pytest.fixture
def board() -> Board:
    return Board.alone(SETTINGS.frontends, SETTINGS.workers)


REFUSED = functools.partial(
    Answered, request_id="x", headers={}, scheme="http", method="POST", route="/attention",
    status=429, code="queue_full", key="", received=100, sent=10, began=1000.0, answer=None,
)  # fmt: skip


def said(board: Board) -> dict[str, float]:
    """What front-0 says, by name and labels as they are written."""
    text = Metrics(SETTINGS, board).exposition(FACTS).decode()
    lines = (line.rsplit(" ", 1) for line in text.splitlines() if not line.startswith("#"))
    return {name: float(value) for name, value in lines}


def test_another_process_reads_what_was_written() -> None:
    processes = SETTINGS.frontends, SETTINGS.workers
    with Memory.create(boards.size_of(*processes)) as memory:
        board = Board(memory.view, *processes)
        other = Board.receive(os.dup(memory.fd), *processes)
    region = board.regions["worker-1"]
    region.begin(7, 1e9)
    region.row(("a", "ä"), 2)[1] = 2.5
    region.row(("b",), 1)[0] = 1.0
    (seen,) = [r for name, r in other.regions.items() if r.pid]
    assert seen is other.regions["worker-1"]
    assert (seen.pid, seen.started) == (7, 1e9)
    assert {key: list(numbers) for key, numbers in seen.rows()} == {
        ("a", "ä"): [0.0, 2.5], ("b",): [1.0]
    }  # fmt: skip
    region.row(("a", "ä"), 2)[0] += 1
    assert next(numbers[0] for key, numbers in seen.rows() if key[0] == "a") == 1.0


def test_a_full_region_says_so_and_keeps_what_it_has(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(boards, "REGION_BYTES", 128)
    region = Region.alone()
    region.row(("first",), 1)[0] = 1.0
    with pytest.raises(BufferError, match="second"):
        region.row(("second", "x" * 100), 1)
    assert [key for key, _ in region.rows()] == [("first",)]


def test_whoever_takes_the_place_counts_on_and_holds_nothing(board: Board) -> None:
    for count in (1.0, 2.0):
        counting = Meter(board.regions["front-1"])
        counting.add(meter.IN_FLIGHT, 1)
        counting.add(meter.RECEIVED, 10)
        counting.observe(meter.QUEUE_WAIT, 0.05)  # a bucket holds its bound
        found = said(board)
        assert len(list(counting.region.rows())) == 3  # no row is made twice
        assert found["flashwire_requests_in_flight"] == 1.0
        assert found["flashwire_request_body_bytes_total"] == 10 * count
        assert found['flashwire_queue_wait_seconds_bucket{le="0.025"}'] == 0.0
        assert found['flashwire_queue_wait_seconds_bucket{le="0.05"}'] == count
        assert found["flashwire_queue_wait_seconds_count"] == count
        assert found["flashwire_queue_wait_seconds_sum"] == pytest.approx(0.05 * count)
    meter.leave(board.regions["front-1"])
    found = said(board)
    assert found["flashwire_requests_in_flight"] == 0.0
    assert found["flashwire_request_body_bytes_total"] == 20.0
    assert 'flashwire_process_start_time_seconds{process="front-1"}' not in found


def test_front_ends_are_added_up(board: Board) -> None:
    for index, seconds in ((0, 0.2), (1, 20.0)):
        front = Metrics(SETTINGS, board, index)
        front.answered(REFUSED(ended=1000.0 + seconds))
        front.watch(meter.CONNECTIONS, lambda index=index: 1.0 + index)
        front.refresh()
    found = said(board)  # taken by a new front-0, which has no connections
    labels = (
        'error_type="queue_full",http_request_method="POST",'
        'http_response_status_code="429",http_route="/attention"'
    )
    name = "http_server_request_duration_seconds"
    assert found[f"{name}_count{{{labels}}}"] == 2.0
    assert found[f'{name}_bucket{{{labels},le="10.0"}}'] == 1.0
    assert found['flashwire_rejected_requests_total{code="queue_full"}'] == 2.0
    assert found['flashwire_rejected_requests_total{code="malformed"}'] == 0.0
    assert found["flashwire_response_body_bytes_total"] == 20.0
    assert found["flashwire_connections"] == 2.0


def test_workers_are_told_apart(board: Board) -> None:
    for index, held in ((0, 100.0), (1, 7.0)):
        Meter(board.regions[f"worker-{index}"]).set(meter.RESIDUAL_BYTES, held, str(index))
    found = said(board)
    assert found['flashwire_residual_bytes{worker="0"}'] == 100.0
    assert found['flashwire_residual_bytes{worker="1"}'] == 7.0
    assert found['flashwire_worker_up{worker="0"}'] == 1.0
    assert found['flashwire_worker_up{worker="1"}'] == 0.0
    info = 'flashwire_worker_info{device="cpu",device_name="A \\"CPU\\"",worker="0"}'
    assert found[info] == 1.0


def test_memory_of_processes_that_run_is_looked_up(board: Board) -> None:
    board.regions["supervisor"].begin(os.getpid(), 123.0)
    board.regions["worker-0"].begin(2**22 + 1, 124.0)  # beyond any pid
    found = said(board)
    memory = 'flashwire_process_resident_memory_bytes{process="supervisor"}'
    assert 2**20 < found[memory] <= found[memory.replace("memory_bytes", "memory_peak_bytes")]
    assert found['flashwire_process_start_time_seconds{process="supervisor"}'] == 123.0
    assert memory.replace("supervisor", "worker-0") not in found
