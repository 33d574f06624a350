"""Residual ids: genuine ones are told from all others."""

from __future__ import annotations

import pytest

from flashwire_service import residual_id

KEY = b"k" * 32


def test_an_id_names_its_worker_to_its_owner() -> None:
    for worker in (0, 7, 65535):
        minted = residual_id.mint(KEY, worker, "owner")
        assert residual_id.verify(KEY, minted, "owner") == worker


def test_an_id_is_nothing_to_another_owner_or_under_another_key() -> None:
    minted = residual_id.mint(KEY, 1, "owner")
    assert residual_id.verify(KEY, minted, "another") is None
    assert residual_id.verify(KEY, minted, "") is None
    assert residual_id.verify(b"x" * 32, minted, "owner") is None


def test_ids_differ_and_fit_a_url() -> None:
    ids = {residual_id.mint(KEY, 0, "") for _ in range(100)}
    assert len(ids) == 100
    assert all(set(i) <= set("ABCDEFGHIJKLMNOPQRSTUVWXYZabcdefghijklmnopqrstuvwxyz0123456789-_")
               for i in ids)  # fmt: skip


def test_every_changed_character_is_seen() -> None:
    minted = residual_id.mint(KEY, 0, "")
    for at, letter in enumerate(minted):
        for other in ("A", "B", "x", "_"):
            if other != letter:
                forged = minted[:at] + other + minted[at + 1 :]
                assert residual_id.verify(KEY, forged, "") is None, at


@pytest.mark.parametrize("text", ["", "x", "A" * 46, "A" * 47, "é" * 46, "A" * 10_000, "/" * 46])
def test_what_was_never_an_id(text: str) -> None:
    assert residual_id.verify(KEY, text, "") is None


def test_one_id_has_one_spelling() -> None:
    minted = residual_id.mint(KEY, 0, "")
    for tail in ("=", "==", "\n", " "):
        assert residual_id.verify(KEY, minted + tail, "") is None
