"""The routes. What they take and give is the contract's; how it is done is elsewhere."""

from __future__ import annotations

import asyncio
import re
import time
from collections.abc import Awaitable, Coroutine
from contextlib import closing
from importlib.metadata import version
from typing import TYPE_CHECKING, Annotated, Any, TypeVar

import msgpack
from fastapi import APIRouter, Depends, FastAPI, Request
from fastapi.openapi.utils import get_openapi
from fastapi.responses import HTMLResponse, JSONResponse, RedirectResponse, Response
from starlette.requests import ClientDisconnect

from flashwire import wire
from flashwire_kernels.validation import Problem
from flashwire_service import meter, residual_id
from flashwire_service.errors import Refusal
from flashwire_service.front import (
    access,
    body,
    checks,
    estimates,
    metrics,
    planning,
    problems,
    readiness,
    reference,
    schemas,
)
from flashwire_service.front.access import Caller, Needs
from flashwire_service.front.buffers import Buffers
from flashwire_service.front.edge import Edge
from flashwire_service.front.incoming import KEY as INCOMING
from flashwire_service.front.incoming import Incoming
from flashwire_service.front.info import describe, lacking
from flashwire_service.front.lane import Lane
from flashwire_service.front.lent import Lent
from flashwire_service.front.message import Message
from flashwire_service.front.pool import Answer, Work, Workers
from flashwire_service.front.replies import MemoryResponse
from flashwire_service.front.routes import ComputeRoute
from flashwire_service.front.uploads import Uploads
from flashwire_service.keys import RIGHTS
from flashwire_service.logs import Log
from flashwire_service.settings import Settings

if TYPE_CHECKING:
    from flashwire_service.front.traces import Traces

_TIMEOUT_HEADER = "Flashwire-Timeout-Ms"
_BODY_ERRORS = (400, 401, 403, 408, 413, 415, 422, 429, 500, 503, 504, 507)
_DESCRIPTION = (
    "Exact attention, forward and backward, as a compute endpoint. Bodies are msgpack (tensors as "
    "bytes: docs/wire.md) or, up to 1 MiB, JSON. Errors are application/problem+json, with a "
    "stable `code`. Where the server has keys, send `Authorization: Bearer KEY`. `X-Request-Id` is "
    "taken or made, and always returned."
)
_T = TypeVar("_T")


class Front:
    """What routes share."""

    def __init__(self, settings: Settings, pool: Workers, counted: metrics.Metrics) -> None:
        self.settings = settings
        self.pool = pool
        self.metrics = counted
        self.uploads = Uploads(settings.upload_bytes)
        self.buffers = Buffers(settings.reuse_bytes)
        self.recall = wire.Recall()
        counted.watch(meter.UPLOADS, lambda: self.uploads.bodies)
        counted.watch(meter.UPLOAD_BYTES, lambda: self.uploads.held_bytes)

    async def read(self, request: Request, caller: Caller, schema: wire.Schema) -> Message:
        """The message in a request's body, or what body.read raises. The caller closes it."""
        return await body.read(
            request, caller.settings, schema, self.uploads, self.buffers, self.recall, caller.owner
        )

    async def compute(
        self,
        request: Request,
        route: str,
        options: dict[str, Any],
        message: Message | None,
        *,
        caller: Caller,
        problem: Problem | None = None,
        worker: int | None = None,
    ) -> Answer:
        """Have a worker do it. A caller who leaves, or a deadline, ends the wait."""
        limits = caller.settings
        facts = next(iter(self.pool.facts.values()), {})
        asked = options.get("backend") or "auto"
        work = Work(
            route=route,
            options=options,
            tensors={} if message is None else message.tensors,
            body=b"" if message is None else message.body,
            size=0 if message is None else message.size,
            owner=caller.owner,
            max_queued=limits.queue_requests if caller.owner else None,
            max_residual_bytes=limits.residual_bytes if caller.owner else None,
            device_bytes=estimates.device_bytes(
                route, message, problem, asked, facts.get("device", "cpu")
            ),
            accept=accepted(request),
            timeout_s=timeout_s(request, limits),
        )
        answer = await _while_connected(request, self.pool.run(work, worker))
        if message is not None:
            message.finished = True  # what was given up, a worker may still read
        request.state.answer = answer
        return answer

    def worker_of_residual(self, text: str, caller: Caller) -> int:
        """The worker that holds, or held, a residual of this owner. Raises Refusal (not_found)."""
        worker = residual_id.verify(self.settings.signing_key, text, caller.owner)
        if worker is None:
            raise Refusal("not_found", "this id was never given out for this key", field="residual")
        return worker


def create_app(
    settings: Settings,
    pool: Workers,
    log: Log | None = None,
    counted: metrics.Metrics | None = None,
    traces: Traces | None = None,
) -> FastAPI:
    """The HTTP application over a pool of workers. It makes traces where there are `traces`."""
    app = FastAPI(openapi_url=None, docs_url=None, redoc_url=None, redirect_slashes=False)
    front = Front(settings, pool, counted or metrics.Metrics(settings))
    app.state.front = front
    app.state.access = access.Access(settings)
    problems.install(app)
    for router in (_compute, _open, _info, _metrics, _keyed):
        app.include_router(router)
    app.openapi = lambda: _openapi(app)  # type: ignore[method-assign]
    app.add_middleware(Lane, routes=[r for r in _compute.routes if isinstance(r, ComputeRoute)])
    app.add_middleware(
        Edge, origins=settings.cors_origins, metrics=front.metrics,
        log=log or Log("front", settings.log_level), traces=traces,
    )  # fmt: skip
    return app


async def _front(request: Request) -> Front:  # a plain function would run in a thread
    front: Front = request.app.state.front
    return front


FrontEnd = Annotated[Front, Depends(_front)]
CallerOf = Annotated[Caller, Depends(access.caller)]
_open = APIRouter()
_keyed = APIRouter(dependencies=[Depends(access.caller)])
_compute, _info, _metrics = (APIRouter(dependencies=[Depends(Needs(right))]) for right in RIGHTS)
_compute.route_class = ComputeRoute


@_compute.post(
    "/attention",
    summary="Exact attention",
    responses=schemas.responses("attention", *_BODY_ERRORS),
    openapi_extra=schemas.operation("attention"),
)
async def attention(request: Request, front: FrontEnd, caller: CallerOf) -> Response:
    """softmax(scale q.k + bias) v over the visible keys, in float32 or wider, and its lse."""
    timeout_s(request, caller.settings)
    with closing(await front.read(request, caller, wire.ATTENTION)) as message:
        checked = checks.attention(message)
        answer = await front.compute(
            request, "attention", checked.options, message, caller=caller, problem=checked.problem
        )
    return _reply(request, answer)


@_compute.post(
    "/attention/backward",
    summary="Gradients of attention",
    responses=schemas.responses("backward", *_BODY_ERRORS, 404, 410),
    openapi_extra=schemas.operation("backward"),
)
async def backward(request: Request, front: FrontEnd, caller: CallerOf) -> Response:
    """dq, dk, dv (dbias, dsinks) from a saved forward, or from the inputs again."""
    timeout_s(request, caller.settings)
    with closing(await front.read(request, caller, wire.BACKWARD)) as message:
        worker = problem = None
        if message.options.get("residual") is None:
            checked = checks.backward(message)
            options, problem = checked.options, checked.problem
        else:
            options = checks.backward_by_residual(message)
            worker = front.worker_of_residual(options["residual"], caller)
        answer = await front.compute(
            request,
            "backward",
            options,
            message,
            caller=caller,
            problem=problem,
            worker=worker,
        )
    return _reply(request, answer)


@_compute.post(
    "/attention/check",
    summary="Compare backends, or results of yours, with the reference",
    responses=schemas.responses("check", *_BODY_ERRORS),
    openapi_extra=schemas.operation("check"),
)
async def check(request: Request, front: FrontEnd, caller: CallerOf) -> Response:
    """Whether results agree within the error budget, tensor by tensor."""
    timeout_s(request, caller.settings)
    with closing(await front.read(request, caller, wire.CHECK)) as message:
        checked = checks.check(message)
        answer = await front.compute(
            request, "check", checked.options, message, caller=caller, problem=checked.problem
        )
    return _reply(request, answer)


@_compute.post(
    "/attention/plan",
    summary="What a request would cost",
    responses=schemas.responses("plan", 400, 401, 403, 408, 413, 415, 422, 429, 500),
    openapi_extra=schemas.operation("plan"),
)
async def plan(request: Request, front: FrontEnd, caller: CallerOf) -> Response:
    """FLOPs, bytes, tiles and an estimate, from shapes alone."""
    timeout_s(request, caller.settings)
    with closing(await front.read(request, caller, wire.PLAN)) as message:
        options, problem = checks.plan(message)
        result = await asyncio.to_thread(planning.plan, options, problem, message, front.pool.facts)
    if accepted(request) == "json":
        return JSONResponse(result)
    return Response(msgpack.packb(result), media_type=wire.MEDIA_TYPE)


@_compute.delete(
    "/attention/residual/{residual}",
    summary="Free a saved forward",
    status_code=204,
    response_class=Response,
    responses=schemas.responses(None, 401, 403, 404, 410, 422, 429, 500, 503, 504),
)
async def release(request: Request, residual: str, front: FrontEnd, caller: CallerOf) -> Response:
    """It frees itself when its time to live has passed."""
    worker = front.worker_of_residual(residual, caller)
    options = {"residual": residual}
    await front.compute(request, "release", options, None, caller=caller, worker=worker)
    return Response(status_code=204)


@_open.head("/", include_in_schema=False)
@_open.get("/", include_in_schema=False)
async def root() -> RedirectResponse:
    return RedirectResponse("/docs")


@_open.head("/healthz", include_in_schema=False)
@_open.get("/healthz", summary="The process lives")
async def healthz() -> dict[str, str]:
    """Always 200 while there is a process to answer."""
    return {"status": "ok"}


@_open.head("/readyz", include_in_schema=False)
@_open.get("/readyz", summary="A worker takes requests", responses=schemas.responses(None, 503))
async def readyz(front: FrontEnd) -> dict[str, Any]:
    """200 once a worker has computed a real answer on its device, busy or not."""
    if front.pool.draining:
        raise Refusal("draining", "the server is shutting down")
    if not front.pool.ready:
        raise readiness.refusal(front.pool.state, time.monotonic())
    return {"ready": True, "workers": len(front.pool.facts)}


@_info.head("/info", include_in_schema=False)
@_info.get("/info", summary="What this server is", responses=schemas.responses(None, 401, 403))
async def info(front: FrontEnd, caller: CallerOf) -> dict[str, Any]:
    """Workers and their devices, dtypes, the caller's limits, versions, and what each backend
    supports.
    """
    return describe(caller.settings, front.pool.facts)


@_metrics.get(
    "/metrics",
    summary="Prometheus metrics",
    response_class=Response,
    responses={200: {"content": {"text/plain": {}}}, **schemas.responses(None, 401, 403)},
)
async def get_metrics(front: FrontEnd) -> Response:
    """What all processes of this service have counted, together."""
    text = front.metrics.exposition(front.pool.facts)
    return Response(text, headers={"content-type": metrics.CONTENT_TYPE})


@_keyed.get("/openapi.json", include_in_schema=False)
async def openapi(request: Request) -> JSONResponse:
    return JSONResponse(request.app.openapi())


@_keyed.get("/docs", include_in_schema=False)
async def docs(request: Request) -> HTMLResponse:
    page = reference.page(request.app.openapi(), str(request.base_url))
    return HTMLResponse(page, headers={"content-security-policy": reference.POLICY})


def accepted(request: Request) -> str:
    """The encoding of the reply: what Accept names, else the request's own."""
    accept = request.headers.get("accept", "").lower()
    names_msgpack, names_json = wire.MEDIA_TYPE in accept, body.JSON in accept
    if names_msgpack != names_json:
        return "json" if names_json else "msgpack"
    given = request.headers.get("content-type", "").lower()
    return "json" if given.startswith(body.JSON) else "msgpack"


def timeout_s(request: Request, settings: Settings) -> float:
    """How long the caller wants to wait for queue and compute. Raises Refusal (invalid)."""
    given = request.headers.get(_TIMEOUT_HEADER)
    if given is None:
        return settings.max_timeout_ms / 1000
    digits = given.strip().lstrip("0")
    if not re.fullmatch("[0-9]+", digits):
        raise Refusal(
            "invalid",
            f"{_TIMEOUT_HEADER} must be a positive whole number of milliseconds",
            field=_TIMEOUT_HEADER,
        )
    most = settings.max_timeout_ms
    return (most if len(digits) > len(str(most)) else min(int(digits), most)) / 1000


async def _while_connected(request: Request, work: Coroutine[Any, Any, _T]) -> _T:
    """The result of `work`, which is cancelled when the caller leaves: then ClientDisconnect."""
    incoming: Incoming | Lent | None = request.scope.get(INCOMING)
    task = asyncio.current_task()
    if incoming is None or task is None:
        return await _while_receiving(request, work)
    leaving = False

    def leave() -> None:
        nonlocal leaving
        leaving = True
        task.cancel()

    if incoming.left:
        work.close()
        raise ClientDisconnect
    incoming.on_left = leave
    try:
        return await work
    except asyncio.CancelledError:
        if leaving and not task.uncancel():
            raise ClientDisconnect from None
        raise
    finally:
        incoming.on_left = None


async def _while_receiving(request: Request, work: Awaitable[_T]) -> _T:
    """The same by ASGI alone, with two tasks more."""
    working = asyncio.ensure_future(work)
    leaving = asyncio.ensure_future(_disconnected(request))
    try:
        await asyncio.wait({working, leaving}, return_when=asyncio.FIRST_COMPLETED)
        if working.done():
            return working.result()
        raise ClientDisconnect
    finally:
        working.cancel()
        leaving.cancel()
        await asyncio.wait({working, leaving})  # the body is closed once this has returned


async def _disconnected(request: Request) -> None:
    while (await request.receive())["type"] != "http.disconnect":
        pass


def _reply(request: Request, answer: Answer) -> Response:
    media_type = body.JSON if accepted(request) == "json" else wire.MEDIA_TYPE
    if answer.memory is not None:
        return MemoryResponse(answer.memory, answer.reply.size, media_type)
    return Response(answer.reply.body, media_type=media_type)


def _openapi(app: FastAPI) -> dict[str, Any]:
    if app.openapi_schema is None:
        schema = get_openapi(
            title="flashwire",
            version=version("flashwire"),
            description=f"{_DESCRIPTION} {lacking()}".strip(),
            routes=app.routes,
        )
        schema["components"]["schemas"] = schemas.components()
        app.openapi_schema = schema
    return app.openapi_schema
