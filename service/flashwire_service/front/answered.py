"""A request that has been answered, as metrics, log and traces tell of it."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from flashwire_service.front.pool import Answer


@dataclass(frozen=True, slots=True, kw_only=True)
class Answered:
    """Nothing of it is a caller's to make long. Times are CLOCK_MONOTONIC seconds.

    headers   of the request, for the trace that it belongs to
    route     a template, never a path; "unmatched" where there is none
    code      of the error, "" where there is none
    key       the name of the caller's key, "" where there is none
    answer    what a worker computed, where one did
    """

    request_id: str
    headers: Mapping[str, str]
    scheme: str
    method: str
    route: str
    status: int
    code: str
    key: str
    received: int
    sent: int
    began: float
    ended: float
    answer: Answer | None

    @property
    def seconds(self) -> float:
        return self.ended - self.began

    def line(self) -> dict[str, Any]:
        """For the log. What does not apply is left out."""
        line: dict[str, Any] = {
            "request_id": self.request_id,
            "method": self.method,
            "route": self.route,
            "status": self.status,
            "duration_ms": round(self.seconds * 1000, 3),
            "received_bytes": self.received,
            "sent_bytes": self.sent,
        }
        if self.code:
            line["code"] = self.code
        if self.key:
            line["key"] = self.key
        if self.answer is not None:
            reply = self.answer.reply
            line |= {
                "worker": self.answer.worker,
                "backend": reply.backend,
                "queue_ms": round(reply.queue_ms, 3),
                "compute_ms": round(reply.compute_ms, 3),
            }
        return line
