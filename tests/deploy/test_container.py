"""What Dockerfile and docker-compose.yml promise, held against the project they package."""

from __future__ import annotations

import http.server
import json
import re
import shlex
import subprocess
import sys
import threading
import tomllib
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest
import yaml

from flashwire_service import tls
from flashwire_service.settings import Settings, table

ROOT = Path(__file__).parents[2]
TARGETS = ("cpu", "gpu")
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
VARIABLES = {row.variable for row in table()}


@dataclass
class Stage:
    """A stage of a Dockerfile: its instructions, those of the stage it starts from included."""

    instructions: list[tuple[str, str]] = field(default_factory=list)

    def all(self, name: str) -> list[str]:
        return [text for instruction, text in self.instructions if instruction == name]

    def last(self, name: str) -> str:
        return self.all(name)[-1]


def read_stages() -> dict[str, Stage]:
    text = (ROOT / "Dockerfile").read_text(encoding="utf-8")
    text = re.sub(r"^#.*\n", "", text, flags=re.MULTILINE).replace("\\\n", " ")
    stages: dict[str, Stage] = {}
    for line in filter(None, map(str.strip, text.splitlines())):
        instruction, rest = line.split(maxsplit=1)
        if instruction == "FROM":
            base, _, name = rest.split()
            stages[name] = Stage(list(stages[base].instructions) if base in stages else [])
            stages[name].instructions.append(("FROM", base))
        else:
            stages[list(stages)[-1]].instructions.append((instruction, rest))
    return stages


STAGES = read_stages()


def health_command(target: str) -> list[str]:
    options, command = STAGES[target].last("HEALTHCHECK").split("CMD", maxsplit=1)
    assert "--timeout" in options
    return list(json.loads(command))


@pytest.mark.parametrize("target", TARGETS)
class TestImage:
    def test_it_does_not_run_as_root(self, target: str) -> None:
        user = STAGES[target].last("USER").split(":")[0]
        assert re.fullmatch(r"[1-9][0-9]*", user)
        assert any(f"--uid {user}" in run for run in STAGES[target].all("RUN"))

    def test_it_starts_the_service_without_a_shell(self, target: str) -> None:
        (command,) = json.loads(STAGES[target].last("ENTRYPOINT"))
        assert command in PROJECT["scripts"]

    def test_it_says_where_it_computes(self, target: str) -> None:
        device = {"cpu": "cpu", "gpu": "cuda"}[target]
        assert f"FLASHWIRE_DEVICE={device}" in shlex.split(" ".join(STAGES[target].all("ENV")))

    def test_its_settings_exist_and_none_opens_it(self, target: str) -> None:
        given = {word.split("=")[0] for word in shlex.split(" ".join(STAGES[target].all("ENV")))}
        given = {name for name in given if name.startswith("FLASHWIRE_")}
        assert given <= VARIABLES
        assert not given & {"FLASHWIRE_ALLOW_OPEN", "FLASHWIRE_API_KEYS", "FLASHWIRE_SIGNING_KEY"}

    def test_its_extra_exists(self, target: str) -> None:
        runs = " ".join(STAGES[f"build-{target}"].all("RUN"))
        extras = re.findall(r'"\.\[([\w,]+)\]"', runs)
        assert extras == [{"cpu": "service,otel", "gpu": "gpu,otel"}[target]]
        assert set(extras[0].split(",")) <= set(PROJECT["optional-dependencies"])


def test_the_context_holds_what_the_build_needs() -> None:
    lines = (ROOT / ".dockerignore").read_text(encoding="utf-8").split("\n")
    sent = {line[1:] for line in lines if line.startswith("!")}
    build = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["tool"]["hatch"]
    packages = build["build"]["targets"]["wheel"]["packages"]
    needed = {"pyproject.toml", "constraints.txt", PROJECT["readme"], *PROJECT["license-files"]}
    assert "*" in lines
    assert sent == needed | {package.split("/")[0] for package in packages}
    assert all((ROOT / name).exists() for name in sent)
    assert all(package in " ".join(STAGES["build"].all("RUN")) for package in packages)


@pytest.fixture
def readyz(
    request: pytest.FixtureRequest, make_certificate: Callable[[str], Any]
) -> Iterator[tuple[int, list[int], dict[str, str]]]:
    """The port of a server whose /readyz answers the status in the list, and its variables."""
    answer = [200]

    class Handler(http.server.BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            self.send_response(answer[0] if self.path == "/readyz" else 404)
            self.end_headers()

        def log_message(self, *_: Any) -> None:
            pass

    with http.server.HTTPServer(("127.0.0.1", 0), Handler) as server:
        variables = {}
        if request.param == "https":
            made = make_certificate("a")
            variables["FLASHWIRE_TLS_CERT"] = str(made.cert)
            context = tls.context(str(made.cert), str(made.key))
            server.socket = context.wrap_socket(server.socket, server_side=True)
        thread = threading.Thread(target=server.serve_forever, args=(0.01,))
        thread.start()
        yield server.server_address[1], answer, variables
        server.shutdown()
        thread.join()


@pytest.mark.parametrize("target", TARGETS)
@pytest.mark.parametrize("readyz", ["http", "https"], indirect=True)
def test_the_health_check_tells_ready_from_not(
    target: str, readyz: tuple[int, list[int], dict[str, str]]
) -> None:
    port, answer, variables = readyz
    python, *arguments = health_command(target)
    assert python == "python"

    def status(port: int) -> int:
        environment = {"FLASHWIRE_PORT": str(port), "http_proxy": "http://127.0.0.1:9", **variables}
        return subprocess.run(
            [sys.executable, *arguments], env=environment, stderr=subprocess.DEVNULL, timeout=30
        ).returncode

    assert status(port) == 0
    answer[0] = 503
    assert status(port) == 1
    assert status(1) == 1  # nobody listens there


COMPOSE = yaml.safe_load((ROOT / "docker-compose.yml").read_text(encoding="utf-8"))


@pytest.mark.parametrize("target", TARGETS)
class TestCompose:
    def test_each_target_is_a_profile(self, target: str) -> None:
        service = COMPOSE["services"][target]
        assert service["profiles"] == [target]
        assert service["build"]["target"] == target
        declared = {text.split("=")[0] for text in STAGES[f"build-{target}"].all("ARG")}
        assert set(service["build"].get("args", {})) <= declared

    def test_it_is_published_on_this_machine_and_needs_keys(self, target: str) -> None:
        service = COMPOSE["services"][target]
        (port,) = service["ports"]
        inside = STAGES[target].last("EXPOSE")
        assert re.fullmatch(r"\$\{FLASHWIRE_PUBLISH:-127\.0\.0\.1:\d+\}:" + inside, port)
        assert service["environment"]["FLASHWIRE_API_KEYS"].startswith("${FLASHWIRE_API_KEYS:?")
        assert set(service["environment"]) <= VARIABLES

    def test_it_has_no_more_rights_than_it_needs(self, target: str) -> None:
        service = COMPOSE["services"][target]
        assert service["read_only"] is True
        assert service["cap_drop"] == ["ALL"]
        assert "no-new-privileges:true" in service["security_opt"]

    def test_a_stop_waits_longer_than_the_drain(self, target: str) -> None:
        grace = COMPOSE["services"][target]["stop_grace_period"]
        assert int(grace.removesuffix("s")) > Settings().grace_s


def test_the_gpu_is_reserved_and_kernels_are_kept() -> None:
    gpu = COMPOSE["services"]["gpu"]
    (device,) = gpu["deploy"]["resources"]["reservations"]["devices"]
    assert device["capabilities"] == ["gpu"]
    (volume,) = gpu["volumes"]
    name, _, path = volume.partition(":")
    assert name in COMPOSE["volumes"]
    assert f"FLASHWIRE_TRITON_CACHE_DIR={path}/" in STAGES["gpu"].last("ENV")
    assert STAGES["gpu"].all("VOLUME") == [path]
    assert "VOLUME" not in dict(STAGES["cpu"].instructions)
    assert any(f"-o flashwire -g flashwire {path}" in run for run in STAGES["gpu"].all("RUN"))
