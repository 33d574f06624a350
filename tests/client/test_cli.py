"""The flashwire command against a server on a real socket."""

import json
import re
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from flashwire import cli, wire

JSON = {"content-type": "application/json"}
PLAN = {
    "backend": "cpu", "skipped": [], "visible_pairs": 7,
    "flops_fwd": 12345678, "flops_bwd": 2,
    "bytes_materialised_s": 536870912, "bytes_out_lse": 4, "materialised_ratio": 8.5, "sram_elements": 1024,
    "bytes_min": 5, "bytes_flash": 6,
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
    assert re.search(r"^out +1.5e-07 +2e-07 +3e-06 +\[0, 1\]: 1.25, not 1 +ok$", out, re.MULTILINE)
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
    assert out.rstrip().endswith("OVER")
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
    rows = dict(line.rsplit(maxsplit=1) for line in out.splitlines())
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
    "command", ["", "pla", "plan", "plan --q 1,a", "bench --repeat 0", "info --dtype fp16"]
)
def test_wrong_usage(command: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as caught:
        cli.main(command.split())
    assert caught.value.code == 2
    assert "usage: flashwire" in capsys.readouterr().err


def test_wrong_values(run: Any) -> None:
    assert run("check --shape 1,2,3")[0] == 2
    assert run("check --npz /nowhere.npz")[0] == 2
    assert run("bench --dtype float17")[0] == 3
