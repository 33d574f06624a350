"""What GET /info says."""

from __future__ import annotations

from collections.abc import Mapping
from importlib.metadata import version
from typing import Any

from flashwire import wire
from flashwire_kernels import support
from flashwire_kernels.types import FLOAT_DTYPES, AttentionSpec, TensorHeader
from flashwire_kernels.validation import Problem, resolve
from flashwire_service.front import json_codec
from flashwire_service.settings import Settings

_LIMITS = (
    "max_body_bytes",
    "max_header_bytes",
    "max_message_header_bytes",
    "max_nesting",
    "max_map_keys",
    "max_rank",
    "max_elements",
    "max_timeout_ms",
    "queue_requests",
    "queue_bytes",
    "residual_ttl_s",
    "residual_bytes",
    "max_materialise_bytes",
)


def describe(settings: Settings, workers: Mapping[int, Mapping[str, Any]]) -> dict[str, Any]:
    """The ready workers and what is common to them; `device` is None while none is ready."""
    first = next(iter(workers.values()), {})
    return {
        "device": first.get("device"),
        "dtypes": list(FLOAT_DTYPES),
        "backends": _backends(first.get("device", "cpu")),
        "limits": {
            **{name: getattr(settings, name) for name in _LIMITS},
            "max_json_bytes": json_codec.MAX_BYTES,
        },
        "versions": {
            "flashwire": version("flashwire"),
            "wire": wire.VERSION,
            **first.get("versions", {}),
        },
        "workers": [{"worker": index, **facts} for index, facts in sorted(workers.items())],
    }


def _backends(device: str) -> list[dict[str, Any]]:
    """Each backend, fastest first; `reasons` say why one cannot run even a plain attention here."""
    plain = _plain()
    return [
        {"backend": name, "reasons": list(support.reasons(name, plain, device))}
        for name in support.BACKENDS
    ]


def lacking() -> str:
    """A sentence on each backend that runs a plain attention on no kind of device; else ""."""
    plain = _plain()
    sentences = []
    for name in support.BACKENDS:
        by_device = [support.reasons(name, plain, device) for device in ("cuda:0", "cpu")]
        if all(by_device):
            reasons = (reason.removeprefix("backend: ") for reason in by_device[0])
            sentences.append(f"Backend {'; '.join(reasons)}.")
    return " ".join(sentences)


def _plain() -> Problem:
    header = TensorHeader("float32", (1, 1, 1, 8))
    return resolve(AttentionSpec(), dict.fromkeys("qkv", header))
