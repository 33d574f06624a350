"""Which client a call is for: its own, or the one that `use` has named."""

from __future__ import annotations

from flashwire.client import Client

_default: Client | None = None


class use:  # noqa: N801  # a verb: `with use(client):`
    """Make `client` the one for calls of flashwire.torch that name none, in all threads.

    use(client)             from now on; use(None) for none
    with use(client): ...   until the end of the block
    """

    def __init__(self, client: Client | None) -> None:
        global _default
        if client is not None:
            _check(client)
        self._before = _default
        _default = client

    def __enter__(self) -> None:
        pass

    def __exit__(self, *exc: object) -> None:
        global _default
        _default = self._before


def resolve(client: Client | None) -> Client:
    """`client` itself, or the default one. Raises TypeError for what is none, and for none."""
    if client is None:
        client = _default
    if client is None:
        raise TypeError("there is no client: give client=, or call flashwire.torch.use(client)")
    _check(client)
    return client


def _check(client: object) -> None:
    if not isinstance(client, Client):
        raise TypeError(f"client must be a flashwire.Client, got {type(client).__name__}")
