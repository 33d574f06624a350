"""Routes that compute: documented as any other, and called without FastAPI's machinery.

Finding out anew what each call depends on costs more than all else that is done for a small
request. These endpoints take a request, the front end, the caller and parameters of the path.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Coroutine
from typing import Any

from fastapi.routing import APIRoute
from starlette.requests import Request
from starlette.responses import Response

from flashwire_service.front import access

_GIVEN = frozenset({"request", "front", "caller"})


class ComputeRoute(APIRoute):
    """One of them. Raises TypeError for a route that would need more than is given to it."""

    def get_route_handler(self) -> Callable[[Request], Coroutine[Any, Any, Response]]:
        endpoint = self.endpoint
        unknown = set(inspect.signature(endpoint).parameters) - _GIVEN - set(self.param_convertors)
        needed = [depends.dependency for depends in self.dependencies]
        strange = [one for one in needed if not isinstance(one, access.Needs)]
        if unknown or strange:
            raise TypeError(f"{self.path} would not get {sorted(unknown)} {strange}")
        rights = [one.right for one in needed if isinstance(one, access.Needs)]

        async def handle(request: Request) -> Response:
            caller = access.identify(request)
            for right in rights:
                access.require(caller, right)
            front = request.app.state.front
            response: Response = await endpoint(
                request=request, front=front, caller=caller, **request.path_params
            )
            return response

        return handle
