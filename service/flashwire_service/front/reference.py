"""The page at /docs: the OpenAPI document as HTML, whole. It loads nothing from elsewhere."""

from __future__ import annotations

import base64
import hashlib
import json
from collections.abc import Iterator, Mapping
from html import escape
from typing import Any

_STYLE = """
body { font: 16px/1.5 system-ui, sans-serif; max-width: 60em; margin: 2em auto; padding: 0 1em }
h2 { margin-top: 2.5em } code, pre { font: 14px/1.4 ui-monospace, monospace }
pre { background: #8881; padding: .8em; white-space: pre-wrap; overflow-wrap: anywhere }
table { border-collapse: collapse }
td, th { border-bottom: 1px solid #8884; padding: .2em 1em .2em 0; text-align: left;
vertical-align: top }
"""
# What a browser may do with the page: show this one style sheet, and nothing else.
POLICY = (
    "default-src 'none'; base-uri 'none'; form-action 'none'; frame-ancestors 'none'; style-src "
    f"'sha256-{base64.b64encode(hashlib.sha256(_STYLE.encode()).digest()).decode()}'"
)
Json = Mapping[str, Any]


def page(document: Json, base_url: str) -> str:
    """Every route with its options, an example to paste into a shell, and its replies."""
    base = base_url.rstrip("/")
    routes = [
        (method.upper(), path, operation)
        for path, ways in document["paths"].items()
        for method, operation in ways.items()
    ]
    parts = [
        "<!doctype html><html lang='en'><meta charset='utf-8'>",
        f"<title>{escape(document['info']['title'])}</title><style>{_STYLE}</style>",
        f"<h1>{escape(document['info']['title'])} {escape(document['info']['version'])}</h1>",
        f"<p>{escape(document['info']['description'])} Machines read <a href='/openapi.json'>",
        "/openapi.json</a>.</p><ul>",
        *(f"<li><a href='#{_anchor(m, p)}'><code>{m} {p}</code></a></li>" for m, p, _ in routes),
        "</ul>",
    ]
    for method, path, operation in routes:
        parts += _route(document, base, method, path, operation)
    return "\n".join(parts) + "</html>"


def curl(base: str, path: str, body: Any) -> str:
    """A request as one types it."""
    text = json.dumps(body)
    return f"curl -s {base}{path} -H 'Content-Type: application/json' -d '{text}'"


def _route(document: Json, base: str, method: str, path: str, operation: Json) -> Iterator[str]:
    yield f"<h2 id='{_anchor(method, path)}'><code>{method} {path}</code></h2>"
    said = escape(operation.get("description", ""))
    yield f"<p><b>{escape(operation['summary'])}.</b> {said}</p>"
    content = operation.get("requestBody", {}).get("content", {})
    if described := content.get("application/json"):
        yield f"<pre>{escape(curl(base, path, described['example']))}</pre>"
        yield "<table>"
        yield from _rows(document, _resolve(document, described["schema"]), "")
        yield "</table>"
    yield "<table>"
    for status, reply in operation["responses"].items():
        yield f"<tr><th>{status}</th><td>{escape(reply['description'])}</td></tr>"
    yield "</table>"


def _rows(document: Json, schema: Json, prefix: str) -> Iterator[str]:
    """A row for each property; those of an object are listed under its name."""
    required = schema.get("required", [])
    for name, given in schema.get("properties", {}).items():
        inner = _resolve(document, given)
        default = given.get("default")
        kind = "required" if name in required else "" if default is None else json.dumps(default)
        text = given.get("description") or inner.get("description", "")
        yield (
            f"<tr><td><code>{escape(prefix + name)}</code></td><td>{escape(_type(inner))}</td>"
            f"<td>{escape(kind)}</td><td>{escape(text)}</td></tr>"
        )
        yield from _rows(document, inner, f"{prefix}{name}.")


def _resolve(document: Json, schema: Json) -> Json:
    """A schema behind its reference, or the one branch of a choice that has one."""
    if "$ref" in schema:
        found: Json = document["components"]["schemas"][schema["$ref"].rpartition("/")[2]]
        return found
    for branch in schema.get("anyOf", ()):
        if "$ref" in branch:
            return _resolve(document, branch)
    return schema


def _type(schema: Json) -> str:
    if "enum" in schema:
        return " | ".join(map(str, schema["enum"]))
    if "anyOf" in schema:
        return " | ".join(dict.fromkeys(_type(branch) for branch in schema["anyOf"]))
    if "data" in schema.get("properties", {}):
        return "{dtype, shape, data}"
    return str(schema.get("type", schema.get("const", "")))


def _anchor(method: str, path: str) -> str:
    return f"{method}{path}".replace("/", "-").replace("{", "").replace("}", "").lower()
