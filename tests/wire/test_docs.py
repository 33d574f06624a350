"""docs/wire.md shows the bytes as they are."""

import dataclasses
import re
from pathlib import Path

from flashwire import Plan, wire

DOC = (Path(__file__).parents[2] / "docs" / "wire.md").read_text()
GOLDEN = Path(__file__).parent / "golden"
_GRADIENTS = ("dq", "dk", "dv", "dbias", "dsinks")


def test_annotated_example_is_the_golden_file() -> None:
    block = re.search(r"```hex\n(.*?)```", DOC, re.DOTALL)
    assert block is not None
    data = b""
    for line in block[1].splitlines():
        found = re.match(r"([0-9a-f]{2})  ((?:[0-9a-f]{2} )*[0-9a-f]{2})(?:  |$)", line)
        assert found is not None, line
        assert int(found[1], 16) == len(data), line
        data += bytes.fromhex(found[2])
    assert data == (GOLDEN / "attention.msgpack").read_bytes()


def test_orders_are_those_of_the_encoder() -> None:
    text = " ".join(DOC.split())
    assert ", ".join(wire.OPTION_ORDER) + "." in text
    assert ", ".join(name for name in wire.TENSOR_ORDER if name not in _GRADIENTS) + "." in text


def test_names_and_limits_are_all_there() -> None:
    for name in (*wire.ITEM_SIZE, *wire.OPTION_ORDER, *wire.TENSOR_ORDER):
        assert f"`{name}`" in DOC, name
    limits = wire.Limits()
    assert f"more than {limits.max_rank} dimensions" in DOC
    assert f"{limits.max_keys} keys in a map" in DOC
    assert f"deeper than {limits.max_depth}," in DOC
    assert f"{limits.max_header // 1024} KiB of everything" in DOC


def test_every_member_of_a_plan_is_there() -> None:
    section = DOC[DOC.index("## POST /attention/plan") : DOC.index("## JSON")]
    for field in dataclasses.fields(Plan):
        assert re.search(rf"^\|.*`{field.name}`.*\|", section, re.MULTILINE), field.name
