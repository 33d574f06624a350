"""Settings: one table, all mistakes at once, secrets kept out of sight."""

from __future__ import annotations

import hashlib

import pytest

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
    said = mistakes({"max_body_bytes": "2M", "queue_bytes": "1M"})
    assert said[0].startswith("--queue-bytes: ")


def test_keys_are_held_as_digests_and_never_shown() -> None:
    loaded = load({}, {"FLASHWIRE_API_KEYS": "first-key, second-key"})
    assert loaded.api_keys[0] == hashlib.sha256(b"first-key").digest()
    assert loaded.accepts_key("second-key")
    assert not loaded.accepts_key("third-key")
    assert not loaded.accepts_key("")
    assert not Settings().accepts_key("")
    assert "api_keys" not in repr(loaded)
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
        assert row.flag is None or row.flag in said


def test_version(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        cli.main(["--version"])
    assert capsys.readouterr().out.startswith("flashwire ")
