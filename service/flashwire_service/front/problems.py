"""Everything that is answered with an error, as application/problem+json (RFC 9457)."""

from __future__ import annotations

import json
import math
from typing import Any

from fastapi import FastAPI, Request
from starlette.exceptions import HTTPException
from starlette.responses import Response

from flashwire_service.errors import Refusal

_LONGEST = {"field": 100, "reason": 500, "detail": 4000}  # names and values are a caller's own
MEDIA_TYPE = "application/problem+json"
_HTTP_CODES = {404: "not_found", 405: "method_not_allowed"}


def document(refusal: Refusal, request_id: str) -> dict[str, Any]:
    """The members of a problem; the ones that do not apply are left out, long texts cut."""
    detail = _cut("detail", refusal.detail)
    members = {
        "type": f"urn:flashwire:problem:{refusal.code}",
        "title": refusal.row.title,
        "status": refusal.row.status,
        "detail": detail,
        "code": refusal.code,
        "error": detail,
        "field": None if refusal.field is None else _cut("field", refusal.field),
        "reasons": [_cut("reason", r) for r in refusal.reasons[:100]] or None,
        "request_id": request_id,
    }
    return {name: value for name, value in members.items() if value is not None}


def _cut(kind: str, text: str) -> str:
    most = _LONGEST[kind]
    return text if len(text) <= most else text[: most - 3] + "..."


def encode(refusal: Refusal, request_id: str) -> bytes:
    """The body of a problem. ASCII: a request may hold halves of characters."""
    return json.dumps(document(refusal, request_id)).encode("ascii")


def response(refusal: Refusal, request_id: str) -> Response:
    """The reply to a refused request."""
    return Response(
        encode(refusal, request_id),
        status_code=refusal.row.status,
        media_type=MEDIA_TYPE,
        headers={**refusal.headers, **retry_after(refusal)},
    )


def retry_after(refusal: Refusal) -> dict[str, str]:
    """The header of that name, in whole seconds, where trying again may help."""
    if refusal.retry_after is None:
        return {}
    return {"retry-after": str(max(1, math.ceil(refusal.retry_after)))}


def answer(request: Request, refusal: Refusal) -> Response:
    """The reply to a refused request. Its code is noted for the log and metrics (edge.py)."""
    request.state.code = refusal.code
    return response(refusal, request.state.request_id)


def install(app: FastAPI) -> None:
    """Answer refusals, and what the router says about unknown paths and methods."""

    async def on_refusal(request: Request, exc: Exception) -> Response:
        if not isinstance(exc, Refusal):
            raise exc
        return answer(request, exc)

    async def on_http_exception(request: Request, exc: Exception) -> Response:
        if not isinstance(exc, HTTPException):
            raise exc
        allowed = {k.lower(): v for k, v in (exc.headers or {}).items()}
        if request.method == "OPTIONS" and exc.status_code == 405:
            return Response(status_code=204, headers=allowed)
        code = _HTTP_CODES.get(exc.status_code, "malformed")
        said = {
            "not_found": "there is no such route; /docs lists what there is",
            "method_not_allowed": f"{request.method} is not a method of this route",
        }.get(code, "the request cannot be read")
        return answer(request, Refusal(code, said, headers=allowed))

    app.add_exception_handler(Refusal, on_refusal)
    app.add_exception_handler(HTTPException, on_http_exception)
