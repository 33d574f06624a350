"""The keys that callers send, and what each may do.

A file of keys is TOML, a line for each: a name, then the key, or what it is and what it may.

    alice = "sha256:1f4e...64 hexadecimal digits"
    ci = { key = "sha256:5e88...", max_body_bytes = "64MiB", queue_requests = 4 }
    prometheus = { key = "a-secret-in-clear-text", may = ["metrics"] }

docs/security.md says what each word means. A key itself is read once and kept nowhere: what is held
and compared is its SHA-256. That is enough for a key that is random (`openssl rand -hex 24`), and
nothing is for one that is not.
"""

from __future__ import annotations

import dataclasses
import hashlib
import hmac
import os
import re
import stat
import tomllib
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

from flashwire_service import parse

RIGHTS = ("compute", "info", "metrics")
MAX_KEYS = 500  # all of them fit a packet between processes
MAX_FILE_BYTES = 2**20
_NAME = re.compile(r"[A-Za-z0-9._@-]{1,64}")
_KEY = re.compile(r"[\x21-\x7e]{8,512}")
_SHAPE = "8 to 512 printable ASCII characters, no spaces"
_HASHED = re.compile(r"sha256:([0-9a-fA-F]{64})")


class KeysError(ValueError):
    """A file or list of keys that cannot be used. `mistakes` has one line for each; none holds a
    key.
    """

    def __init__(self, mistakes: list[str]) -> None:
        self.mistakes = mistakes
        super().__init__("; ".join(mistakes))


@dataclass(frozen=True, slots=True, kw_only=True)
class KeyLimits:
    """What one key may have at most, in the words and units of the settings of these names.

    None: as much as any key. A limit above the service's own changes nothing.
    """

    queue_requests: int | None = None
    residual_bytes: int | None = None
    max_body_bytes: int | None = None
    max_timeout_ms: int | None = None

    @property
    def given(self) -> dict[str, int]:
        """Those that are not None."""
        return {
            name: limit for name, limit in dataclasses.asdict(self).items() if limit is not None
        }


_LIMITS: Mapping[str, Callable[[str], int]] = {
    "queue_requests": parse.integer(1, 10**6),
    "residual_bytes": parse.size(0),
    "max_body_bytes": parse.size(1024),
    "max_timeout_ms": parse.integer(1, 86_400_000),
}


@dataclass(frozen=True, slots=True, kw_only=True)
class Key:
    """A key, without the key: its name, for people; its SHA-256; what it may and how much; whether
    it stands `in_clear` in a file.
    """

    name: str
    digest: bytes = field(repr=False)
    may: tuple[str, ...] = RIGHTS
    limits: KeyLimits = KeyLimits()
    in_clear: bool = False

    @property
    def owner(self) -> str:
        """Who a residual made with this key belongs to."""
        return self.digest.hex()


@dataclass(frozen=True, slots=True)
class Keyring:
    """Every key there is: those `listed` in the environment, and those `filed`."""

    listed: tuple[Key, ...] = ()
    filed: tuple[Key, ...] = ()

    def __iter__(self) -> Iterator[Key]:
        yield from self.listed
        yield from self.filed

    def __len__(self) -> int:
        return len(self.listed) + len(self.filed)

    def find(self, text: str) -> Key | None:
        """The key that this text is. How long it takes does not tell which was close."""
        digest = digest_of(text)
        found = None
        for key in self:
            if hmac.compare_digest(digest, key.digest):
                found = key
        return found

    def with_file(self, path: str) -> Keyring:
        """The listed keys, and those that the file holds now. Raises KeysError."""
        ring = Keyring(self.listed, read(path))
        if mistakes := [*_repetitions(ring), *_too_many(ring)]:
            raise KeysError(mistakes)
        return ring

    def packed(self) -> list[Any]:
        """As plain values, for a frame. Holds digests."""
        return [
            [(k.name, k.digest, k.may, dataclasses.astuple(k.limits)) for k in keys]
            for keys in (self.listed, self.filed)
        ]

    @classmethod
    def unpacked(cls, packed: Any) -> Keyring:
        """What `packed` made, after a journey."""
        return cls(*(tuple(_unpacked(*row) for row in rows) for rows in packed))


def _unpacked(name: str, digest: bytes, may: list[str], limits: list[int | None]) -> Key:
    names = (f.name for f in dataclasses.fields(KeyLimits))
    found = KeyLimits(**dict(zip(names, limits, strict=True)))
    return Key(name=name, digest=digest, may=tuple(may), limits=found)


def digest_of(key: str) -> bytes:
    """What is kept of a key."""
    return hashlib.sha256(key.encode("utf-8", "surrogateescape")).digest()


def listed(value: str) -> Keyring:
    """The keys of a list, separated by commas. They have numbers for names. Raises KeysError."""
    texts = [text.strip() for text in value.split(",") if text.strip()]
    mistakes = [
        f"key {number} must be {_SHAPE}"
        for number, text in enumerate(texts, start=1)
        if not _KEY.fullmatch(text)
    ]
    if value and not texts:
        mistakes.append("names no key")
    ring = Keyring(
        tuple(Key(name=f"env:{n}", digest=digest_of(t)) for n, t in enumerate(texts, start=1))
    )
    if mistakes := [*mistakes, *_repetitions(ring), *_too_many(ring)]:
        raise KeysError(mistakes)
    return ring


def read(path: str) -> tuple[Key, ...]:
    """The keys of a file. Raises KeysError with every mistake in it."""
    try:
        document = tomllib.loads(_contents(path).decode("utf-8"))
    except OSError as e:
        raise KeysError([f"{path} cannot be read: {e.strerror}"]) from None
    except UnicodeDecodeError:
        raise KeysError([f"{path} is not UTF-8"]) from None
    except tomllib.TOMLDecodeError as e:
        raise KeysError([f"{path} is not TOML: {e}"]) from None
    keys: list[Key] = []
    mistakes: list[str] = []
    for name, entry in document.items():
        try:
            keys.append(_key(name, entry))
        except KeysError as e:
            mistakes += e.mistakes
    if not document:
        mistakes.append(f"{path} names no key")
    if mistakes:
        raise KeysError(mistakes)
    return tuple(keys)


def warnings(ring: Keyring, path: str) -> Iterator[str]:
    """What is wrong with who may read or write the file of these keys, though it can be used."""
    mode = os.stat(path).st_mode
    if mode & stat.S_IROTH and any(key.in_clear for key in ring.filed):
        yield f"{path} holds keys in clear text, and every user may read it: chmod 600"
    if mode & (stat.S_IWGRP | stat.S_IWOTH):
        yield f"{path} may be written by others than its owner, who could add a key: chmod go-w"


def _contents(path: str) -> bytes:
    """A pipe or a device might keep the supervisor waiting for ever: it takes a plain file."""
    descriptor = os.open(path, os.O_RDONLY | os.O_CLOEXEC | os.O_NONBLOCK)
    with open(descriptor, "rb") as file:
        if not stat.S_ISREG(os.fstat(descriptor).st_mode):
            raise KeysError([f"{path} is not a plain file"])
        contents = file.read(MAX_FILE_BYTES + 1)
    if len(contents) > MAX_FILE_BYTES:
        raise KeysError([f"{path} has more than {MAX_FILE_BYTES} bytes"])
    return contents


def _key(name: str, entry: object) -> Key:
    """One entry of a file. Raises KeysError."""
    said = repr(name[:64])
    given = {"key": entry} if isinstance(entry, str) else entry
    if not isinstance(given, dict):
        raise KeysError([f'{said}: must be a key in quotes, or {{ key = "...", ... }}'])
    mistakes = []
    if not _NAME.fullmatch(name):
        mistakes.append("a name has 1 to 64 letters, digits and ._@-")
    known = ("key", "may", *_LIMITS)
    mistakes += [f"{word[:64]!r} is not known; known: {', '.join(known)}"
                 for word in given if word not in known]  # fmt: skip
    digest, limits = b"", {}
    may: tuple[str, ...] = RIGHTS
    in_clear = not _HASHED.fullmatch(str(given.get("key")))
    for word, value in given.items():
        try:
            if word == "key":
                digest = _digest(value)
            elif word == "may":
                may = _rights(value)
            elif word in _LIMITS:
                limits[word] = _limit(word, value)
        except ValueError as e:
            mistakes.append(f"{word}: {e}")
    if "key" not in given:
        mistakes.append("has no key")
    if mistakes:
        raise KeysError([f"{said}: {mistake}" for mistake in mistakes])
    return Key(name=name, digest=digest, may=may, limits=KeyLimits(**limits), in_clear=in_clear)


def _digest(value: object) -> bytes:
    if isinstance(value, str):
        if hashed := _HASHED.fullmatch(value):
            return bytes.fromhex(hashed[1])
        if value.startswith("sha256:"):
            raise ValueError("sha256: needs 64 hexadecimal digits")
        if _KEY.fullmatch(value):
            return digest_of(value)
    raise ValueError(f"must be {_SHAPE}; or sha256: and 64 hexadecimal digits")


def _rights(value: object) -> tuple[str, ...]:
    if not isinstance(value, list) or not value or any(word not in RIGHTS for word in value):
        raise ValueError(f"must be a list of {', '.join(RIGHTS)}, at least one")
    return tuple(right for right in RIGHTS if right in value)


def _limit(word: str, value: object) -> int:
    if isinstance(value, bool) or not isinstance(value, (int, str)):
        raise ValueError("must be a number, or a size in quotes")
    return _LIMITS[word](str(value))


def _repetitions(ring: Keyring) -> Iterator[str]:
    first: dict[bytes, str] = {}
    for key in ring:
        if (other := first.setdefault(key.digest, key.name)) != key.name:
            yield f"{key.name!r} has the same key as {other!r}"


def _too_many(ring: Keyring) -> Iterator[str]:
    if len(ring) > MAX_KEYS:
        yield f"{len(ring)} keys are more than {MAX_KEYS}"
