"""What the README and /docs show can be pasted, and gives the numbers it should."""

from __future__ import annotations

import html
import json
import math
import re
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

README = Path(__file__).parents[2] / "README.md"
P = math.e ** (1 / math.sqrt(2))  # exp of the larger score in the examples
WEIGHTS = (1 / (1 + P), P / (1 + P))


def shown(server: Any, path: str) -> Any:
    document = server.http.get("/openapi.json").json()
    return document["paths"][path]["post"]["requestBody"]["content"]["application/json"]["example"]


def run_curl(server: Any, path: str, body: Any) -> Any:
    """As a person pastes it, where curl is there; else the same request by httpx."""
    text = json.dumps(body)
    if shutil.which("curl") is None:
        headers = {"content-type": "application/json"}
        return server.post(path, content=text, headers=headers).json()
    command = ["curl", "-sS", server.url + path, "-H", "Content-Type: application/json"]
    said = subprocess.run([*command, "-d", text], capture_output=True, check=True, timeout=30)
    return json.loads(said.stdout)


def test_the_example_of_attention(server: Any) -> None:
    reply = run_curl(server, "/attention", shown(server, "/attention"))
    less, more = WEIGHTS
    assert reply["out"][0] == [1, 2]
    assert reply["out"][1] == pytest.approx([less + 3 * more, 2 * less + 4 * more], rel=1e-6)
    assert reply["lse"] == pytest.approx([math.log(P), math.log(1 + P)], rel=1e-6)


def test_the_example_of_backward(server: Any) -> None:
    reply = run_curl(server, "/attention/backward", shown(server, "/attention/backward"))
    less, more = WEIGHTS
    assert reply["dv"][0] == pytest.approx([1 + less] * 2, rel=1e-6)
    assert reply["dv"][1] == pytest.approx([more] * 2, rel=1e-6)
    slope = less * more * 4 / math.sqrt(2)  # dp differs by 4 between the two keys
    assert reply["dq"][0] == [0, 0]
    assert reply["dq"][1] == pytest.approx([-slope, slope], rel=1e-6)


def test_the_example_of_check(server: Any) -> None:
    reply = run_curl(server, "/attention/check", shown(server, "/attention/check"))
    assert reply["pass"] is True
    assert reply["tensors"].keys() == {"out", "lse", "dq", "dk", "dv"}
    assert reply["meta"]["want"] == "reference"


def test_the_example_of_plan(server: Any) -> None:
    reply = run_curl(server, "/attention/plan", shown(server, "/attention/plan"))
    assert reply["bytes_materialised_s"] == 536870912
    assert reply["bytes_out_lse"] == 4259840
    assert round(reply["bytes_materialised_s"] / reply["bytes_out_lse"], 2) == 126.03
    assert reply["flops_fwd"] == 2 * (16384 * 16385 // 2) * 256


@pytest.mark.skipif(shutil.which("curl") is None, reason="there is no curl to paste into")
def test_the_curl_of_the_readme(server: Any) -> None:
    text = README.read_text(encoding="utf-8")
    blocks = re.findall(r"^```\w*\n(.*?)^```$(.*?)^$", text, re.DOTALL | re.MULTILINE)
    pasted = [(block, after) for block, after in blocks if block.startswith("curl ")]
    assert pasted, "the README shows no curl"
    for command, _ in pasted:
        local = command.replace("http://127.0.0.1:8000", server.url)
        said = subprocess.run(
            ["bash", "-c", local], capture_output=True, check=True, timeout=30
        ).stdout
        reply = json.loads(said)
        for name in ("out", "lse"):
            written = re.search(rf"`{name}` = `(.*?)`", text)
            assert written
            rounded = [round(x, 4) for x in flat(reply[name])]
            assert rounded == flat(json.loads(written[1])), name


@pytest.mark.skipif(shutil.which("curl") is None, reason="there is no curl to paste into")
def test_the_curls_of_the_docs_page(server: Any) -> None:
    page = server.http.get("/docs").text
    commands = [html.unescape(text) for text in re.findall(r"<pre>(curl .*?)</pre>", page)]
    assert len(commands) == 4
    for command in commands:
        said = subprocess.run(["bash", "-c", command], capture_output=True, check=True, timeout=30)
        assert "code" not in json.loads(said.stdout), command
    assert "http://" not in page.replace(server.url, "")  # nothing is loaded from elsewhere


def test_the_python_of_the_readme(server: Any) -> None:
    text = README.read_text(encoding="utf-8")
    blocks = re.findall(r"^```python\n(.*?)^```$", text, re.DOTALL | re.MULTILINE)
    assert len(blocks) == 2, "NumPy and torch"
    said = []
    for block in blocks:
        local = block.replace("http://127.0.0.1:8000", server.url)
        command = [sys.executable, "-W", "error", "-c", local]
        ran = subprocess.run(command, capture_output=True, check=True, timeout=60, text=True)
        said.append(ran.stdout.strip())
    shape = "(1, 8, 128, 64)"
    assert said == [f"{shape} (1, 8, 128) {shape} cpu True", "torch.Size([1, 8, 128, 64])"]


def flat(values: Any) -> list[float]:
    return [x for v in values for x in flat(v)] if isinstance(values, list) else [values]
