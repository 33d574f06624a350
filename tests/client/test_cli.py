"""The flashwire command against a server on a real socket."""

import json
import os
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from flashwire import cli, wire

JSON = {"content-type": "application/json"}
PLAN = {
    "backend": "cpu", "skipped": [], "visible_pairs": 7,
    "flops_fwd": 12345678, "flops_bwd": 2,
    "bytes_materialised_s": 536870912, "bytes_out_lse": 4,
    "materialised_ratio": 8.5, "sram_elements": 1024, "bytes_min": 5, "bytes_flash": 6,
    "traffic_reduction": 8.0, "intensity": 9.0, "peak_bytes": 10, "tiles": {"total": 4},
    "wire_bytes_up": 11, "wire_bytes_down": 12, "estimated_ms": None,
}  # fmt: skip


def report(passed: bool) -> tuple[int, dict[str, str], bytes]:
    found = {
        "pass": passed, "max_abs": 1.5e-7, "rel": 2e-7, "budget": 3e-6,
        "worst": {"index": [0, 1], "got": 1.25, "want": 1.0},
    }  # fmt: skip
    return 200, JSON, json.dumps({"pass": passed, "tensors": {"out": found}}).encode()


@pytest.fixture
def run(server: Any, capsys: pytest.CaptureFixture[str]) -> Any:
    def call(command: str) -> tuple[int, str, str]:
        name, *rest = command.split()
        code = cli.main([name, "--url", server.url, *rest])
        return code, *capsys.readouterr()

    return call


def test_info(server: Any, run: Any) -> None:
    server.script = [(200, JSON, b'{"device": "cpu"}')]
    assert run("info") == (0, '{\n  "device": "cpu"\n}\n', "")


def test_plan(server: Any, run: Any) -> None:
    server.script = [(200, JSON, json.dumps(PLAN).encode())] * 2
    code, out, _ = run(
        "plan --q 1,1,16384,128 --causal --window 4, --sram-elements 131072 --dtype bf16"
    )
    assert code == 0
    assert re.search(r"^bytes_materialised_s +536,870,912$", out, re.MULTILINE)
    message = wire.decode(server.last.body, wire.PLAN)
    assert message.options == {"causal": True, "window": [4, None], "sram_elements": 131072}
    assert message.tensors["q"].header == wire.Header("bfloat16", (1, 1, 16384, 128))
    assert json.loads(run("plan --q 1,1,16384,128 --json")[1]) == PLAN


def test_check_of_a_random_case(server: Any, run: Any) -> None:
    server.script = [report(True), report(True), report(False)]
    code, out, _ = run("check --shape 1,4,6,8 --kv-heads 2 --kv-length 5 --causal --grad")
    assert code == 0
    row = r"^out +1.5e-07 +2e-07 +3e-06 +5.00% +ok +at \[0, 1\]: got 1.25, want 1$"
    assert re.search(row, out, re.MULTILINE)
    shapes = {n: r.shape for n, r in wire.decode(server.last.body, wire.CHECK).tensors.items()}
    assert shapes == {
        "request.q": (1, 4, 6, 8), "request.k": (1, 2, 5, 8), "request.v": (1, 2, 5, 8),
        "dout": (1, 4, 6, 8),
    }  # fmt: skip
    first = server.last.body
    run("check --shape 1,4,6,8 --kv-heads 2 --kv-length 5 --causal --grad")
    assert server.last.body == first
    code, out, _ = run("check --layout blhd --shape 1,4,6,8 --case-seed 1 --backends cpu triton")
    assert code == 1
    assert "OVER" in out
    assert out.endswith("\nover budget\n")
    message = wire.decode(server.last.body, wire.CHECK)
    assert message.tensors["request.q"].shape == (1, 6, 4, 8)
    assert message.options["backends"] == ["cpu", "triton"]


def test_check_of_a_file(server: Any, run: Any, tmp_path: Path) -> None:
    path = tmp_path / "case.npz"
    x = np.ones((1, 1, 2, 3), np.float32)
    np.savez(path, q=x, k=x, v=x, mask=np.array([True, False]), out=x)
    server.script = [report(True)]
    assert run(f"check --npz {path}")[0] == 0
    names = set(wire.decode(server.last.body, wire.CHECK).tensors)
    assert names == {"request.q", "request.k", "request.v", "request.mask", "mine.out"}
    np.savez(path, q=x, k=x, w=x)
    code, _, said = run(f"check --npz {path}")
    assert code == 2
    assert "case.npz: w; known: q, k, v" in said


def test_bench(server: Any, run: Any) -> None:
    code, out, _ = run("bench --shape 1,2,16,8 --repeat 3")
    assert code == 0
    assert len(server.received) == 4
    rows = dict(re.split("  +", line) for line in out.splitlines())
    assert rows["shape"] == "q 1x2x16x8, k 1x2x16x8, v 1x2x16x8"
    assert rows["dtype"] == "float32"
    assert rows["requests"] == "3"
    assert rows["payload MB"] == f"{4 * 2 * 16 * 8 * 4 / 1e6:.3f}"
    assert float(rows["median ms"]) > 0


def test_a_refusal_is_one_line(server: Any, run: Any) -> None:
    server.script = [server.problem(422, "invalid", "k: heads must\ndivide q's (4), got 3")]
    code, out, said = run("bench --shape 1,2,16,8")
    assert (code, out) == (3, "")
    assert said == "flashwire: k: heads must divide q's (4), got 3 [422, request req-1]\n"


def test_no_server(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("FLASHWIRE_URL", "http://127.0.0.1:1")
    monkeypatch.setattr("flashwire.client.time.sleep", lambda _: None)
    assert cli.main(["info"]) == 3
    assert capsys.readouterr().err == (
        "flashwire: http://127.0.0.1:1: connection refused (4 tries). "
        "Is flashwire-serve running there?\n"
    )


def test_the_key_comes_from_the_environment(
    server: Any, run: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("FLASHWIRE_API_KEY", "s3cret")
    server.script = [(200, JSON, b"{}")]
    run("info")
    assert server.last.headers["authorization"] == "Bearer s3cret"


@pytest.mark.parametrize(
    ("command", "words"),
    [
        ("", "required: COMMAND"),
        ("pla", "invalid choice: 'pla'"),
        ("plan", "required: --q"),
        ("plan --q 1,a", "--q: must be sizes, e.g. 1,8,256,64; got '1,a'"),
        ("check --shape 1,2,3", "--shape: must be B,H,L,D, e.g. 1,8,256,64; got '1,2,3'"),
        ("bench --shape=-1,2,3,4", "--shape: must be B,H,L,D"),
        ("bench --window 5", "--window: must be LEFT,RIGHT, e.g. 128,0; got '5'"),
        ("bench --scale big", "--scale: must be a number, got 'big'"),
        ("bench --seed 0.5", "--seed: must be an integer, got '0.5'"),
        ("bench --repeat 0", "--repeat: must be at least 1"),
        ("info --dtype fp16", "unknown: --dtype fp16"),
        ("check --causel", "unknown: --causel; did you mean 'causal'?"),
        ("check --causal_aling=top_left", "did you mean 'causal-align'?"),
        ("check --gard", "did you mean 'grad'?"),
        ("check --softmax-scale 2", "did you mean 'scale'?"),
    ],
)
def test_wrong_usage(command: str, words: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as caught:
        cli.main(command.split())
    assert caught.value.code == 2
    said = capsys.readouterr().err
    assert said.startswith("usage: flashwire")
    assert words in said


@pytest.mark.parametrize(
    ("flags", "options"),
    [
        ("--window -1,0", {"window": [None, 0]}),
        ("--window=-1,0", {"window": [None, 0]}),
        ("--window ,3 --causal", {"window": [None, 3], "causal": True}),
        ("--scale -1e-3", {"scale": -1e-3}),
        ("--scale -.5", {"scale": -0.5}),
        ("--dropout 0.5 --seed 3", {"dropout": {"p": 0.5, "seed": 3}}),
    ],
)
def test_options(server: Any, run: Any, flags: str, options: dict[str, Any]) -> None:
    assert run(f"bench --shape 1,1,2,4 --repeat 1 {flags}")[0] == 0
    message = wire.decode(server.last.body, wire.ATTENTION)
    assert message.options == options
    assert {ref.dtype for ref in message.tensors.values()} == {"float32"}


def test_the_same_dtype_by_default(server: Any, run: Any) -> None:
    server.script = [(200, JSON, json.dumps(PLAN).encode()), report(True)]
    run("plan --q 1,8,4,8 --k 1,2,9,8")
    planned = wire.decode(server.last.body, wire.PLAN).tensors
    assert {(n, r.dtype, r.shape) for n, r in planned.items()} == {
        ("q", "float32", (1, 8, 4, 8)), ("k", "float32", (1, 2, 9, 8)),
        ("v", "float32", (1, 2, 9, 8)),
    }  # fmt: skip
    run("check --shape 1,1,2,4")
    checked = wire.decode(server.last.body, wire.CHECK).tensors
    assert {ref.dtype for ref in checked.values()} == {"float32"}


@pytest.mark.parametrize("command", ["info", "plan", "check", "bench"])
def test_help_says_what_is_taken_by_default(
    command: str, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit):
        cli.main([command, "--help"])
    said = " ".join(capsys.readouterr().out.split())
    assert "Exit codes: 0 done" in said
    assert "--timeout SECONDS default: 60.0" in said
    if command != "info":
        for words in ("of q, k and v; default: float32", "default: D**-0.5", "default: auto"):
            assert words in said


def test_a_reader_that_leaves_is_no_error(server: Any) -> None:
    server.script = [(200, JSON, json.dumps({"x": "y" * 2**20}).encode())]
    code = "import sys; from flashwire.cli import main; sys.exit(main())"
    command = [sys.executable, "-c", code, "info", "--url", server.url]
    reading, writing = os.pipe()
    os.close(reading)
    try:
        done = subprocess.run(
            command, stdout=writing, stderr=subprocess.PIPE, timeout=60, check=False
        )
    finally:
        os.close(writing)
    assert (done.returncode, done.stderr) == (141, b"")


def test_wrong_values(run: Any) -> None:
    assert run("check --npz /nowhere.npz")[0] == 2
    assert run("bench --dtype float17")[0] == 3
