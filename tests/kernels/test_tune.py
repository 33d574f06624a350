"""bench/tune.py: a dry run of it, and how it writes into the shipped tables."""

import json
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest
import torch

from flashwire_kernels.fused.config import PASSES, Config, Key, shipped
from gpu import tables, tune_time
from gpu.items import ERROR, PASS

BENCH = Path(__file__).parents[2] / "bench"
KEY = Key("forward", "sm_90", 2, 128, False)


@pytest.mark.timeout(900)
def test_a_dry_run(tmp_path):
    command = [
        sys.executable, BENCH / "tune.py", "--dry-run", "--write", tmp_path, "--out", tmp_path,
        "--pass", "keys", "--dim", "64", "--width", "half", "--modified",
    ]  # fmt: skip
    done = subprocess.run(command, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout + done.stderr
    assert "keys, sm_90 half d64, modified: causal, softcap" in done.stdout
    (row,) = json.loads((tmp_path / "tune.json").read_text())["rows"]
    assert row["status"] == PASS
    assert len(row["tried"]) == 2
    assert row["left_out"] == []
    assert tomllib.loads((tmp_path / "keys.toml").read_text())["sm_90"]["half"]["d64_modified"]
    assert [file.name for file in tmp_path.glob("*.toml")] == ["keys.toml"]


@pytest.mark.parametrize("kind", PASSES)
def test_what_is_shipped_is_written_as_it_is(kind):
    text = (tables.SHIPPED / f"{kind}.toml").read_text()
    assert tables.replaced(text, shipped(kind)) == text


TABLE = """\
# above
[sm_80.half]
d128 = { m = 16 }

[sm_90.half]
d128_modified = { m = 16 }
d128 = { m = 16 }  # why
"""


def test_only_its_own_line_is_replaced():
    chosen = Config(m=64, n=32, warps=4, stages=2, descriptors=True)
    new = "d128 = { m = 64, n = 32, warps = 4, stages = 2, descriptors = true }  # why"
    assert tables.replaced(TABLE, {KEY: chosen}) == TABLE.replace("d128 = { m = 16 }  # why", new)
    with pytest.raises(KeyError):
        tables.replaced(TABLE, {KEY._replace(dim=256): chosen})


def test_rewriting_leaves_the_others(tmp_path):
    written = tables.rewrite([(list(KEY), {"m": 64, "n": 64, "warps": 4, "stages": 3})], tmp_path)
    assert written == [tmp_path / "forward.toml"]
    before, after = (
        (folder / "forward.toml").read_text().splitlines() for folder in (tables.SHIPPED, tmp_path)
    )
    assert [b for a, b in zip(before, after, strict=True) if a != b] == [
        "d128 = { m = 64, n = 64, warps = 4, stages = 3 }"
    ]


def test_what_is_not_timed():
    first, spills, slow, fast, fails = (Config(m=64, n=64, stages=n) for n in range(1, 6))
    compiled = {
        first: {"status": PASS, "spilled": 0},
        spills: {"status": PASS, "spilled": 8},
        slow: {"status": PASS, "spilled": 0, "predicted": {"serial": 100.0}},
        fast: {"status": PASS, "spilled": 0, "predicted": {"serial": 200.0}},
        fails: {"status": ERROR, "error": "OutOfResources"},
    }
    chosen, left_out = tune_time._promising(first, compiled)
    assert chosen == [first, fast, slow]
    assert [row["why"] for row in left_out] == ["spills 8 bytes", "OutOfResources"]


@pytest.mark.parametrize(("dtype", "off"), [(torch.bfloat16, 2.0**-5), (torch.float32, 2.0**-16)])
def test_other_values_are_seen(dtype, off):
    shipped_result = torch.linspace(-1, 1, 99, dtype=dtype)
    other = shipped_result.clone()
    assert tune_time._difference({"out": other}, {"out": shipped_result}) == ""
    other[98] += off
    assert "out" in tune_time._difference({"out": other}, {"out": shipped_result})
    other[98] = torch.nan
    assert "out" in tune_time._difference({"out": other}, {"out": shipped_result})
