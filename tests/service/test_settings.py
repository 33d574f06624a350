"""Settings: one table, all mistakes at once, secrets kept out of sight."""

from __future__ import annotations

import hashlib
import os
import re
from importlib.metadata import requires
from pathlib import Path

import pytest

from flashwire_kernels import support
from flashwire_service import cli, settings
from flashwire_service.settings import Settings, SettingsError, load


def mistakes(flags: dict[str, str], environ: dict[str, str] | None = None) -> list[str]:
    with pytest.raises(SettingsError) as caught:
        load(flags, environ or {})
    return caught.value.mistakes


def test_defaults_listen_on_this_machine_only() -> None:
    assert load({}, {}) == Settings()
    assert (Settings().host, Settings().port, Settings().workers) == ("127.0.0.1", 8000, 1)


def test_a_flag_wins_over_a_variable_and_a_variable_over_the_default() -> None:
    environ = {"FLASHWIRE_PORT": "1", "FLASHWIRE_THREADS": "3"}
    loaded = load({"port": "2"}, environ)
    assert (loaded.port, loaded.threads, loaded.workers) == (2, 3, 1)


@pytest.mark.parametrize(
    ("text", "size"),
    [("65536", 65536), ("64KiB", 65536), ("64k", 65536), ("3 MiB", 3 * 2**20), ("2G", 2**31)],
)
def test_sizes(text: str, size: int) -> None:
    assert load({"queue_bytes": "3GiB", "max_body_bytes": text}, {}).max_body_bytes == size


def test_every_mistake_is_reported_at_once_and_named() -> None:
    said = mistakes(
        {"port": "70000", "device": "gpu", "grace_s": "nan", "log_level": "loud"},
        {"FLASHWIRE_WORKERS": "0", "FLASHWIRE_MAX_BODY_BYTES": "much", "FLASHWIRE_ALLOW_OPEN": "?"},
    )
    names = [line.partition(":")[0] for line in said]
    assert names == [
        "--port",
        "--device",
        "FLASHWIRE_WORKERS",
        "FLASHWIRE_MAX_BODY_BYTES",
        "--grace-s",
        "FLASHWIRE_ALLOW_OPEN",
        "--log-level",
    ]
    assert "70000" in said[0]


def test_contradictions_are_reported_beside_other_mistakes() -> None:
    said = mistakes({"host": "0.0.0.0", "port": "x", "queue_bytes": "1k", "grace_s": "x"})  # noqa: S104
    assert [line.partition(":")[0] for line in said] == [
        "--port", "--grace-s", "--host", "--queue-bytes",
    ]  # fmt: skip
    said = mistakes({"host": "0.0.0.0", "queue_bytes": "?"}, {"FLASHWIRE_API_KEYS": "short"})  # noqa: S104
    assert [line.partition(":")[0] for line in said] == ["--queue-bytes", "FLASHWIRE_API_KEYS"]


@pytest.mark.parametrize("value", ["", "1.5", "1e3", "\u0661", "-1", "99999999999999999999"])
def test_a_port_must_be_a_plain_number(value: str) -> None:
    assert mistakes({"port": value})[0].startswith("--port: ")


def test_an_open_address_needs_keys_or_a_clear_word() -> None:
    for host in ("0.0.0.0", "::", "example.org", "192.0.2.1"):  # noqa: S104
        assert "FLASHWIRE_API_KEYS" in mistakes({"host": host})[0]
    assert load({"host": "0.0.0.0"}, {"FLASHWIRE_API_KEYS": "a-secret-key"}).api_keys  # noqa: S104
    assert load({"host": "0.0.0.0", "allow_open": "true"}, {}).allow_open  # noqa: S104
    for host in ("127.0.0.1", "::1", "localhost", "127.3.3.3"):
        assert load({"host": host}, {}).host == host


def test_the_queue_must_take_the_largest_request() -> None:
    said = mistakes({"max_body_bytes": "2M", "upload_bytes": "1M"})
    assert said[0].startswith("--upload-bytes: ")
    said = mistakes({"max_body_bytes": "2M", "queue_bytes": "1M"})
    assert said[0].startswith("--queue-bytes: ")


def test_keys_are_held_as_digests_and_never_shown() -> None:
    loaded = load({}, {"FLASHWIRE_API_KEYS": "first-key, second-key"})
    first, second = loaded.api_keys
    assert first.digest == hashlib.sha256(b"first-key").digest()
    assert loaded.api_keys.find("second-key") == second
    for wrong in ("third-key", "", first.digest.hex()):
        assert loaded.api_keys.find(wrong) is None
    assert Settings().api_keys.find("") is None
    assert "api_keys=" not in repr(loaded)
    assert repr(first.digest) not in repr(loaded.api_keys)
    assert "signing_key" not in repr(loaded)


@pytest.mark.parametrize("keys", ["short", "with space in", "good-key-1,\x00bad-key-2", ","])
def test_keys_that_no_header_can_carry_are_refused(keys: str) -> None:
    assert mistakes({}, {"FLASHWIRE_API_KEYS": keys})[0].startswith("FLASHWIRE_API_KEYS: ")


def test_secrets_have_no_flag() -> None:
    assert {row.name for row in settings.table() if row.flag is None} == {"api_keys", "signing_key"}


def test_the_signing_key_outlives_a_restart() -> None:
    assert Settings().signing_key == Settings().signing_key
    other = load({}, {"FLASHWIRE_SIGNING_KEY": "sixteen letters!"}).signing_key
    assert other != Settings().signing_key
    assert len(other) == 32


def test_settings_survive_the_way_to_a_child() -> None:
    loaded = load(
        {"port": "1", "grace_s": "0.5", "cors_origins": "https://a.example,https://b.example/"},
        {"FLASHWIRE_API_KEYS": "a-secret-key"},
    )
    assert Settings.from_bytes(loaded.to_bytes()) == loaded
    assert loaded.cors_origins == ("https://a.example", "https://b.example")


def test_wrong_settings_end_the_command_before_anything_starts(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("FLASHWIRE_WORKERS", "none")
    assert cli.main(["--port", "x"]) == 2
    lines = capsys.readouterr().err.splitlines()
    assert [line.split(":")[:2] for line in lines] == [
        ["flashwire-serve", " --port"],
        ["flashwire-serve", " FLASHWIRE_WORKERS"],
    ]


def test_help_names_every_flag_and_variable(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as caught:
        cli.main(["--help"])
    assert caught.value.code == 0
    said = " ".join(capsys.readouterr().out.split())
    for row in settings.table():
        assert row.variable in said
        assert row.flag is None or row.is_switch or f"{row.flag} {row.metavar} " in said
        assert row.flag is None or row.metavar or row.is_switch
    assert "largest request body [FLASHWIRE_MAX_BODY_BYTES; default 1GiB]" in said
    assert "HTTP request head [FLASHWIRE_MAX_HEADER_BYTES; default 32KiB]" in said


def test_help_names_backends_that_no_device_runs(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    rows = {
        "one": lambda _, device: [] if device == "cpu" else ["device: not here"],
        "two": lambda _, device: ["backend: 'two' is still a plan"],
    }
    monkeypatch.setattr(support, "BACKENDS", ("one", "two"))
    monkeypatch.setattr(support, "_REASONS", rows)
    with pytest.raises(SystemExit):
        cli.main(["--help"])
    said = " ".join(capsys.readouterr().out.split())
    assert said.endswith("environment variable. Backend 'two' is still a plan.")


def test_a_missing_package_ends_the_command_with_one_line(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(
        cli, "find_spec", lambda name: None if name in ("torch", "prometheus_client") else name
    )
    assert cli.main([]) == os.EX_OSFILE
    said = capsys.readouterr()
    assert said.out == ""
    assert said.err == (
        "flashwire-serve: needs prometheus-client, torch: pip install 'flashwire[service]'\n"
    )


def test_what_is_needed_is_all_that_the_processes_import() -> None:
    """Every distribution of the extra is asked for, but for pieces that can be done without."""
    extra = {
        re.split(r"[\[>=; ]", line)[0]
        for line in requires("flashwire") or ()
        if "extra == 'service'" in line.replace('"', "'")
    }
    assert extra - {"ml-dtypes"} == set(cli._NEEDED.values()) - {"httptools"}


def test_a_variable_that_is_no_setting_is_a_mistake_with_the_nearest_name() -> None:
    said = mistakes(
        {"port": "x"},
        {"FLASHWIRE_MAX_BODY_BITES": "secret", "FLASHWIRE_KEYS": "secret", "HOME": "/"},
    )
    assert said == [
        "--port: must be an integer, got 'x'",
        "FLASHWIRE_KEYS: there is no such setting; nearest is FLASHWIRE_API_KEYS",
        "FLASHWIRE_MAX_BODY_BITES: there is no such setting; nearest is FLASHWIRE_MAX_BODY_BYTES",
    ]


def test_variables_of_the_client_are_left_alone_and_its_key_is_remarked_upon() -> None:
    environ = {"FLASHWIRE_URL": "http://x", "FLASHWIRE_API_KEY": "secret-key"}
    loaded = load({}, environ)
    (line,) = settings.warnings(loaded, environ)
    assert "FLASHWIRE_API_KEYS" in line
    assert "secret-key" not in line
    both = {**environ, "FLASHWIRE_API_KEYS": "secret-key"}
    assert not list(settings.warnings(load({}, both), both))
    assert not list(settings.warnings(Settings(), {}))


@pytest.mark.parametrize(
    "environ",
    [
        {"FLASHWIRE_PORT": "tcp://10.0.0.7:8000"},
        {"FLASHWIRE_SERVICE_HOST": "10.0.0.7"},
        {"FLASHWIRE_SERVICE_PORT_HTTP": "8000"},
        {"FLASHWIRE_PORT_8000_TCP_ADDR": "10.0.0.7"},
        {
            "FLASHWIRE_WEB_PORT": "tcp://10.0.0.7:80",
            "FLASHWIRE_WEB_PORT_80_TCP": "tcp://10.0.0.7:80",
        },
    ],
)
def test_what_kubernetes_injects_is_one_mistake_with_the_way_out(environ: dict[str, str]) -> None:
    (line,) = mistakes({}, environ)
    assert line.startswith(next(iter(environ)))
    assert "enableServiceLinks: false" in line


def test_a_gpu_without_triton_is_a_missing_package(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(cli, "find_spec", lambda name: None if name == "triton" else name)
    assert cli.main(["--device", "cuda:1"]) == os.EX_OSFILE
    said = capsys.readouterr().err
    assert said == "flashwire-serve: --device: cuda:1 needs triton: pip install 'flashwire[gpu]'\n"


def test_the_warm_up_list_is_checked_whole() -> None:
    assert load({"warmup": "float16:causal:d64,"}, {}).warmup == "float16:d64:causal"
    assert load({"warmup": ""}, {}).warmup == ""
    assert load({"warmup": Settings().warmup}, {}) == Settings()
    (line,) = mistakes({}, {"FLASHWIRE_WARMUP": "fp16:d64, float16:d64:gqa"})
    assert line.startswith("FLASHWIRE_WARMUP: 'fp16:d64': must begin with one of bfloat16, ")
    assert "; 'float16:d64:gqa': there is no 'gqa'; nearest is 'gqaN'" in line


def test_a_kernel_cache_that_cannot_be_is_a_mistake(tmp_path: Path) -> None:
    loaded = load({"triton_cache_dir": str(tmp_path / "a" / "b")}, {})
    assert Path(loaded.triton_cache_dir) == tmp_path / "a" / "b"
    assert Path(loaded.triton_cache_dir).is_dir()
    (tmp_path / "file").touch()
    said = mistakes({"port": "x"}, {"FLASHWIRE_TRITON_CACHE_DIR": str(tmp_path / "file" / "c")})
    assert [line.partition(":")[0] for line in said] == ["--port", "FLASHWIRE_TRITON_CACHE_DIR"]
    assert f"{tmp_path}/file/c cannot be made or read: Not a directory" in said[1]


def test_version(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        cli.main(["--version"])
    assert capsys.readouterr().out.startswith("flashwire ")
