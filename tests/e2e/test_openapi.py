"""The OpenAPI document, fuzzed against a real server: no fault, nothing undocumented."""

from __future__ import annotations

import json
from typing import Any

import msgpack
import pytest
import schemathesis
from hypothesis import HealthCheck, Phase, given, settings
from hypothesis import strategies as st
from schemathesis import GenerationMode
from schemathesis.specs.openapi.checks import (
    content_type_conformance,
    response_headers_conformance,
    response_schema_conformance,
    status_code_conformance,
)

CHECKS = [
    status_code_conformance,
    content_type_conformance,
    response_headers_conformance,
    response_schema_conformance,
]
NO_FAULT = (504, 507)  # a deadline of 1 ms, a tensor that only claims to be small
QUICK = settings(
    max_examples=40,
    deadline=None,
    derandomize=True,
    database=None,
    phases=[Phase.explicit, Phase.generate],
    suppress_health_check=list(HealthCheck),
)
OPERATIONS = [
    ("/attention", "POST"),
    ("/attention/backward", "POST"),
    ("/attention/check", "POST"),
    ("/attention/plan", "POST"),
    ("/attention/residual/{residual}", "DELETE"),
    ("/healthz", "GET"),
    ("/readyz", "GET"),
    ("/info", "GET"),
    ("/metrics", "GET"),
]
POSTS = [path for path, method in OPERATIONS if method == "POST"]


@pytest.fixture(scope="module")
def document(server: Any) -> Any:
    return server.http.get("/openapi.json").json()


@pytest.fixture(scope="module")
def schema(document: Any, server: Any) -> Any:
    """The document as JSON callers see it; msgpack is fuzzed below."""
    seen = json.loads(json.dumps(document))
    for path in POSTS:
        seen["paths"][path]["post"]["requestBody"]["content"].pop("application/msgpack")
    loaded = schemathesis.openapi.from_dict(seen)
    loaded.config.update(base_url=server.url)
    return loaded


def test_every_route_is_documented(document: Any) -> None:
    found = {(p, m.upper()) for p, ways in document["paths"].items() for m in ways}
    assert found == set(OPERATIONS)


@pytest.mark.parametrize(("path", "method"), OPERATIONS)
@pytest.mark.parametrize("mode", [GenerationMode.POSITIVE, GenerationMode.NEGATIVE])
def test_fuzzed(schema: Any, server: Any, path: str, method: str, mode: GenerationMode) -> None:
    operation = schema[path][method]
    if mode is GenerationMode.NEGATIVE and method == "GET":
        mode = GenerationMode.POSITIVE  # it has no parameters to get wrong

    @QUICK
    @given(case=operation.as_strategy(generation_mode=mode))
    def run(case: Any) -> None:
        response = case.call(headers={"content-type": "application/json"} if case.body else None)
        case.validate_response(response, checks=CHECKS)
        assert response.status_code < 500 or response.status_code in NO_FAULT

    run()
    server.check_unharmed()


def tensor(shape: list[int], nbytes: int) -> dict[str, Any]:
    return {"dtype": "float32", "shape": shape, "data": b"\0" * nbytes}


VALID = {
    "/attention": {name: tensor([2, 2], 16) for name in "qkv"} | {"causal": True},
    "/attention/backward": {n: tensor([2, 2], 16) for n in ("q", "k", "v", "dout")},
    "/attention/check": {"request": {name: tensor([2, 2], 16) for name in "qkv"}},
    "/attention/plan": {"q": {"dtype": "float16", "shape": [4, 4]}, "window": [1, 2]},
}


@pytest.mark.parametrize("path", POSTS)
def test_mutated_messages(server: Any, document: Any, path: str) -> None:
    """A valid message with a few bytes changed, cut out or put in."""
    valid = msgpack.packb(VALID[path])
    assert server.post(path, content=valid).status_code == 200
    documented = {int(status) for status in document["paths"][path]["post"]["responses"]}
    change = st.tuples(
        st.integers(0, len(valid) - 1), st.integers(0, 3), st.binary(max_size=3)
    )  # fmt: skip

    @QUICK
    @given(changes=st.lists(change, min_size=1, max_size=3))
    def run(changes: list[tuple[int, int, bytes]]) -> None:
        body = valid
        for at, cut, put in changes:
            body = body[:at] + put + body[at + cut :]
        reply = server.post(path, content=body)
        assert reply.status_code in documented
        assert reply.status_code < 500 or reply.status_code in NO_FAULT
        if reply.status_code != 200:
            assert reply.headers["content-type"] == "application/problem+json"

    run()
    server.check_unharmed()
