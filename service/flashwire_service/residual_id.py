"""Ids of saved forwards: base64url(worker, 128 random bits, MAC over both and the owner).

The random bits cannot be guessed; the MAC tells an id that was ours and is gone from one that never
was, or that is another caller's, without a list of the dead. Pure functions: nothing is kept.
"""

from __future__ import annotations

import base64
import binascii
import hashlib
import hmac
import re
import secrets

_RANDOM = 16
_MAC = 16
_WORKER = 2
_LENGTH = (_WORKER + _RANDOM + _MAC) * 8  # bits; 6 in each character
_TEXT = re.compile(rf"[A-Za-z0-9_-]{{{-(-_LENGTH // 6)}}}")


def mint(signing_key: bytes, worker: int, owner: str) -> str:
    """A new id for a forward held by `worker` (below 2**16) for the caller `owner`."""
    head = worker.to_bytes(_WORKER, "big") + secrets.token_bytes(_RANDOM)
    return base64.urlsafe_b64encode(head + _mac(signing_key, head, owner)).rstrip(b"=").decode()


def verify(signing_key: bytes, text: str, owner: str) -> int | None:
    """The worker that an id names, or None when it was never minted for this owner.

    A number does not promise that the forward is still there.
    """
    if not _TEXT.fullmatch(text):
        return None
    try:
        raw = base64.urlsafe_b64decode(text + "=" * (-len(text) % 4))
    except binascii.Error:
        return None
    if base64.urlsafe_b64encode(raw).rstrip(b"=").decode() != text:
        return None  # spare bits were set: one id has one spelling
    head, mac = raw[: _WORKER + _RANDOM], raw[_WORKER + _RANDOM :]
    if not hmac.compare_digest(mac, _mac(signing_key, head, owner)):
        return None
    return int.from_bytes(head[:_WORKER], "big")


def _mac(signing_key: bytes, head: bytes, owner: str) -> bytes:
    return hmac.digest(signing_key, head + owner.encode(), hashlib.sha256)[:_MAC]
