"""Problem documents: RFC 9457, one row for each code."""

from __future__ import annotations

import json

import pytest

from flashwire.errors import BY_CODE
from flashwire_service.errors import ROWS, Refusal
from flashwire_service.front import problems


def test_the_client_and_the_service_know_the_same_codes() -> None:
    assert ROWS.keys() == BY_CODE.keys()
    assert all(ROWS[code].status == cls.default_status for code, cls in BY_CODE.items())


@pytest.mark.parametrize("code", ROWS)
def test_each_code_has_a_document(code: str) -> None:
    response = problems.response(Refusal(code, "what is wrong"), "the-id")
    document = json.loads(bytes(response.body))
    assert response.headers["content-type"] == "application/problem+json"
    assert response.status_code == document["status"] == ROWS[code].status
    assert document["title"] == ROWS[code].title
    assert document["code"] == code
    assert document["detail"] == document["error"] == "what is wrong"
    assert document["request_id"] == "the-id"
    assert "field" not in document
    assert "reasons" not in document


def test_who_may_come_back_is_told_when() -> None:
    for code, row in ROWS.items():
        response = problems.response(Refusal(code, ""), "")
        assert ("retry-after" in response.headers) == (row.status in (429, 503))
    for seconds, told in ((0.0, "1"), (0.2, "1"), (3.01, "4")):
        response = problems.response(Refusal("queue_full", "", retry_after=seconds), "")
        assert response.headers["retry-after"] == told


def test_fields_and_reasons() -> None:
    refusal = Refusal("invalid", "d", field="window", reasons=["a", "b"])
    document = problems.document(refusal, "")
    assert (document["field"], document["reasons"]) == ("window", ["a", "b"])


def test_halves_of_characters_can_be_repeated() -> None:
    refusal = Refusal("invalid", "is unknown: \ud800", field="\udfff")
    assert json.loads(problems.encode(refusal, ""))["field"] == "\udfff"


def test_what_a_caller_wrote_is_not_repeated_without_end() -> None:
    name = "n" * 100_000
    refusal = Refusal("invalid", name, field=name, reasons=[name] * 1000)
    assert len(problems.encode(refusal, "")) < 70_000
    document = problems.document(refusal, "")
    assert document["field"].endswith("n...")
    assert len(document["field"]) == 100
