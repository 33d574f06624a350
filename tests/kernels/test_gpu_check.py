"""bench/gpu_check.py works before it meets a GPU: in a dry run, and when things break."""

import json
import math
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from unittest import mock

import pytest
import torch

from flashwire_kernels.check import compare
from flashwire_kernels.fused import backend, config
from flashwire_kernels.tensors import Inputs
from flashwire_kernels.testing import make, resolve_tensors
from gpu import cases, conformance, place, report, results, runner
from gpu.items import ERROR, FAIL, MISSED, PASS, SKIPPED
from gpu.runner import Order

BENCH = Path(__file__).parents[2] / "bench"


@pytest.mark.timeout(900)
def test_a_dry_run_does_all_of_it(tmp_path):
    command = [sys.executable, BENCH / "gpu_check.py", "--dry-run", "--out", tmp_path]
    done = subprocess.run(command, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout + done.stderr
    found = json.loads((tmp_path / "gpu_check.json").read_text())
    for part in ("conformance", "compile", "speed", "decode"):
        assert {row["status"] for row in found[part]} == {PASS}, found[part]
    assert len(found["conformance"]) > 20
    for row in found["speed"]:
        for kind in ("forward", "backward"):
            assert row[kind]["tflops"].keys() == row[kind]["ms"].keys() == {"flashwire", "flash"}
        assert set(row["absent"]) == {"cudnn", "flex"}
    assert {"torch", "triton", "device", "date"} <= found["facts"].keys()
    *_, last = done.stdout.splitlines()
    assert "a dry run: no time or rate here means anything" in done.stdout
    assert "decode" in last
    assert "not measured" in last


FAULTY = """
import os, time
from gpu.items import Item
from gpu import child
def raises(place): raise ValueError("of its own")
def aborts(place): os.abort()
def hangs(place): time.sleep(600)
def works(place): return {"status": "pass", "n": 1}
def items(place, options):
    runs = [works, raises, aborts, works, hangs, works]
    return [Item(f"{n} {f.__name__}", f) for n, f in enumerate(runs)]
if __name__ == "__main__":
    child.PARTS["faulty"] = "faulty"
    child.main()
"""


def test_what_breaks_costs_its_own_row(tmp_path, monkeypatch):
    (tmp_path / "faulty.py").write_text(FAULTY)
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    monkeypatch.setattr(runner, "_CHILD", "faulty")
    order = Order(
        part="faulty", folder=tmp_path / "rows", children=1, seconds=1e9, grace=0, dry=True
    )
    original = runner._Crew.look_after

    def look_after(crew):
        """Time is over as soon as an item hangs."""
        if (order.folder / "claim-4").exists():
            crew._until = 0
        original(crew)

    with mock.patch.object(runner._Crew, "look_after", look_after):
        said = []
        rows = runner.run(order, said.append)
    assert [row["item"] for row in rows] == [
        "0 works", "1 raises", "2 aborts", "3 works", "4 hangs", "5 works"]  # fmt: skip
    assert [row["status"] for row in rows] == [PASS, ERROR, ERROR, PASS, ERROR, MISSED]
    assert rows[0]["n"] == 1
    assert rows[1]["error"] == "ValueError: of its own"
    assert "signal 6" in rows[2]["error"]
    assert "signal 9" in rows[4]["error"]
    assert len(said) == 2
    assert runner.about(order.folder)["facts"]["torch"] == torch.__version__


def test_an_item_is_claimed_once(tmp_path):
    assert runner.claim(tmp_path, 3)
    assert not runner.claim(tmp_path, 3)
    assert runner.claim(tmp_path, 4)


def speed_row(item, forward, backward):
    figures = {"forward": forward, "backward": backward}
    passes = {kind: {"tflops": {"flashwire": figure}} for kind, figure in figures.items()}
    return {"item": item, "status": PASS, **passes}


def test_bars():
    parts = {
        "speed": [speed_row("d128 L16384 dense", 600.0, 319.9),
                  {"item": "d128 L16384 causal", "status": ERROR, "error": ""}],
        "decode": [{"item": "batch 64 keys 16384", "status": PASS, "of_copy": 0.61}],
    }  # fmt: skip
    assert [bar["verdict"] for bar in report.bars(parts)] == [
        "pass", "not measured", "FAIL", "not measured", "above the floor"]  # fmt: skip
    assert len(report.bars({"decode": parts["decode"]})) == 1


@pytest.mark.parametrize(
    ("statuses", "code"),
    [([PASS, SKIPPED], 0), ([PASS, FAIL, MISSED], 1), ([ERROR], 1), ([PASS, MISSED], 2), ([], 1)],
)
def test_how_it_ends(statuses, code):
    rows = [{"item": str(n), "status": status} for n, status in enumerate(statuses)]
    assert report.exit_code({"conformance": rows, "speed": [{"status": ERROR}]}) == code


def test_without_a_gpu_it_says_so():
    command = [sys.executable, BENCH / "gpu_check.py", "--only", "decode"]
    done = subprocess.run(command, capture_output=True, text=True, env={"CUDA_VISIBLE_DEVICES": ""})
    assert done.returncode == runner.NO_DEVICE
    assert "no CUDA" in done.stdout


def test_a_gpu_is_timed_from_an_empty_cache_once_all_is_asked_for():
    """The order of what is enqueued, on a GPU that is not there."""
    done = []

    class Event:
        def __init__(self, enable_timing):
            assert enable_timing

        def record(self):
            done.append("event")

        def synchronize(self):
            done.append("wait")

        def elapsed_time(self, other):
            return 1.5

    properties = mock.Mock(uuid="of-no-device")
    with mock.patch.multiple(
        torch.cuda, Event=Event, get_device_properties=lambda device: properties,
        _sleep=lambda cycles: done.append(cycles),
    ):  # fmt: skip
        gpu = place.Gpu()
        gpu._cache = mock.Mock(zero_=lambda: done.append("flush"))
        assert gpu.milliseconds(lambda: done.append("run"), host_ms=1.0) == 1.5
        assert gpu.start_reading()() == {}
    assert [what for what in done if isinstance(what, str)] == [
        "flush",
        "event",
        "run",
        "event",
        "wait",
    ]
    assert done[1] >= 2e6  # cycles, of at most 2 GHz: longer than the host takes


@pytest.mark.parametrize("placed", [conformance._shifted, conformance._rows_apart])
@pytest.mark.parametrize("case", cases.repeated(small=False), ids=str)
def test_what_must_have_equal_bits_runs_in_equal_tiles(case, placed, monkeypatch):
    """On a GPU: an interpreter has the same tiles for all."""
    monkeypatch.setattr(backend, "_arch", lambda device: "sm_90")
    call = make(replace(case, len_q=min(case.len_q, 24), len_k=min(case.len_k, 24)))
    problem = resolve_tensors(call.spec, call.tensors)

    def tiles(call):
        x = Inputs(**{n: t for n, t in call.tensors.items() if not n.startswith("cu_")})
        return [backend._config(kind, problem, x) for kind in config.PASSES]

    elsewhere = conformance._placed(call, placed)
    assert tiles(elsewhere) == tiles(call)
    for name, t in elsewhere.tensors.items():
        torch.testing.assert_close(t, call.tensors[name], rtol=0, atol=0, equal_nan=True)


def test_results_that_are_off_fail():
    one, other = torch.ones(3), torch.tensor([1.0, 1.0, torch.nan])
    assert results.same_bits({"x": ({"out": one}, {"out": one.clone()})})["status"] == PASS
    row = results.same_bits({"x": ({"out": one, "lse": one}, {"out": other, "lse": one})})
    assert row == {"status": FAIL, "error": "other bits x: out"}
    row = results.judged({"out": compare(one, one, 0.1), "lse": compare(other, one, 0.1)})
    assert row["status"] == FAIL
    assert row["of_budget"] == {"out": 0.0, "lse": math.inf}
    assert "lse off by inf" in row["error"]


def test_ratios_are_of_pairs():
    assert place.ratio([1.0, 2.0, 4.0], [2.0, 4.0, 4.0]) == 2.0
