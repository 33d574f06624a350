"""Headers that every reply carries, for the browsers among the callers.

Replies hold a caller's own data: nobody on the way keeps them, no browser guesses what they are,
runs anything in them, shows them in a frame or tells the next page where it came from.
"""

from __future__ import annotations

from collections.abc import Mapping

SECURITY: Mapping[str, str] = {
    "cache-control": "no-store",
    "content-security-policy": "default-src 'none'; frame-ancestors 'none'",
    "referrer-policy": "no-referrer",
    "x-content-type-options": "nosniff",
}
# Only over TLS does it mean anything (RFC 6797, section 7.2). A year.
HSTS: Mapping[str, str] = {"strict-transport-security": "max-age=31536000"}


def of_reply(*, secure: bool) -> dict[str, str]:
    """What a reply carries unless it says otherwise itself; `secure` where it goes over TLS."""
    return {**SECURITY, **(HSTS if secure else {})}
