"""One dropout pattern: of every backend, pass and tile size, entry by entry, read off the results.

Where q or k is 0, all visible keys are equally likely. One-hot values, keys, queries and dout then
give each entry a number of its own in some result: clearly above 0 where it was kept.
"""

import dataclasses

import pytest
import torch

from flashwire_kernels import api
from flashwire_kernels.fused import config
from flashwire_kernels.philox import keep_tile
from flashwire_kernels.tensors import Wanted
from flashwire_kernels.types import AttentionSpec

BACKENDS = ("reference", "cpu", "triton")
FIRST_WORD = 0x6627E8D5  # of seed 0, at b = h = i = j = 0
FORMS = {
    "dense": {"sizes": ((35, 70),) * 2},
    "packed": {"sizes": ((34, 5), (0, 4), (3, 0), (2, 70)), "packed": True},
}


@dataclasses.dataclass(frozen=True, kw_only=True)
class Pattern:
    """What dropout depends on, and what it must not."""

    sizes: tuple[tuple[int, int], ...]
    packed: bool = False
    heads: tuple[int, int] = (2, 1)
    p: float = 0.4
    seed: int = 2**63 + 12345
    window: tuple[int, int] | None = None
    dtype: torch.dtype = torch.float32

    @property
    def longest(self):
        return tuple(max(lengths) for lengths in zip(*self.sizes, strict=True))

    def spec(self):
        return AttentionSpec(
            scale=1.0, dropout_p=self.p, dropout_seed=self.seed, window=self.window
        )

    def kept(self):
        """By the definition: for each batch row or sequence, (Hq, Lq, Lk)."""
        return [self._kept(b, *lengths) for b, lengths in enumerate(self.sizes)]

    def _kept(self, b, len_q, len_k):
        heads, rows, cols = range(self.heads[0]), range(len_q), range(len_k)
        kept = keep_tile(self.seed, self.p, batch=[b], heads=heads, rows=rows, cols=cols)[0]
        if self.window is not None:
            left, right = self.window
            ahead = torch.arange(len_k) - torch.arange(len_q)[:, None] - (len_k - len_q)
            kept &= (ahead >= -left) & (ahead <= right)
        return kept

    def stack(self, parts):
        """(L, H, D) of each row or sequence, as they are called."""
        parts = [part.to(self.dtype) for part in parts]
        return torch.cat(parts) if self.packed else torch.stack(parts).transpose(1, 2)

    def split(self, t, of_keys):
        """The inverse, as (H, L, D) each."""
        if not self.packed:
            return list(t)
        lengths = [sizes[of_keys] for sizes in self.sizes]
        return [part.transpose(0, 1) for part in t.split(lengths)]

    def offsets(self):
        if not self.packed:
            return {}
        return {
            f"cu_seqlens_{name}": [
                sum(s[n] for s in self.sizes[:end]) for end in range(len(self.sizes) + 1)
            ]
            for n, name in enumerate("qk")
        }


def run(pattern, backend, q, k, v, dout=None, bias=None):
    """out, and the gradients of a dout that is given.

    dlse is what ds subtracts, so that ds is above 0 where an entry was kept, and 0 where not.
    """
    options = {"spec": pattern.spec(), "bias": bias, "backend": backend, **pattern.offsets()}
    found = api.forward(q, k, v, **options)
    if dout is None:
        return found.out, None
    dlse = (found.out * dout).float().sum(-1)
    wanted = Wanted(bias=bias is not None)
    saved = {"out": found.out, "lse": found.lse}
    back = api.backward(dout, q, k, v, **options, **saved, dlse=dlse, wanted=wanted)
    return found.out, back.gradients


def by_key(pattern, backend, backward=True):
    """The pattern as out, and with backward dq and dbias, show it: a column per key."""
    (heads_q, heads_kv), (len_q, len_k) = pattern.heads, pattern.longest
    names = torch.eye(len_k)
    q = pattern.stack(torch.zeros(n, heads_q, len_k) for n, _ in pattern.sizes)
    k = pattern.stack(names[:n, None].expand(n, heads_kv, len_k) for _, n in pattern.sizes)
    bias = torch.zeros(len(pattern.sizes), heads_q, len_q, len_k, dtype=pattern.dtype)
    dout = torch.ones_like(q) if backward else None
    out, g = run(pattern, backend, q, k, k, dout, bias)
    shown = {"out": pattern.split(out, 0)}
    if backward:
        shown |= {"dq": pattern.split(g.dq, 0), "dbias": list(g.dbias)}
    return {
        name: [
            part[:, :rows, :cols] for part, (rows, cols) in zip(parts, pattern.sizes, strict=True)
        ]
        for name, parts in shown.items()
    }


def by_query(pattern, backend):
    """The pattern as dk and dv show it: a column per query of each head that shares the keys."""
    (heads_q, heads_kv), (len_q, _) = pattern.heads, pattern.longest
    group = heads_q // heads_kv
    names = torch.eye(group * len_q).view(group, len_q, -1).transpose(0, 1).repeat(1, heads_kv, 1)
    q = pattern.stack(names[:n] for n, _ in pattern.sizes)
    k = pattern.stack(torch.zeros(n, heads_kv, group * len_q) for _, n in pattern.sizes)
    _, g = run(pattern, backend, q, k, torch.ones_like(k), q)
    shown = {"dk": pattern.split(g.dk, 1), "dv": pattern.split(g.dv, 1)}
    return {
        name: [
            part.unflatten(2, (group, len_q)).permute(0, 2, 3, 1).flatten(0, 1)[:, :rows]
            for part, (rows, _) in zip(parts, pattern.sizes, strict=True)
        ]
        for name, parts in shown.items()
    }


def assert_one_pattern(pattern, backends=BACKENDS):
    kept = pattern.kept()
    least = 1 / (1 - pattern.p) / (2 * pattern.longest[1])  # half of what any kept entry adds
    for backend in backends:
        shown = by_key(pattern, backend) | by_query(pattern, backend)
        assert shown.keys() == {"out", "dq", "dk", "dv", "dbias"}
        for name, parts in shown.items():
            for part, expected in zip(parts, kept, strict=True):
                assert torch.equal(part > least, expected), (backend, name)


@pytest.mark.parametrize("form", FORMS.values(), ids=FORMS)
def test_every_backend_and_pass_shows_it(form, interpreted):
    assert_one_pattern(Pattern(**form))


@pytest.mark.long
@pytest.mark.parametrize("tiles", [(16, 32), (32, 16), (128, 32), (16, 128)], ids=str)
@pytest.mark.parametrize("form", FORMS.values(), ids=FORMS)
def test_whatever_the_tiles(form, tiles, interpreted, monkeypatch):
    use(monkeypatch, *tiles)
    assert_one_pattern(Pattern(**form), ["triton"])


def test_small_tiles(interpreted, monkeypatch):
    use(monkeypatch, 16, 32)
    assert_one_pattern(Pattern(sizes=((20, 40),)), ["triton"])


@pytest.mark.parametrize("options", [
    {"sizes": ((3, 130),), "heads": (4, 2)},
    {"sizes": ((3, 70), (0, 66), (1, 7)), "packed": True}], ids=["dense", "packed"])  # fmt: skip
def test_few_queries_share_out_their_keys(options, interpreted):
    pattern = Pattern(**options)
    for part, kept in zip(
        by_key(pattern, "triton", backward=False)["out"], pattern.kept(), strict=True
    ):
        assert torch.equal(part != 0, kept)


@pytest.mark.parametrize("options", [
    {"window": (10, 20)}, {"heads": (4, 2), "dtype": torch.bfloat16},
    {"heads": (3, 1), "dtype": torch.float16}], ids=str)  # fmt: skip
def test_whatever_the_other_options(options, interpreted):
    assert_one_pattern(Pattern(sizes=((9, 50),), **options))


@pytest.mark.parametrize("p", [2**-32, 1e-12, 0.5, 0.999, 1 - 2**-53])
@pytest.mark.parametrize("seed", [0, 2**32, 2**32 - 1, 2**64 - 1])
def test_every_seed_and_probability(seed, p, interpreted):
    pattern = Pattern(sizes=((5, 11),), heads=(1, 1), seed=seed, p=p)
    for backend in BACKENDS:
        (out,) = by_key(pattern, backend, backward=False)["out"]
        assert torch.equal(out != 0, pattern.kept()[0]), backend


@pytest.mark.parametrize(("words", "kept"), [(0.5, True), (1, True), (1.5, True), (2, False)])
def test_the_threshold_itself(words, kept, interpreted):
    """The first word of seed 0 is kept when the threshold, rounded down, is not above it."""
    pattern = Pattern(sizes=((1, 1),), heads=(1, 1), seed=0, p=(FIRST_WORD - 1 + words) / 2**32)
    for backend in BACKENDS:
        (out,) = by_key(pattern, backend, backward=False)["out"]
        assert (out != 0).item() == kept, backend


def use(patch, m, n):
    """Have every pass take tiles of m queries and n keys."""
    chosen = config.Config(m=m, n=n, split=max(64, n), descriptors=True)
    patch.setattr(config, "choose", lambda *args, **kwargs: chosen)
