"""One class per code, and no code without a class."""

import pickle
import re
from pathlib import Path
from typing import Any

import pytest

from flashwire import Client, errors

DOCS = Path(__file__).parents[2] / "docs"


def subclasses(cls: type) -> set[type]:
    return {cls}.union(*(subclasses(sub) for sub in cls.__subclasses__()))


def test_every_class_has_its_own_code() -> None:
    classes = subclasses(errors.RequestError) - {errors.RequestError}
    assert {cls.code for cls in classes} == set(errors.STATUS)
    assert len(classes) == len(errors.STATUS)
    for cls in classes:
        assert errors.BY_CODE[cls.code] is cls


def test_every_status_of_the_contract_has_a_class() -> None:
    text = (DOCS / "contract.md").read_text()
    rows = re.findall(r"^\| ([0-9 /]+) \|", text[text.index("## 4. Errors") :], re.MULTILINE)
    statuses = {int(status) for row in rows for status in row.split("/")}
    assert len(statuses) >= 14
    assert set(errors.STATUS.values()) == statuses | {500}


def test_the_wires_documentation_lists_every_code() -> None:
    text = (DOCS / "wire.md").read_text()
    rows = re.findall(r"^\| `([a-z_]+)` \| ([0-9]{3}) \|", text, re.MULTILINE)
    assert {code: int(status) for code, status in rows} == errors.STATUS


def test_the_tree_is_drawn() -> None:
    drawn = set(re.findall(r"\+-- (\w+)", errors.__doc__ or ""))
    assert drawn == {cls.__name__ for cls in subclasses(errors.FlashwireError)} - {"FlashwireError"}
    for code, status in errors.STATUS.items():
        assert f"{code}, {status}\n" in (errors.__doc__ or "")


@pytest.mark.parametrize("code", errors.STATUS)
def test_replies_raise_their_class(server: Any, qkv: Any, code: str) -> None:
    server.script = [
        server.problem(
            errors.STATUS[code], code, "too bad, request", field="q", reasons=["D > 256", "fp64"]
        )
    ]
    with Client(server.url, retries=0) as client, pytest.raises(errors.BY_CODE[code]) as caught:
        client.attention(*qkv)
    error = caught.value
    assert type(error) is errors.BY_CODE[code]
    assert (error.code, error.status) == (code, errors.STATUS[code])
    assert (error.field, error.reasons, error.request_id) == ("q", ("D > 256", "fp64"), "req-1")
    assert str(error) == f"q: too bad, request (D > 256; fp64) [{error.status}, request req-1]"


def test_a_code_of_a_newer_server(server: Any, client: Client, qkv: Any) -> None:
    server.script = [server.problem(418, "teapot", "short and stout")]
    with pytest.raises(errors.RequestError, match="short and stout") as caught:
        client.attention(*qkv)
    assert type(caught.value) is errors.RequestError
    assert caught.value.status == 418


def test_what_the_detail_says_is_not_said_twice() -> None:
    error = errors.Invalid(
        "k: heads must divide q's", field="k", reasons=["k: heads must divide q's"]
    )
    assert str(error) == "k: heads must divide q's"


@pytest.mark.parametrize(
    "error",
    [
        errors.Invalid("no", field="q", request_id="r", reasons=("a",)),
        errors.UnexpectedReply("what", 502),
        errors.SecondDerivative(),
        errors.ConnectionLost("away"),
    ],
)
def test_errors_survive_a_process_boundary(error: errors.FlashwireError) -> None:
    copy = pickle.loads(pickle.dumps(error))  # noqa: S301
    assert type(copy) is type(error)
    assert str(copy) == str(error)
    assert vars(copy) == vars(error)
