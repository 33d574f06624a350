"""The demo's data is what it says: a real model's attention, exact up to one float16 rounding."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

DATA = Path(__file__).parents[2] / "examples" / "data" / "minilm_attention.npz"


@pytest.fixture(scope="module")
def data() -> dict[str, np.ndarray]:
    with np.load(DATA, allow_pickle=False) as file:
        return dict(file)


def test_it_is_small() -> None:
    assert DATA.stat().st_size <= 1_000_000


def test_shapes(data: dict[str, np.ndarray]) -> None:
    first, second = data["lengths"]
    assert first != second
    for name in ("q", "k", "v", "out"):
        assert data[name].shape == (6, first + second, 12, 32)
        assert data[name].dtype == np.float16
    assert len(data["ids"]) == len(data["tokens"]) == first + second
    assert list(data["tokens"][[0, first - 1, first, -1]]) == ["[CLS]", "[SEP]"] * 2


def test_out_is_attention_of_q_k_v_rounded_once(data: dict[str, np.ndarray]) -> None:
    ends = np.cumsum(data["lengths"])
    for start, end in zip(ends - data["lengths"], ends, strict=True):
        q, k, v = (data[name][:, start:end].astype(np.float64) for name in "qkv")
        scores = np.einsum("lihd,ljhd->lhij", q, k) * 32**-0.5
        p = np.exp(scores - scores.max(-1, keepdims=True))
        out = np.einsum("lhij,ljhd->lihd", p / p.sum(-1, keepdims=True), v)
        stored = data["out"][:, start:end]
        half_ulp = np.spacing(np.abs(stored)).astype(np.float64) / 2
        assert (np.abs(out - stored.astype(np.float64)) <= half_ulp * (1 + 1e-9)).all()
