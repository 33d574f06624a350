"""The file of keys: what it may say, every mistake at once, nothing secret in what is said."""

from __future__ import annotations

import hashlib
import hmac
import os
from collections.abc import Callable
from pathlib import Path

import pytest

from flashwire_service import keys, settings
from flashwire_service.ipc import channel
from flashwire_service.ipc.frames import Reload, Start, decode, encode
from flashwire_service.keys import Key, KeyLimits, Keyring, KeysError
from flashwire_service.settings import Settings, SettingsError, load

HASHED = "sha256:" + hashlib.sha256(b"key-of-bob").hexdigest()
Write = Callable[[str], str]


@pytest.fixture
def write(tmp_path: Path) -> Write:
    """Write the file of keys; its path."""
    path = tmp_path / "keys.toml"

    def write(text: str) -> str:
        path.write_text(text, encoding="utf-8")
        path.chmod(0o600)
        return str(path)

    return write


def mistakes(path: str) -> list[str]:
    with pytest.raises(KeysError) as caught:
        keys.read(path)
    return caught.value.mistakes


def test_a_key_in_clear_one_hashed_and_one_with_limits(write: Write) -> None:
    path = write(f"""
        alice = "key-of-alice"   # a comment
        "bob@example.org" = "{HASHED}"
        [ci]
        key = "key-of-ci"
        may = ["metrics", "compute"]
        queue_requests = 4
        residual_bytes = "512MiB"
        max_body_bytes = 65536
        max_timeout_ms = 1000
    """)
    alice, bob, ci = keys.read(path)
    assert (alice.name, alice.may, alice.limits) == ("alice", keys.RIGHTS, KeyLimits())
    assert bob.digest == hashlib.sha256(b"key-of-bob").digest()
    assert ci.may == ("compute", "metrics")
    assert ci.limits == KeyLimits(
        queue_requests=4, residual_bytes=2**29, max_body_bytes=65536, max_timeout_ms=1000
    )
    ring = Keyring(filed=(alice, bob, ci))
    assert ring.find("key-of-bob") is bob
    assert ring.find(HASHED) is None
    assert [key.in_clear for key in ring] == [True, False, True]


def test_every_mistake_is_said_at_once_and_no_key_is(write: Write) -> None:
    said = mistakes(
        write("""
        "two words" = "secret-key-1"
        short = "secret"
        hash = "sha256:secret"
        number = 3
        none = { may = ["info"] }
        much = { key = "secret-key-2", max_body_bytes = "lots", queue_requests = true, color = 1 }
        never = { key = "secret-key-3", may = ["fly"] }
        idle = { key = "secret-key-4", may = [] }
        """)
    )
    for line, part in zip(
        said,
        ("'two words': a name has", "'short': key: must be 8 to 512", "'hash': key: sha256: needs",
         "'number': must be a key in quotes", "'none': has no key", "'much': 'color' is not known",
         "'much': max_body_bytes: must be a number of bytes", "'much': queue_requests: must be",
         "'never': may: must be a list of compute, info, metrics", "'idle': may: must be a list"),
        strict=True,
    ):  # fmt: skip
        assert line.startswith(part)
    assert "secret" not in "".join(said).replace("sha256: needs", "")


@pytest.mark.parametrize(
    ("text", "part"),
    [("", "names no key"), ("alice", "is not TOML"), ('a = "key-of-a"\na = "key-of-b"', "not TOML"),
     ('a = "key-of-\ud800"', "not UTF-8"), ("#" * (2**20 + 1), "more than 1048576 bytes")],
)  # fmt: skip
def test_files_that_cannot_be_used(tmp_path: Path, text: str, part: str) -> None:
    path = tmp_path / "keys.toml"
    path.write_bytes(text.encode("utf-8", "surrogatepass"))
    (said,) = mistakes(str(path))
    assert part in said
    assert "key-of" not in said


def test_only_a_plain_file_is_read(tmp_path: Path) -> None:
    """From a pipe one reads once, and then waits for ever."""
    os.mkfifo(tmp_path / "pipe")
    assert "not a plain file" in mistakes(str(tmp_path / "pipe"))[0]
    assert "cannot be read: No such file" in mistakes(str(tmp_path / "nothing"))[0]
    assert mistakes(str(tmp_path))  # a directory


def test_a_key_has_one_name(write: Write) -> None:
    path = write(f'bob = "{HASHED}"\nrob = "key-of-bob"')
    with pytest.raises(KeysError, match="'rob' has the same key as 'bob'"):
        Keyring().with_file(path)
    with pytest.raises(KeysError, match="'bob' has the same key as 'env:1'"):
        keys.listed("key-of-bob").with_file(write(f'bob = "{HASHED}"'))
    with pytest.raises(KeysError, match="'env:2' has the same key as 'env:1'"):
        keys.listed("key-of-bob,key-of-bob")


def test_every_key_is_compared_whole(monkeypatch: pytest.MonkeyPatch) -> None:
    """Also behind the one that fits: how long it takes does not tell which it was."""
    compared: list[tuple[bytes, bytes]] = []

    def compare(a: bytes, b: bytes) -> bool:
        compared.append((a, b))
        return a == b

    ring = keys.listed("first-key,second-key,third-key")
    monkeypatch.setattr(hmac, "compare_digest", compare)
    for text in ("first-key", "third-key", "wrong-key"):
        compared.clear()
        ring.find(text)
        assert [known for _, known in compared] == [key.digest for key in ring]
        assert {len(given) for given, _ in compared} == {32}


def test_as_many_keys_as_may_be_fit_a_packet(write: Write) -> None:
    limits = 'max_body_bytes = "1G", residual_bytes = "1G", queue_requests = 9, max_timeout_ms = 9'
    lines = [
        f'{"n" * 60}{n:04} = {{ key = "key-number-{n}", {limits}, may = ["info", "compute"] }}'
        for n in range(keys.MAX_KEYS)
    ]
    ring = Keyring().with_file(write("\n".join(lines)))
    whole = Settings(api_keys=ring, cors_origins=("https://a.example",) * 100)
    start = Start(index=0, parent=1, settings=whole.to_bytes())
    assert len(encode(start)) < channel.MAX_PACKET
    arrived = decode(encode(Reload(keys=ring.packed())))
    assert isinstance(arrived, Reload)
    first = Keyring.unpacked(arrived.keys).filed[0]
    assert first.limits.residual_bytes == 2**30
    assert Settings.from_bytes(whole.to_bytes()).api_keys.find("key-number-7") is not None
    with pytest.raises(KeysError, match="501 keys are more than 500"):
        keys.listed("one-key-more").with_file(write("\n".join(lines)))


# As a setting


def test_keys_of_the_file_join_those_of_the_environment(write: Write) -> None:
    path = write(f'bob = "{HASHED}"')
    loaded = load({"api_keys_file": path, "host": "0.0.0.0"}, {"FLASHWIRE_API_KEYS": "first-key"})  # noqa: S104
    assert [key.name for key in loaded.api_keys] == ["env:1", "bob"]
    alone = load({"host": "0.0.0.0"}, {"FLASHWIRE_API_KEYS_FILE": path})  # noqa: S104
    assert [key.name for key in alone.api_keys] == ["bob"]


def test_mistakes_of_the_file_are_mistakes_of_its_setting(write: Write) -> None:
    path = write("a = 1\nb = 2")
    with pytest.raises(SettingsError) as caught:
        load({"api_keys_file": path, "port": "x", "host": "0.0.0.0"}, {})  # noqa: S104
    names = [line.partition(":")[0] for line in caught.value.mistakes]
    assert names == ["--port", "--api-keys-file", "--api-keys-file"]


@pytest.mark.parametrize(
    ("text", "mode", "part"),
    [('a = "key-of-alice"', 0o604, "every user may read it"), (f'b = "{HASHED}"', 0o604, None),
     ('a = "key-of-alice"', 0o640, None), (f'b = "{HASHED}"', 0o620, "by others than its owner"),
     (f'b = "{HASHED}"', 0o602, "by others than its owner")],
)  # fmt: skip
def test_a_file_that_others_may_use_is_remarked_upon(
    write: Write, text: str, mode: int, part: str | None
) -> None:
    path = write(text)
    os.chmod(path, mode)
    said = list(settings.warnings(load({"api_keys_file": path}, {}), {}))
    assert len(said) == (part is not None)
    assert part is None or part in said[0]


def test_names_and_limits_are_plain_words() -> None:
    """What is said of keys in the log and to routes holds no key."""
    key = Key(name="alice", digest=keys.digest_of("key-of-alice"))
    assert str(key.digest) not in repr(key)
    assert set(KeyLimits(queue_requests=3).given) == {"queue_requests"}
    for name in KeyLimits.__slots__:
        assert hasattr(Settings(), name)
