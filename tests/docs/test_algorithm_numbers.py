"""The numbers of docs/algorithm.md, computed again. A number that the page lacks fails too."""

from __future__ import annotations

import re
from math import exp, log
from pathlib import Path

import numpy as np
import pytest

from flashwire_kernels.plan import Plan, plan
from flashwire_kernels.types import AttentionSpec, TensorHeader
from flashwire_kernels.validation import resolve

DOCS = Path(__file__).parents[2] / "docs"
TEXT = re.sub(r"\s+", " ", (DOCS / "algorithm.md").read_text(encoding="utf-8"))
N, D = 16384, 128
FULL = AttentionSpec()
CAUSAL = AttentionSpec(causal=True)
WINDOW = AttentionSpec(causal=True, window=(1023, 0))


def counted(spec: AttentionSpec, dim: int = D) -> Plan:
    header = TensorHeader("float16", (N, dim))
    return plan(resolve(spec, {"q": header, "k": header, "v": header}), sram_elements=131072)


def giga(flops: float) -> str:
    return f"{flops / 1e9:.1f} G"


def test_bytes() -> None:
    full = counted(FULL)
    block = 131072 // (2 * D)
    passes = N // block
    keys_and_values = 2 * N * D * 2
    assert f"**{full.bytes_materialised_s:,} bytes**" in TEXT
    assert f"**{full.bytes_out_lse:,} bytes** together, **{full.materialised_ratio:.2f}**" in TEXT
    assert f"the ratio is **{full.traffic_reduction:g}**" in TEXT
    assert f"unavoidable {full.bytes_min:,}" in TEXT
    assert f"read {passes} times over" in TEXT
    assert f"moves {full.bytes_min + (passes - 1) * keys_and_values:,} bytes where" in TEXT
    assert f"attention moves {full.bytes_min + 4 * full.bytes_materialised_s:,}." in TEXT
    d32, d256 = (counted(FULL, dim).traffic_reduction for dim in (32, 256))
    assert f"at D = 32 it is {d32:g}, at D = 256 it is {d256:g}" in TEXT


def test_tiles() -> None:
    causal, window = counted(CAUSAL), counted(WINDOW)
    assert f"**{causal.tiles.visited:,}** of {causal.tiles.total:,} tiles" in TEXT
    assert f"a window of 1024 keys as well, **{window.tiles.visited:,}**" in TEXT
    assert f"there are {causal.tiles.masked} of them ({window.tiles.masked} with the" in TEXT
    computed = causal.tiles.visited * causal.tiles.block**2
    assert f"adds {100 * (computed / causal.visible_pairs - 1):.1f} %" in TEXT


@pytest.mark.parametrize(
    ("name", "spec"),
    [("all keys visible", FULL), ("causal", CAUSAL), ("causal, window (1023, 0)", WINDOW)],
)
def test_pairs_and_flops(name: str, spec: AttentionSpec) -> None:
    p = counted(spec)
    assert f"| {name} | {p.visible_pairs:,} | {giga(p.flops_fwd)} |" in TEXT


def test_backward_flops() -> None:
    full, causal = counted(FULL), counted(CAUSAL)
    assert f"2 * pairs * (D + Dv) | {giga(full.flops_fwd)} | {giga(causal.flops_fwd)}" in TEXT
    assert f"(3 D + 2 Dv) | {giga(full.flops_bwd)} | {giga(causal.flops_bwd)}" in TEXT
    two = [giga(2 * p.visible_pairs * 7 * D) for p in (full, causal)]
    assert f"(4 D + 3 Dv) | {two[0]} | {two[1]}" in TEXT


def test_online_softmax_and_merge() -> None:
    s, v = np.array([3.0, 1, 6, 2]), np.array([1.0, 2, 3, 4])
    whole_lse = log(np.exp(s).sum())
    whole_out = (np.exp(s - whole_lse) * v).sum()
    l1, a1 = 1 + exp(-2), 1 + 2 * exp(-2)
    l2, a2 = l1 * exp(-3) + 1 + exp(-4), a1 * exp(-3) + 3 + 4 * exp(-4)
    assert 6 + log(l2) == pytest.approx(whole_lse, abs=1e-12)
    assert a2 / l2 == pytest.approx(whole_out, abs=1e-12)
    assert f"| 3, 1 | 3 | 1 + e⁻² = {l1:.4f} | 1 + 2 e⁻² = {a1:.4f} |" in TEXT
    assert f"{l1:.4f} e⁻³ + 1 + e⁻⁴ = {l2:.4f} |" in TEXT
    assert f"{a1:.4f} e⁻³ + 3 + 4 e⁻⁴ = {a2:.4f} |" in TEXT
    assert f"out = {a2:.4f} / {l2:.4f} = {whole_out:.4f}" in TEXT
    assert f"= {whole_lse:.4f}: what" in TEXT

    lse = [log(np.exp(part).sum()) for part in (s[:2], s[2:])]
    out = [(np.exp(s[i : i + 2] - lse[i // 2]) * v[i : i + 2]).sum() for i in (0, 2)]
    weights = [exp(part - whole_lse) for part in lse]
    assert weights[0] * out[0] + weights[1] * out[1] == pytest.approx(whole_out, abs=1e-12)
    assert f"[3, 1] gives out {out[0]:.4f} and lse {lse[0]:.4f}" in TEXT
    assert f"[6, 2] gives {out[1]:.4f} and {lse[1]:.4f}" in TEXT
    assert f"the weights are {weights[0]:.4f} and {weights[1]:.4f}, and" in TEXT
    assert f"the sum is {whole_out:.4f} again" in TEXT


def test_figures_are_there_and_small() -> None:
    named = re.findall(r"!\[[^\]]+\]\(([^)]+)\)", TEXT)
    assert named == ["figures/tiles.png", "figures/traffic.png"]
    for name in named:
        assert 0 < (DOCS / name).stat().st_size < 150_000
