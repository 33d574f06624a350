"""A short way to the routes that compute, past the router and the layers FastAPI puts around it.

For a small request those cost more than all else that is done for it. The routes stay FastAPI's,
for the reference and for every request that is not exactly one of them.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Iterable, MutableMapping
from typing import Any

from starlette.requests import Request

from flashwire_service.errors import Refusal
from flashwire_service.front import problems
from flashwire_service.front.routes import ComputeRoute

Scope = MutableMapping[str, Any]
App = Callable[[Scope, Any, Any], Awaitable[None]]


class Lane:
    """Wraps the router: requests whose method and path are those of a route go to it at once."""

    def __init__(self, app: App, routes: Iterable[ComputeRoute]) -> None:
        """Routes with parameters in their paths are left to the router."""
        self._app = app
        self._ways = {
            (method, route.path): (route, route.get_route_handler())
            for route in routes
            if not route.param_convertors
            for method in route.methods or ()
        }

    async def __call__(self, scope: Scope, receive: Any, send: Any) -> None:
        way = self._ways.get((scope.get("method", ""), scope.get("path", "")))
        if way is None:
            await self._app(scope, receive, send)
            return
        route, handle = way
        scope["route"] = route
        request = Request(scope, receive, send)
        try:
            response = await handle(request)
        except Refusal as refusal:
            response = problems.answer(request, refusal)
        await response(scope, receive, send)
