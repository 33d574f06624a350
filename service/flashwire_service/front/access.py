"""Who calls, and what they may: keys as the routes see them.

Each request is asked for its key, so a key that is taken away stops working with the next one.
"""

from __future__ import annotations

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


def identify(request: Request) -> Caller:
    """The caller of a request. Raises Refusal (unauthorized)."""
    access: Access = request.app.state.access
    scheme, _, text = request.headers.get("authorization", "").partition(" ")
    found = access.caller(text.strip() if scheme.lower() == "bearer" else "")
    request.state.caller = found
    return found


def require(caller: Caller, right: str) -> None:
    """Raises Refusal (forbidden)."""
    if right not in caller.may:
        raise Refusal("forbidden", f"this key may not use this route: it lacks {right!r}")


async def caller(
    request: Request,
    scheme: Annotated[HTTPAuthorizationCredentials | None, Depends(_SCHEME)],  # for the reference
) -> Caller:
    """The caller of a request. Raises Refusal (unauthorized)."""
    return identify(request)


class Needs:
    """A dependency of routes that only some keys may use. It raises Refusal (forbidden)."""

    def __init__(self, right: str) -> None:
        self.right = right

    async def __call__(self, caller: Annotated[Caller, Depends(caller)]) -> None:
        require(caller, self.right)
