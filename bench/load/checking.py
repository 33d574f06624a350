"""Whether a reply has the form that the contract gives it, whatever it says."""

from __future__ import annotations

import json
from typing import Any

from load.connection import Reply

_PROBLEM = "application/problem+json"
_MEMBERS = {"type", "title", "status", "detail", "code", "error", "request_id"}
_SECRETS = ("Traceback", ".py", "/site-packages", "/usr/")
_COME_BACK = (429, 503)


def code_of(reply: Reply) -> str:
    """The stable word of a refusal; "" where there is none."""
    try:
        problem = json.loads(reply.body)
    except ValueError:
        return ""
    return str(problem.get("code", "")) if isinstance(problem, dict) else ""


def deformity(reply: Reply, request_id: str | None) -> str | None:
    """What is wrong with the form of a reply, or None. `request_id` is the one that was sent."""
    returned = reply.headers.get("x-request-id", "")
    if not returned or (request_id is not None and returned != request_id):
        return f"x-request-id is {returned!r}, sent was {request_id!r}"
    if reply.status < 400:
        return None
    if reply.headers.get("content-type") != _PROBLEM:
        return f"content-type is {reply.headers.get('content-type')!r}"
    try:
        problem: Any = json.loads(reply.body)
    except ValueError:
        return "the body is no JSON"
    if not isinstance(problem, dict) or not problem.keys() >= _MEMBERS:
        return f"members are missing: {reply.body[:200]!r}"
    if (problem["status"], problem["request_id"]) != (reply.status, returned):
        return "status or request_id of the body are not those of the head"
    text = reply.body.decode(errors="replace")
    if told := [secret for secret in _SECRETS if secret in text]:
        return f"it tells {told[0]!r}: {text[:300]}"
    if reply.status in _COME_BACK and not reply.headers.get("retry-after", "").isdigit():
        return f"status {reply.status} without a Retry-After"
    return None
