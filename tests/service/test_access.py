"""Rights and limits of keys, and the headers of every reply, over a pool that stands in."""

from __future__ import annotations

import base64
import contextlib
import hashlib
import re
from collections.abc import AsyncIterator, Callable, Iterator
from typing import Any

import httpx
import msgpack
import pytest

from flashwire_service.front import headers
from flashwire_service.front.app import create_app
from flashwire_service.front.pool import Answer, Work
from flashwire_service.ipc.frames import Reply, State
from flashwire_service.keys import Key, KeyLimits, Keyring, digest_of, listed
from flashwire_service.logs import Log
from flashwire_service.settings import Settings

SMALL: dict[str, Any] = {"q": [[1, 0]], "k": [[1, 0], [0, 1]], "v": [[1, 2], [3, 4]]}
POSTS = ("/attention", "/attention/backward", "/attention/check", "/attention/plan")


class OnePool:
    """Answers `{}`, and remembers what it was asked."""

    ready, draining, facts, state = True, False, {0: {"device": "cpu"}}, State()

    def __init__(self) -> None:
        self.jobs: list[Work] = []

    async def run(self, work: Work, worker: int | None = None) -> Answer:
        self.jobs.append(work)
        return Answer(Reply(id=1, size=2, body=b"{}"), None, 0)


def key(name: str, may: tuple[str, ...] = ("compute", "info", "metrics"), **limits: int) -> Key:
    """The key `NAME-key`."""
    given = KeyLimits(**limits)
    return Key(name=name, digest=digest_of(f"{name}-key"), may=may, limits=given)


class Served:
    """An application with keys, and one client for each of them."""

    def __init__(self, *filed: Key, base: str = "http://test", **settings: Any) -> None:
        self.pool = OnePool()
        self.settings = Settings(api_keys=Keyring(filed=filed), **settings)
        self.app = create_app(self.settings, self.pool, Log("front", "error"))
        transport = httpx.ASGITransport(self.app)  # type: ignore[arg-type]
        self.http = httpx.AsyncClient(transport=transport, base_url=base)

    async def ask(self, name: str, method: str, path: str, **more: Any) -> httpx.Response:
        more["headers"] = {"authorization": f"Bearer {name}-key", **more.get("headers", {})}
        return await self.http.request(method, path, **more)

    def install(self, ring: Keyring) -> None:
        self.app.state.access.install(ring)


Serve = Callable[..., Served]


@pytest.fixture
async def serve() -> AsyncIterator[Serve]:
    async with contextlib.AsyncExitStack() as stack:
        started: list[Served] = []

        def start(*filed: Key, **settings: Any) -> Served:
            started.append(Served(*filed, **settings))
            stack.push_async_callback(started[-1].http.aclose)
            return started[-1]

        yield start


def code(reply: httpx.Response) -> tuple[int, str]:
    return reply.status_code, reply.json()["code"] if reply.status_code >= 400 else ""


# What a key may


async def test_a_right_opens_its_routes_and_no_other(serve: Serve) -> None:
    served = serve(
        key("caller", ("compute",)), key("scraper", ("metrics",)), key("looker", ("info",))
    )
    allowed = {
        "caller": [("POST", path) for path in POSTS] + [("DELETE", "/attention/residual/x")],
        "scraper": [("GET", "/metrics")],
        "looker": [("GET", "/info"), ("HEAD", "/info")],
    }
    for owner, routes in allowed.items():
        for method, path in routes:
            for name in allowed:
                reply = await served.ask(name, method, path, json=SMALL)
                forbidden = reply.status_code == 403
                assert forbidden == (name != owner), (method, path, name)
                if forbidden and method != "HEAD":
                    assert reply.json()["code"] == "forbidden"
            stranger = await served.ask("stranger", method, path, json=SMALL)
            assert stranger.status_code == 401
    for name in allowed:
        for path in ("/docs", "/openapi.json"):
            assert (await served.ask(name, "GET", path)).status_code == 200


def flat(routes: list[Any]) -> Iterator[Any]:
    """Those of included routers too, which newer versions of FastAPI leave where they are."""
    for route in routes:
        inner = getattr(route, "original_router", None)
        yield from flat(inner.routes) if inner else [route]


async def test_every_route_is_open_on_purpose_or_needs_a_key(serve: Serve) -> None:
    """A route added without a thought would show here."""
    served = serve(key("alice"))
    without = set()
    for route in flat(served.app.routes):
        path = re.sub(r"{.*}", "x", route.path)
        for method in route.methods:
            if (await served.http.request(method, path)).status_code != 401:
                without.add((method, path))
    open_ones = {"/", "/healthz", "/readyz"}
    assert without == {(method, path) for path in open_ones for method in ("GET", "HEAD")}


# How much


async def test_limits_of_a_key_are_lower_than_those_of_the_service(serve: Serve) -> None:
    low = {"max_body_bytes": 2048, "max_timeout_ms": 500, "queue_requests": 2, "residual_bytes": 9}
    high = {"max_body_bytes": 2**40, "max_timeout_ms": 80_000_000, "queue_requests": 10**6}
    served = serve(key("low", **low), key("high", **high), key("none"), max_body_bytes=4096)
    for name, body, timeout, queued, residual in (
        ("low", 2048, 0.5, 2, 9),
        ("high", 4096, 300.0, 64, 2**30),
        ("none", 4096, 300.0, 64, 2**30),
    ):
        assert (await served.ask(name, "POST", "/attention", json=SMALL)).status_code == 200
        work = served.pool.jobs[-1]
        assert (work.timeout_s, work.max_queued, work.max_residual_bytes) == (
            timeout,
            queued,
            residual,
        )
        await served.ask(
            name, "POST", "/attention", json=SMALL, headers={"flashwire-timeout-ms": "999999999"}
        )
        assert served.pool.jobs[-1].timeout_s == timeout
        over = await served.ask(name, "POST", "/attention", content=bytes(body + 1))
        assert code(over) == (413, "too_large")
        assert str(body) in over.json()["detail"]
        at_most = await served.ask(name, "POST", "/attention", content=bytes(body))
        assert code(at_most) == (400, "malformed")
        limits = (await served.ask(name, "GET", "/info")).json()["limits"]
        assert (limits["max_body_bytes"], limits["residual_bytes"]) == (body, residual)


async def test_a_key_keeps_as_many_forwards_as_its_limit_or_the_setting_says(serve: Serve) -> None:
    """A limit of its own takes the place of the setting, and the service's room bounds both."""
    own = key("own", residual_bytes=800), key("greedy", residual_bytes=5000), key("none")
    served = serve(*own, residual_bytes=1000, key_residual_bytes=500)
    for name, room in (("own", 800), ("greedy", 1000), ("none", 500)):
        await served.ask(name, "POST", "/attention", json=SMALL)
        assert served.pool.jobs[-1].max_residual_bytes == room


async def test_without_keys_there_are_no_limits_of_an_owner(serve: Serve) -> None:
    served = serve()
    assert (await served.ask("any", "POST", "/attention", json=SMALL)).status_code == 200
    work = served.pool.jobs[0]
    assert (work.owner, work.max_queued, work.max_residual_bytes) == ("", None, None)


# New keys


async def test_new_keys_hold_at_once_and_old_ones_no_more(serve: Serve) -> None:
    served = serve(key("old"), key("both"))
    assert (await served.ask("old", "GET", "/info")).status_code == 200
    served.install(Keyring(filed=(key("both", ("metrics",)), key("new"))))
    for name, status in (("old", 401), ("new", 200), ("both", 403)):
        assert (await served.ask(name, "GET", "/info")).status_code == status


async def test_a_service_with_keys_is_never_open(serve: Serve) -> None:
    served = serve(key("old"))
    served.install(Keyring())
    assert (await served.ask("old", "GET", "/info")).status_code == 401
    assert (await served.http.get("/info")).status_code == 401


async def test_keys_of_the_environment_may_everything() -> None:
    (only,) = listed("a-listed-key")
    assert (only.may, only.limits) == (("compute", "info", "metrics"), KeyLimits())


# Limits of messages


@pytest.mark.parametrize(
    ("setting", "value", "body", "field"),
    [
        ("max_rank", 4, {"q": {"dtype": "float32", "shape": [1] * 5, "data": b"\0" * 4}}, "q"),
        ("max_elements", 3, {"q": {"dtype": "bool", "shape": [2, 2], "data": b"\0" * 4}}, "q"),
        ("max_nesting", 4, {"window": [[[[1]]]]}, "window"),
        ("max_map_keys", 32, {"dropout": {f"x{n}": 1 for n in range(33)}}, "dropout"),
        ("max_message_header_bytes", 4096, {"layout": "x" * 4200}, None),
    ],
)
async def test_limits_of_messages_are_settings(
    serve: Serve, setting: str, value: int, body: Any, field: str | None
) -> None:
    for limits, expected in (({setting: value}, (400, "malformed")), ({}, (422, "invalid"))):
        reply = await serve(**limits).http.post("/attention", content=msgpack.packb(body))
        assert code(reply) == expected
        if limits:
            assert reply.json().get("field") == field
            assert str(value) in reply.json()["detail"]


@pytest.mark.parametrize(
    ("setting", "value", "body"),
    [("max_rank", 4, {"q": [[[[[1]]]]]}),
     ("max_rank", 4, {"q": {"dtype": "float32", "shape": [0] * 5, "data": []}}),
     ("max_nesting", 4, {"window": [[[[[[[[[[[[1]]]]]]]]]]]]}),
     ("max_map_keys", 32, {"dropout": {f"x{n}": 1 for n in range(33)}})],
)  # fmt: skip
async def test_limits_of_json_are_the_same(
    serve: Serve, setting: str, value: int, body: Any
) -> None:
    for limits, expected in (({setting: value}, (400, "malformed")), ({}, (422, "invalid"))):
        assert code(await serve(**limits).http.post("/attention", json=body)) == expected


# Headers


@pytest.mark.parametrize(
    ("method", "path"),
    [("GET", "/healthz"), ("HEAD", "/healthz"), ("GET", "/"), ("GET", "/nothing"),
     ("GET", "/attention"), ("OPTIONS", "/attention"), ("POST", "/attention"), ("GET", "/metrics"),
     ("GET", "/docs")],
)  # fmt: skip
async def test_every_reply_has_the_headers(serve: Serve, method: str, path: str) -> None:
    for base in ("http://test", "https://test"):
        served = serve(base=base, cors_origins=("https://a.example",))
        ask = {"origin": "https://a.example", "access-control-request-method": "POST"}
        reply = await served.http.request(method, path, headers=ask)
        for name, value in headers.of_reply(secure=base.startswith("https")).items():
            if (path, name) != ("/docs", "content-security-policy"):
                assert reply.headers.get_list(name) == [value]
        assert ("strict-transport-security" in reply.headers) == base.startswith("https")


async def test_the_documentation_may_show_its_own_style_and_nothing_else(serve: Serve) -> None:
    reply = await serve().http.get("/docs")
    (policy,) = reply.headers.get_list("content-security-policy")
    (style,) = re.findall(r"<style>(.*?)</style>", reply.text, re.DOTALL)
    digest = base64.b64encode(hashlib.sha256(style.encode()).digest()).decode()
    assert f"style-src 'sha256-{digest}'" in policy
    assert "default-src 'none'" in policy
    assert "unsafe" not in policy
    assert not re.search(r"<script|\bstyle=|\bon\w+=|<img|<link", reply.text)
