"""Every setting of the service once: its name, default and meaning.

Each is read from its flag (`--grace-s`), else from its variable (`FLASHWIRE_GRACE_S`), else it has
its default. Secrets have a variable only: a command line is visible to all users of a machine.
`load` reports every mistake at once, before anything starts; a variable that begins like ours and
is none of ours is one.
"""

from __future__ import annotations

import dataclasses
import difflib
import hashlib
import ipaddress
import os
import re
import socket
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import msgpack

from flashwire_service import kernel_cache, keys, parse, socket_file, tls, tracing
from flashwire_service import warmup as warmups
from flashwire_service.keys import Keyring, KeysError

PREFIX = "FLASHWIRE_"
CLIENT_KEY = PREFIX + "API_KEY"
_OTHERS = frozenset({CLIENT_KEY, PREFIX + "URL", PREFIX + "PUBLISH"})  # the client's, and compose's
# What Kubernetes tells each pod about a Service named flashwire, or flashwire-something.
_SERVICE_LINK = re.compile(
    PREFIX + r"(\w+_)?(SERVICE_HOST|SERVICE_PORT(_\w+)?|PORT_[0-9]+_(TCP|UDP|SCTP)(_\w+)?)"
)
_SERVICE_ADDRESS = re.compile(r"(tcp|udp|sctp)://")
_BYTES, _MODE, _SECONDS = "BYTES", "MODE", "SECONDS"  # metavars


class SettingsError(ValueError):
    """The settings make no service. `mistakes` has one line for each, naming the setting."""

    def __init__(self, mistakes: list[str]) -> None:
        self.mistakes = mistakes
        super().__init__("\n".join(mistakes))


def _device(value: str) -> str:
    if not re.fullmatch(r"auto|cpu|cuda(:[0-9]{1,3})?", value):
        raise ValueError(f"must be auto, cpu, cuda or cuda:N, got {value!r}")
    return value


def _origins(value: str) -> tuple[str, ...]:
    origins = tuple(o.strip().rstrip("/") for o in value.split(",") if o.strip())
    for origin in origins:
        if origin != "*" and not re.fullmatch(r"https?://[^\s/?#]+", origin):
            raise ValueError(f"must be origins such as https://example.org, got {origin!r}")
    return origins


def _path(value: str) -> str:
    return os.path.abspath(parse.text(value))


def _signing_key(value: str) -> bytes:
    if len(value) < 16:
        raise ValueError("must have at least 16 characters")
    return hashlib.sha256(value.encode()).digest()


def machine_signing_key() -> bytes:
    """A key that is the same after a restart on the same machine, and differs between machines."""
    identity = [socket.gethostname()]
    for source in ("/etc/machine-id", "/var/lib/dbus/machine-id"):
        path = Path(source)
        if path.is_file():
            identity.append(path.read_text(encoding="utf-8", errors="replace").strip())
    return hashlib.sha256("\0".join(["flashwire residual ids", *identity]).encode()).digest()


def _setting(
    default: Any,
    parse: Callable[[str], Any],
    meaning: str,
    metavar: str = "",
    *,
    secret: bool = False,
) -> Any:
    metadata = {"parse": parse, "meaning": meaning, "metavar": metavar, "secret": secret}
    if callable(default):
        return dataclasses.field(default_factory=default, metadata=metadata, repr=not secret)
    return dataclasses.field(default=default, metadata=metadata, repr=not secret)


@dataclass(frozen=True, slots=True, kw_only=True)
class Settings:
    """The settings of one service, read once. Sizes in bytes; `_s` seconds, `_ms` milliseconds."""

    host: str = _setting("127.0.0.1", parse.text, "address to listen on", "HOST")
    port: int = _setting(
        8000, parse.integer(0, 65535), "port to listen on; 0 takes a free one", "PORT"
    )
    uds: str = _setting(
        "", socket_file.parse_path, "unix socket to listen on besides: no TCP, no TLS", "PATH"
    )
    uds_mode: int = _setting(
        0o600, socket_file.parse_mode, "who may connect to the unix socket, as for chmod", _MODE
    )
    device: str = _setting("auto", _device, "where to compute: auto, cpu, cuda or cuda:N", "DEVICE")
    threads: int = _setting(
        0, parse.integer(0, 1024), "CPU threads of a worker; 0: its share of cores", "N"
    )
    workers: int = _setting(1, parse.integer(1, 64), "compute processes, one for each device", "N")
    frontends: int = _setting(1, parse.integer(1, 64), "HTTP processes", "N")
    max_body_bytes: int = _setting(2**30, parse.size(1024), "largest request body", _BYTES)
    max_header_bytes: int = _setting(
        32 * 2**10, parse.size(1024), "largest HTTP request head", _BYTES
    )
    max_message_header_bytes: int = _setting(
        64 * 2**10, parse.size(4096, 64 * 2**10),
        "largest part of a message that is not the data of tensors", _BYTES,
    )  # fmt: skip
    max_nesting: int = _setting(
        8, parse.integer(4, 32), "levels of maps and lists in a message", "N"
    )
    max_map_keys: int = _setting(64, parse.integer(32, 4096), "entries of one map", "N")
    max_rank: int = _setting(8, parse.integer(4, 32), "dimensions of a tensor", "N")
    max_elements: int = _setting(
        2**48, parse.integer(1, 2**48), "elements of a tensor, whatever it claims", "N"
    )
    min_upload_rate: int = _setting(
        16 * 2**10, parse.size(0), "bytes per second that an upload must keep up; 0: any", _BYTES
    )
    min_download_rate: int = _setting(
        16 * 2**10, parse.size(0), "bytes per second at which a reply must be read; 0: any", _BYTES
    )
    upload_bytes: int = _setting(
        4 * 2**30, parse.size(1024), "bytes of bodies that an HTTP process receives at once", _BYTES
    )
    reuse_bytes: int = _setting(
        256 * 2**20,
        parse.size(0),
        "bytes of memory that an HTTP process keeps a minute for the next large bodies",
        _BYTES,
    )
    shared_memory_bytes: int = _setting(
        4 * 2**30, parse.size(0),
        "bytes of callers' own memory that an HTTP process maps beside --uds; 0: none", _BYTES,
    )  # fmt: skip
    max_connections: int = _setting(
        1024, parse.integer(1, 10**6), "connections that an HTTP process keeps open", "N"
    )
    queue_requests: int = _setting(64, parse.integer(1, 10**6), "requests a worker lets wait", "N")
    queue_bytes: int = _setting(
        4 * 2**30, parse.size(1024), "bytes of requests a worker lets wait", _BYTES
    )
    queue_device_bytes: int = _setting(
        16 * 2**30, parse.size(1024),
        "device memory that requests a worker lets wait are estimated to need, in all", _BYTES,
    )  # fmt: skip
    batch_tokens: int = _setting(
        0, parse.integer(0, 2**20),
        "queries and keys, in all, of small requests that are computed together where they wait; "
        "0: each is computed by itself", "N",
    )  # fmt: skip
    max_timeout_ms: int = _setting(
        300_000, parse.integer(1, 86_400_000),
        "longest wait for queue and compute; also the default", "MILLISECONDS",
    )  # fmt: skip
    prove_s: float = _setting(
        30.0, parse.seconds(0),
        "how often an idle worker proves again that its device computes; 0: never", _SECONDS,
    )  # fmt: skip
    quarantine_s: float = _setting(
        3600.0, parse.seconds(0),
        "how long a request that ended two workers in a row is refused; 0: never", _SECONDS,
    )  # fmt: skip
    residual_ttl_s: float = _setting(600.0, parse.seconds(0.1), "life of a saved forward", _SECONDS)
    residual_bytes: int = _setting(
        2 * 2**30, parse.size(0), "bytes of saved forwards a worker holds", _BYTES
    )
    key_residual_bytes: int = _setting(
        2**30, parse.size(0), "bytes of saved forwards a worker holds for one API key", _BYTES
    )
    max_materialise_bytes: int = _setting(
        2 * 2**30,
        parse.size(1024),
        "largest L x L intermediate of the reference and of checks",
        _BYTES,
    )
    warmup: str = _setting(
        "bfloat16:d128:causal, bfloat16:d64:causal", warmups.normalised,
        "requests whose kernels a GPU worker compiles before it is ready, such as "
        '"bfloat16:d128:causal:gqa4, float16:d64"; docs/deploy.md has the words', "LIST",
    )  # fmt: skip
    triton_cache_dir: str = _setting(
        "",
        kernel_cache.parse,
        "where compiled kernels are kept; by default where Triton does",
        "DIRECTORY",
    )
    keep_alive_s: float = _setting(
        75.0, parse.seconds(0.1), "how long an idle connection stays open", _SECONDS
    )
    grace_s: float = _setting(
        30.0, parse.seconds(0), "how long a stop waits for requests in flight", _SECONDS
    )
    api_keys: Keyring = _setting(  # noqa: RUF009  # a field
        Keyring, keys.listed, "keys that callers must send, separated by commas", secret=True
    )
    api_keys_file: str = _setting(
        "", _path, "file of more keys, perhaps hashed, and what each may; SIGHUP has it read again",
        "FILE",
    )  # fmt: skip
    signing_key: bytes = _setting(
        machine_signing_key, _signing_key, "key of residual ids; by default this machine's own",
        secret=True,
    )  # fmt: skip
    tls_cert: str = _setting(
        "", _path, "certificate chain (PEM): speak TLS; SIGHUP has it read again", "FILE"
    )
    tls_key: str = _setting("", _path, "private key (PEM) of the certificate", "FILE")
    allow_open: bool = _setting(False, parse.flag, "listen beyond this machine without any key")
    cors_origins: tuple[str, ...] = _setting(
        (), _origins, "web origins that browsers may call from, separated by commas", "ORIGINS"
    )
    traces: bool = _setting(
        False, parse.flag,
        "send a trace of each request to the collector that OTEL_EXPORTER_OTLP_ENDPOINT names",
    )  # fmt: skip
    log_level: str = _setting(
        "info",
        parse.choice("debug", "info", "warning", "error"),
        "least severe message to log",
        "LEVEL",
    )

    @property
    def shares_memory(self) -> bool:
        """Whether callers on this machine may share memory."""
        return bool(self.uds) and self.shared_memory_bytes > 0

    def to_bytes(self) -> bytes:
        """For a child process. Holds digests and the signing key: pass it by a descriptor."""
        values = {row.name: getattr(self, row.name) for row in table()}
        packed: bytes = msgpack.packb({**values, "api_keys": self.api_keys.packed()})
        return packed

    @classmethod
    def from_bytes(cls, packed: bytes) -> Settings:
        """The settings that `to_bytes` packed."""
        values = msgpack.unpackb(packed, use_list=False)
        return cls(**{**values, "api_keys": Keyring.unpacked(values["api_keys"])})


@dataclass(frozen=True, slots=True)
class Row:
    """One row of the table of settings. `flag` is None for a secret, `metavar` names its value."""

    name: str
    flag: str | None
    variable: str
    default: Any
    meaning: str
    metavar: str
    parse: Callable[[str], Any]

    @property
    def default_text(self) -> str:
        """The default as one would write it, sizes with a unit; "" where it is to have none."""
        if self.default == ():
            return ""
        if self.metavar == _MODE:
            return f"{self.default:04o}"
        return parse.size_text(self.default) if self.metavar == _BYTES else str(self.default)

    @property
    def is_switch(self) -> bool:
        return isinstance(self.default, bool)


def table() -> Iterator[Row]:
    """The rows of the table of settings, in the order of `Settings`."""
    for field in dataclasses.fields(Settings):
        meta = field.metadata
        yield Row(
            name=field.name,
            flag=None if meta["secret"] else "--" + field.name.replace("_", "-"),
            variable=PREFIX + field.name.upper(),
            default=field.default,
            meaning=meta["meaning"],
            metavar=meta["metavar"],
            parse=meta["parse"],
        )


def secret_variables() -> frozenset[str]:
    """Variables whose values nobody but the supervisor needs to see."""
    return frozenset(row.variable for row in table() if row.flag is None)


def load(flags: Mapping[str, str], environ: Mapping[str, str]) -> Settings:
    """The settings of these flags (by setting name) and environment variables.

    Raises SettingsError with every mistake.
    """
    links = _service_links(environ)
    environ = {name: value for name, value in environ.items() if name not in links}
    values: dict[str, Any] = {}
    mistakes: dict[str, list[str]] = {}
    for row, source, given in _given(flags, environ):
        try:
            values[row.name] = row.parse(given)
            if row.name == "api_keys_file":  # its row comes after that of api_keys
                known = values.get("api_keys", Keyring())
                values["api_keys"] = known.with_file(values["api_keys_file"])
        except KeysError as exc:
            mistakes[row.name] = [f"{source}: {said}" for said in exc.mistakes]
        except ValueError as exc:
            mistakes[row.name] = [f"{source}: {exc}"]
    settings = Settings(**values)
    lines = [line for said in mistakes.values() for line in said]
    for involved, line in _contradictions(settings):
        if involved.isdisjoint(mistakes):
            lines.append(line)
    if settings.traces:
        lines += tracing.mistakes(environ)
    lines += [*_unknown(environ), *([_service_links_line(links)] if links else [])]
    if lines:
        raise SettingsError(lines)
    return settings


def _given(flags: Mapping[str, str], environ: Mapping[str, str]) -> Iterator[tuple[Row, str, str]]:
    """Each setting that was given: its row, by what flag or variable, and the text."""
    for row in table():
        if row.flag is not None and row.name in flags:
            yield row, row.flag, flags[row.name]
        elif row.variable in environ:
            yield row, row.variable, environ[row.variable]


def warnings(settings: Settings, environ: Mapping[str, str]) -> Iterator[str]:
    """What is no mistake, and most likely not what was meant."""
    if CLIENT_KEY in environ and not settings.api_keys:
        advice = f"keys of the server are {PREFIX}API_KEYS, and none is set"
        yield f"{CLIENT_KEY} is the client's; {advice}"
    if settings.api_keys_file:
        yield from keys.warnings(settings.api_keys, settings.api_keys_file)
    if settings.tls_key:
        yield from tls.warnings(settings.tls_key)


def _unknown(environ: Mapping[str, str]) -> Iterator[str]:
    """A line for each variable that looks like a setting and is none."""
    known = [row.variable for row in table()]
    for name in sorted(environ):
        if name.startswith(PREFIX) and name not in known and name not in _OTHERS:
            (near,) = difflib.get_close_matches(name[:64], known, n=1, cutoff=0.0)
            yield f"{name}: there is no such setting; nearest is {near}"


def _service_links(environ: Mapping[str, str]) -> list[str]:
    """Variables that Kubernetes made of a Service whose name begins like ours."""
    return sorted(
        name
        for name, value in environ.items()
        if _SERVICE_LINK.fullmatch(name)
        or (name.startswith(PREFIX) and name.endswith("PORT") and _SERVICE_ADDRESS.match(value))
    )


def _service_links_line(names: list[str]) -> str:
    said = names[0] if len(names) == 1 else f"{names[0]} and {len(names) - 1} more"
    return (
        f"{said}: set by Kubernetes for a Service of this name, not by you: "
        "say `enableServiceLinks: false` in the pod's spec, or name the Service otherwise"
    )


def _contradictions(settings: Settings) -> Iterator[tuple[set[str], str]]:
    """Settings that are right alone and wrong together: which, and what to do."""
    if not settings.api_keys and not settings.allow_open and not _is_loopback(settings.host):
        yield (
            {"host", "api_keys", "api_keys_file", "allow_open"},
            f"--host: {settings.host} is reachable from other machines and no key is set: "
            f"set {PREFIX}API_KEYS or --api-keys-file, or give --allow-open to let everyone in",
        )
    if settings.tls_cert or settings.tls_key:
        for flag, said in tls.mistakes(settings.tls_cert, settings.tls_key):
            yield {"tls_cert", "tls_key"}, f"{flag}: {said}"
    for name in ("queue_bytes", "upload_bytes"):
        if getattr(settings, name) < settings.max_body_bytes:
            yield (
                {name, "max_body_bytes"},
                f"--{name.replace('_', '-')}: {getattr(settings, name)} is less than one request "
                f"of --max-body-bytes ({settings.max_body_bytes})",
            )


def _is_loopback(host: str) -> bool:
    if host == "localhost":
        return True
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:  # a name: what it resolves to may change
        return False
