"""Sans-IO: an exchange with the server as a generator that asks for what it needs.

`converse` yields a Request to be sent, to which the shell answers with a Response or with the
ConnectionLost that came instead, or a number of seconds to wait. It returns the result or raises.
What is retried, when, and what a reply means is all decided here; client.py only moves bytes.

Every operation may be sent twice. Attention, check and plan are pure; backward by residual leaves
the residual as it is. A forward sent twice with `save_for_backward` leaves at most a residual that
nobody asks for, which the server drops in time. With `release` the second sending may find that the
first has done its work: then the reply is lost, and that is what the caller is told.
"""

from __future__ import annotations

import email.utils
import json
import math
import random
import re
import time
from collections.abc import Callable, Generator, Mapping
from dataclasses import dataclass, field
from typing import Any, Generic, Literal, TypeVar

import numpy as np
import numpy.typing as npt

from flashwire import wire
from flashwire.errors import (
    BY_CODE,
    ConnectionLost,
    FlashwireError,
    Gone,
    Invalid,
    RequestError,
    UnexpectedReply,
)

T = TypeVar("T")
RETRIED = (429, 503)
_MAX_ERROR = 64 * 1024
_REPLY_LIMITS = wire.Limits(max_header=2**20)


@dataclass(frozen=True, slots=True)
class Request:
    """What is to be sent. `headers` lacks only what HTTP itself needs.

    deadline   seconds left for queue and compute, None for no deadline of the caller's
    """

    method: str
    path: str
    headers: Mapping[str, str]
    body: tuple[wire.Buffer, ...]
    size: int
    deadline: float | None


@dataclass(frozen=True, slots=True)
class Response:
    """What came back. `headers` has lower-case names."""

    status: int
    headers: Mapping[str, str]
    body: npt.NDArray[np.uint8]


@dataclass(frozen=True, slots=True)
class Operation(Generic[T]):
    """One thing to ask of a server, and how to read its reply.

    retry   whether to try again at all
    gone    a 410 is an error ("raise"); or it is the aim ("done"); or, once a connection was lost,
            it says that the first sending arrived and its reply did not ("lost")
    """

    method: str
    path: str
    read: Callable[[Response], T]
    body: tuple[wire.Buffer, ...] = ()
    size: int = 0
    timeout: float | None = None
    retry: bool = True
    gone: Literal["raise", "done", "lost"] = "raise"


@dataclass(frozen=True, slots=True, kw_only=True)
class Policy:
    """How a client behaves, whatever it asks.

    timeout      seconds for queue and compute, all tries together; None for the server's own limit
    retries      tries after the first one
    first_wait   seconds, doubled at each retry up to `longest_wait`, and drawn from the upper half
                 of that. It comes on top of a Retry-After, and one beyond it is not waited for
    headers      sent with every request
    """

    timeout: float | None = 60.0
    retries: int = 3
    first_wait: float = 0.1
    longest_wait: float = 30.0
    headers: Mapping[str, str] = field(default_factory=dict)


Exchange = Generator[Request | float, Response | ConnectionLost | None, T]


def converse(operation: Operation[T], policy: Policy) -> Exchange[T]:
    """Send, wait, send again, read: see the module's docstring."""
    timeout = _checked(policy.timeout if operation.timeout is None else operation.timeout)
    end = time.monotonic() + timeout
    lost: ConnectionLost | None = None
    retries = policy.retries if operation.retry else 0
    attempt = 0
    while True:
        reply = yield _request(operation, policy, end - time.monotonic())
        if isinstance(reply, Response):
            if reply.status < 300 or (reply.status == 410 and operation.gone == "done"):
                return operation.read(reply)
            failure: FlashwireError = refusal(reply)
            if lost is not None and isinstance(failure, Gone) and operation.gone == "lost":
                raise lost from failure
        elif isinstance(reply, ConnectionLost):
            failure = lost = reply
            lost.tries = attempt + 1
        else:
            raise TypeError("a Request is answered by a Response or a ConnectionLost")
        wait = _wait(policy, attempt, failure)
        if attempt >= retries or wait is None or time.monotonic() + wait >= end:
            raise failure
        attempt += 1
        yield wait


def refusal(reply: Response) -> RequestError | UnexpectedReply:
    """The exception that a reply of status 300 or more stands for."""
    retry_after = _retry_after(reply.headers.get("retry-after"))
    try:
        problem = json.loads(reply.body[:_MAX_ERROR].tobytes())
    except (ValueError, RecursionError):  # a stranger's page, or worse
        problem = None
    if not isinstance(problem, dict) or not isinstance(problem.get("code"), str):
        text = f"HTTP status {reply.status}, and not in the form of flashwire's errors"
        return UnexpectedReply(text, reply.status, retry_after)
    reasons = problem.get("reasons")
    request_id = problem.get("request_id") or reply.headers.get("x-request-id")
    return BY_CODE.get(problem["code"], RequestError)(
        str(problem.get("detail") or problem.get("title") or problem["code"]),
        status=reply.status,
        field=str(problem["field"]) if problem.get("field") is not None else None,
        reasons=[str(reason) for reason in reasons] if isinstance(reasons, list) else (),
        request_id=str(request_id) if request_id is not None else None,
        retry_after=retry_after,
    )


def read_message(reply: Response) -> wire.Message:
    """The message of a good reply. Raises UnexpectedReply."""
    kind = reply.headers.get("content-type", "").partition(";")[0].strip().lower()
    if kind != wire.MEDIA_TYPE:
        raise UnexpectedReply(f"a reply of type {kind!r}, not {wire.MEDIA_TYPE}", reply.status)
    try:
        return wire.decode(reply.body.data, wire.REPLY, _REPLY_LIMITS)
    except wire.WireError as exc:
        raise UnexpectedReply(f"the reply cannot be read: {exc}", reply.status) from exc


def _checked(timeout: float | None) -> float:
    if timeout is None:
        return math.inf
    if not timeout > 0:
        raise Invalid(f"must be a positive number of seconds, got {timeout}", field="timeout")
    return timeout


def _request(operation: Operation[Any], policy: Policy, left: float) -> Request:
    headers = dict(policy.headers)
    if operation.body:
        headers["content-type"] = wire.MEDIA_TYPE
    deadline = None
    if math.isfinite(left):
        deadline = max(left, 0.001)
        headers["flashwire-timeout-ms"] = str(math.ceil(deadline * 1000))
    return Request(
        operation.method, operation.path, headers, operation.body, operation.size, deadline
    )


def _wait(policy: Policy, attempt: int, failure: FlashwireError) -> float | None:
    """Seconds before trying again; None for a failure that trying again cannot mend."""
    if isinstance(failure, ConnectionLost):
        asked = 0.0
        if attempt == 0:  # most often a kept connection that the server has closed meanwhile
            return 0.0
    elif isinstance(failure, (RequestError, UnexpectedReply)) and failure.status in RETRIED:
        asked = failure.retry_after or 0.0
    else:
        return None
    if asked > policy.longest_wait:
        return None
    backoff = min(policy.first_wait * 2.0**attempt, policy.longest_wait)
    return asked + backoff * random.uniform(0.5, 1.0)


def _retry_after(value: str | None) -> float | None:
    """Seconds of a Retry-After header, which may also be a date."""
    if value is None:
        return None
    if re.fullmatch(r"[0-9]{1,9}(\.[0-9]+)?", value.strip()):
        return float(value)
    try:
        date = email.utils.parsedate_to_datetime(value)
    except ValueError:
        return None
    return max(0.0, date.timestamp() - time.time())
