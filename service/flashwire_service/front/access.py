"""Who calls, and what they may: keys as the routes see them.

Each request is asked for its key, so a key that is taken away stops working with the next one.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from dataclasses import dataclass, replace
from typing import Annotated

from fastapi import Depends, Request
from fastapi.security import HTTPAuthorizationCredentials, HTTPBearer

from flashwire_service.errors import Refusal
from flashwire_service.keys import RIGHTS, Key, Keyring
from flashwire_service.settings import Settings

_SCHEME = HTTPBearer(auto_error=False, description="A key, where the server has keys.")


@dataclass(frozen=True, slots=True)
class Caller:
    """Whoever sent a request.

    name      of the key, for the log; "" where the server has no keys
    owner     digest of the key, "" where the server has none: whose residuals are theirs
    may       which of keys.RIGHTS
    settings  the service's, with the limits that hold for this caller
    """

    name: str
    owner: str
    may: tuple[str, ...]
    settings: Settings


class Access:
    """The keys that hold now."""

    def __init__(self, settings: Settings) -> None:
        self._settings = settings
        self._anyone = Caller("", "", RIGHTS, settings)
        self.install(settings.api_keys)

    def install(self, ring: Keyring) -> None:
        """From now on these keys hold, and no other."""
        self._ring = ring
        self._callers = {key.digest: self._caller(key) for key in ring}

    def caller(self, text: str) -> Caller:
        """Whose key this is; "" is none. Raises Refusal (unauthorized)."""
        if not self._settings.api_keys:  # a service that began with keys never goes without
            return self._anyone
        key = self._ring.find(text)
        if key is None:
            raise Refusal(
                "unauthorized",
                "the key is not known" if text else "send a key: Authorization: Bearer KEY",
                headers={"www-authenticate": 'Bearer realm="flashwire"'},
            )
        return self._callers[key.digest]

    def _caller(self, key: Key) -> Caller:
        own = self._settings
        limits = {"residual_bytes": own.key_residual_bytes, **key.limits.given}
        lowered = {name: min(limit, getattr(own, name)) for name, limit in limits.items()}
        return Caller(key.name, key.owner, key.may, replace(own, **lowered))


async def caller(
    request: Request,
    credentials: Annotated[HTTPAuthorizationCredentials | None, Depends(_SCHEME)],
) -> Caller:
    """The caller of a request. Raises Refusal (unauthorized)."""
    access: Access = request.app.state.access
    found = access.caller(credentials.credentials if credentials else "")
    request.state.caller = found
    return found


def needs(right: str) -> Callable[[Caller], Awaitable[None]]:
    """A dependency of routes that only some keys may use. It raises Refusal (forbidden)."""

    async def check(caller: Annotated[Caller, Depends(caller)]) -> None:
        if right not in caller.may:
            raise Refusal("forbidden", f"this key may not use this route: it lacks {right!r}")

    return check
