"""What docs/client.md shows runs, and names all that there is."""

from __future__ import annotations

import re
import shlex
import struct
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from flashwire import Client, cli, errors, options, wire

DOC = (Path(__file__).parents[2] / "docs" / "client.md").read_text(encoding="utf-8")
COMMANDS = [
    line
    for block in re.findall(r"^```sh\n(.*?)^```$", DOC, re.DOTALL | re.MULTILINE)
    for line in block.splitlines()
]


def test_the_python_runs(server: Any) -> None:
    """All blocks in a row, as one session."""
    blocks = re.findall(r"^```python\n(.*?)^```$", DOC, re.DOTALL | re.MULTILINE)
    assert len(blocks) == 7
    session = "\n".join(blocks).replace("http://127.0.0.1:8000", server.url)
    ran = subprocess.run(
        [sys.executable, "-W", "error", "-c", session],
        capture_output=True,
        timeout=60,
        text=True,
        check=False,
    )
    assert ran.returncode == 0, ran.stderr
    said = ran.stdout.splitlines()
    assert [line.split()[0] for line in said[:6]] == ["tensor", "out", "lse", "dq", "dk", "dv"]
    assert said[6].endswith("within budget")


def test_the_python_of_transformers_md_runs(server: Any) -> None:
    text = (Path(__file__).parents[2] / "docs" / "transformers.md").read_text(encoding="utf-8")
    blocks = re.findall(r"^```python\n(.*?)^```$", text, re.DOTALL | re.MULTILINE)
    assert len(blocks) == 2
    session = "\n".join(blocks).replace("http://127.0.0.1:8000", server.url)
    names: dict[str, Any] = {}
    exec(session, names)  # noqa: S102  # here, where transformers and JAX are loaded once
    names["client"].close()


@pytest.mark.parametrize("command", COMMANDS)
def test_the_commands_run(
    server: Any, command: str, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("FLASHWIRE_URL", server.url)
    program, *arguments = shlex.split(command, comments=True)
    assert program == "flashwire"
    assert cli.main(arguments) == 0, capsys.readouterr().err
    assert capsys.readouterr().out


def test_everything_is_there() -> None:
    assert len(COMMANDS) == 4
    methods = {n for n, value in vars(Client).items() if callable(value) and n[0] != "_"}
    assert methods >= {"attention", "ready", "close"}
    for name in methods:
        assert f"`{name}(" in DOC, name
    for name in options.AttentionOptions.__annotations__:
        assert f"`{name}`" in DOC, name
    for code, status in errors.STATUS.items():
        kind = errors.BY_CODE[code].__name__
        assert f"`{kind}` (`{code}`, {status})" in " ".join(DOC.split()), code


def test_the_bytes_of_the_wires_example_are_answered(server: Any) -> None:
    """docs/wire.md shows this file byte by byte."""
    sent = (Path(__file__).parents[1] / "wire" / "golden" / "attention.msgpack").read_bytes()
    headers = {"content-type": wire.MEDIA_TYPE}
    reply = server.post("/attention", content=sent, headers=headers)
    assert reply.status_code == 200, reply.text
    out = wire.decode(reply.content, wire.REPLY).tensors["out"]
    ((start, length),) = out.segments
    assert out.header == wire.Header("float32", (1, 2))
    assert struct.unpack("<2f", reply.content[start : start + length]) == (2.0, 3.0)
