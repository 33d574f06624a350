"""What the cpu backend promises beyond its results: memory, work, and whom a bad value reaches.

Its results are judged by the conformance suite, its bits by test_repeatability.
"""

import math
from dataclasses import dataclass, field

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from flashwire_kernels import api
from flashwire_kernels.cpu import aten, tiled
from flashwire_kernels.cpu.part import Cut, aligned
from flashwire_kernels.cpu.tiles import segments
from flashwire_kernels.geometry import Band
from flashwire_kernels.tensors import Wanted
from flashwire_kernels.types import AttentionSpec

NAN, INF = math.nan, math.inf
PLAIN = AttentionSpec()


@dataclass
class Watch(TorchDispatchMode):
    """Notes what every operation allocates and multiplies while it is entered."""

    largest: int = 0
    multiplied: int = 0
    calls: list[str] = field(default_factory=list)

    def __post_init__(self):
        super().__init__()

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        result = func(*args, **(kwargs or {}))
        self.calls.append(func.overloadpacket.__name__)
        for t in result if isinstance(result, tuple) else (result,):
            if isinstance(t, torch.Tensor):
                self.largest = max(self.largest, t.untyped_storage().nbytes())
        if func.overloadpacket is torch.ops.aten.bmm:
            a, b = args[:2]
            self.multiplied += a.shape[0] * a.shape[1] * a.shape[2] * b.shape[2]
        return result


def rand(*shape, dtype=torch.float32, seed=0):
    return torch.randn(shape, dtype=dtype, generator=torch.Generator().manual_seed(seed))


def qkv(heads=2, length=64, dim=16, batch=1):
    return (rand(batch, heads, length, dim, seed=seed) for seed in range(3))


def both(q, k, v, dout=None, dlse=None, spec=PLAIN, bias_grad=False, **options):
    f = api.forward(q, k, v, spec=spec, backend="cpu", **options)
    dout = torch.ones_like(f.out) if dout is None else dout
    b = api.backward(
        dout, q, k, v, out=f.out, lse=f.lse, dlse=dlse, spec=spec, backend="cpu",
        wanted=Wanted(bias=bias_grad), **options,
    )  # fmt: skip
    return f, b.gradients


class TestExtraMemory:
    LENGTH, DIM = 1600, 16
    LIMIT = LENGTH**2 * 4 // 7  # a seventh of the scores; a tile is a sixteenth

    @pytest.mark.parametrize("options", [
        {},
        {"spec": AttentionSpec(causal=True)},
        {"spec": AttentionSpec(softcap=5.0, causal=True, dropout_p=0.1, dropout_seed=3)},
        {"spec": AttentionSpec(window=(800, 100)), "alibi_slopes": torch.tensor([0.1])},
        {"mask": torch.ones(LENGTH, dtype=torch.bool)},
        {"bias": torch.zeros(LENGTH, 1), "sinks": torch.zeros(1)},
    ], ids=["dense", "causal", "softcap", "window", "mask", "bias"])  # fmt: skip
    def test_no_tensor_grows_with_the_square_of_the_length(self, options):
        q, k, v = qkv(1, self.LENGTH, self.DIM)
        with Watch() as watch:
            both(q, k, v, bias_grad="bias" in options, **options)
        assert q.nbytes < watch.largest < self.LIMIT

    def test_hiding_with_care_does_neither(self):
        q, k, v = qkv(1, self.LENGTH, self.DIM)
        mask = torch.ones(self.LENGTH, dtype=torch.bool)
        mask[7], k[0, 0, 7] = False, NAN
        with Watch() as watch:
            f, _ = both(q, k, v, mask=mask)
        assert f.out.isfinite().all()
        assert q.nbytes < watch.largest < self.LIMIT


class TestWork:
    def test_a_window_costs_what_it_shows(self):
        q, k, v = qkv(8, 4096, 64)
        spec = AttentionSpec(causal=True, window=(255, 0))
        with Watch() as watch:
            api.forward(q, k, v, spec=spec, backend="cpu")
        visible = 8 * Band.of(spec, 4096, 4096).visible_pairs(4096, 4096)
        assert watch.multiplied <= 1.3 * visible * 2 * 64

    def test_so_does_its_gradient(self):
        q, k, v = qkv(8, 2048, 64)
        spec = AttentionSpec(causal=True, window=(255, 0))
        f = api.forward(q, k, v, spec=spec, backend="cpu")
        with Watch() as watch:
            api.backward(f.out, q, k, v, out=f.out, lse=f.lse, spec=spec, backend="cpu")
        visible = 8 * Band.of(spec, 2048, 2048).visible_pairs(2048, 2048)
        assert watch.multiplied <= 1.3 * visible * 5 * 64

    def test_many_equal_short_sequences_go_together(self):
        lengths = [3, 5, 2, 5, 3] * 200
        offsets = [0]
        for n in lengths:
            offsets.append(offsets[-1] + n)
        q, k, v = (rand(offsets[-1], 2, 16, seed=seed) for seed in range(3))
        with Watch() as watch:
            both(q, k, v, cu_seqlens_q=offsets, cu_seqlens_k=offsets)
        assert len(watch.calls) < 800  # alone they would be many tens of thousands

    @pytest.mark.parametrize(("spec", "calls"), [
        (PLAIN, 1), (AttentionSpec(causal=True), 2), (AttentionSpec(window=(500, None)), 1),
        (AttentionSpec(causal=True, causal_align="top_left"), 1), (AttentionSpec(window=(9, 9)), 0),
        (AttentionSpec(softcap=1.0), 0), (AttentionSpec(causal=True, scale=-1.0), 0),
    ])  # fmt: skip
    def test_the_operator_is_used_where_it_serves(self, spec, calls):
        q, (_, k, v) = rand(1, 2, 40, 16), qkv(2, 60)
        with Watch() as watch:
            both(q, k, v, spec=spec)
        assert watch.calls.count("_scaled_dot_product_flash_attention_for_cpu") == calls
        assert watch.calls.count("_scaled_dot_product_flash_attention_for_cpu_backward") == calls


class TestBothPathsAgree:
    """The operator and the tiles compute the same part."""

    @pytest.mark.parametrize("spec", [PLAIN, AttentionSpec(causal=True)])
    def test(self, spec, monkeypatch):
        q, (_, k, v) = rand(2, 4, 113, 32), qkv(2, 203, 32, batch=2)
        dout = rand(2, 4, 113, 32, seed=9)
        by_operator = both(q, k, v, dout, spec=spec)
        monkeypatch.setattr(aten, "serves", lambda part: False)
        by_tiles = both(q, k, v, dout, spec=spec)
        for a, b in zip(by_operator, by_tiles, strict=True):
            for name in ("out", "lse", "dq", "dk", "dv"):
                if hasattr(a, name):
                    torch.testing.assert_close(getattr(a, name), getattr(b, name))


class TestBadValues:
    def test_a_key_hidden_from_one_head_of_a_group_and_seen_by_the_other(self):
        q, (_, k, v) = rand(1, 2, 5, 16), qkv(1, 6)
        k[0, 0, 3], v[0, 0, 3] = NAN, INF
        mask = torch.ones(1, 2, 1, 6, dtype=torch.bool)
        mask[0, 0, 0, 3] = False
        f, g = both(q, k, v, mask=mask)
        kept = [0, 1, 2, 4, 5]
        want, want_g = both(q[:, :1], k[:, :, kept], v[:, :, kept])
        torch.testing.assert_close(f.out[:, :1], want.out)
        torch.testing.assert_close(g.dq[:, :1], want_g.dq)
        assert f.out[:, 1].isnan().all()
        assert g.dk[0, 0, 3].isnan().all()

    @pytest.mark.parametrize("hide", ["mask", "bias"])
    @pytest.mark.parametrize("value", [NAN, INF, -INF, 3e38])
    def test_hidden_values_change_nothing(self, hide, value):
        q, k, v = qkv(2, 70)
        dout = rand(1, 2, 70, 16, seed=9)
        mask = torch.ones(1, 1, 70, 70, dtype=torch.bool)
        mask[..., 50] = False
        mask[..., 20, :] = False
        hidden = torch.zeros(mask.shape).masked_fill(~mask, -INF)
        options = {"mask": mask} if hide == "mask" else {"bias": hidden}
        clean_f, clean_g = both(q, k, v, dout, **options)
        k[:, :, 50] = v[:, :, 50] = q[:, :, 20] = dout[:, :, 20] = value
        dlse = torch.zeros(1, 2, 70)
        dlse[:, :, 20] = value
        f, g = both(q, k, v, dout, dlse, **options)
        assert (f.out[:, :, 20] == 0).all()
        assert (f.lse[:, :, 20] == -INF).all()
        assert (g.dq[:, :, 20] == 0).all()
        assert (g.dk[:, :, 50] == 0).all()
        assert (g.dv[:, :, 50] == 0).all()
        for name, got, want in [
            ("out", f.out, clean_f.out), ("dq", g.dq, clean_g.dq), ("dk", g.dk, clean_g.dk),
            ("dv", g.dv, clean_g.dv)]:  # fmt: skip
            torch.testing.assert_close(got, want, msg=name)

    def test_a_gradient_of_lse_at_a_row_that_sees_only_its_sink_reaches_only_the_sink(self):
        q, k, v = qkv(1, 6)
        mask, dlse = torch.ones(6, 6, dtype=torch.bool), torch.zeros(1, 1, 6)
        mask[2], dlse[0, 0, 2] = False, NAN
        sinks = torch.zeros(1)
        f = api.forward(q, k, v, mask=mask, sinks=sinks, backend="cpu")
        g = api.backward(
            f.out, q, k, v, out=f.out, lse=f.lse, dlse=dlse, mask=mask, sinks=sinks, backend="cpu",
            wanted=Wanted(sinks=True),
        ).gradients  # fmt: skip
        assert g.dsinks.isnan().all()
        assert all(t.isfinite().all() for t in (g.dq, g.dk, g.dv))

    @pytest.mark.parametrize("value", [NAN, INF, -INF])
    @pytest.mark.parametrize("where", ["q", "k", "v"])
    @pytest.mark.parametrize("spec", [PLAIN, AttentionSpec(softcap=3.0)])
    def test_a_visible_one_is_never_made_finite(self, value, where, spec):
        t = dict(zip("qkv", (t.abs() for t in qkv(1, 8)), strict=True))
        t[where][0, 0, 4, 2] = value
        f = api.forward(**t, spec=spec, backend="cpu")
        rows = f.out.isfinite().all(-1)[0, 0]
        assert rows.sum() == (7 if where == "q" else 0)
        assert not rows[4]

    def test_bias_of_minus_infinity_may_stand_beside_nan_that_position_hides(self):
        q, k, v = qkv(1, 40)
        bias = rand(40, 40, seed=5)
        bias[:, 3] = -INF
        spec = AttentionSpec(causal=True)
        want, want_g = both(q, k, v, spec=spec, bias=bias, bias_grad=True)
        poisoned = bias.masked_fill(torch.ones(40, 40, dtype=torch.bool).triu(1), NAN)
        got, got_g = both(q, k, v, spec=spec, bias=poisoned, bias_grad=True)
        torch.testing.assert_close(got.out, want.out)
        torch.testing.assert_close(got_g.dbias, want_g.dbias)
        assert (got_g.dbias[:, 3] == 0).all()

    def test_scores_far_below_the_others_weigh_exactly_nothing(self):
        q, v = torch.ones(1, 1, 1, 16), torch.eye(16)[None, None]
        k = torch.zeros(1, 1, 16, 16)
        k[0, 0, 1] = -25.0
        spec = AttentionSpec(scale=1.0, softcap=1e6)
        out = api.forward(q, k, v, spec=spec, backend="cpu").out[0, 0, 0]
        assert out[1] == 0
        assert out[0] == pytest.approx(1 / 15, rel=1e-6)


class TestCut:
    """Every row and key that stays in a cut has a visible pair, and no visible pair is lost."""

    @pytest.mark.parametrize("len_q", [1, 5, 9])
    @pytest.mark.parametrize("len_k", [0, 1, 5, 12])
    @pytest.mark.parametrize("left", [None, 0, 2])
    @pytest.mark.parametrize("right", [None, 0, 3])
    @pytest.mark.parametrize("offset", [-8, -1, 0, 4, 30])
    def test(self, len_q, len_k, left, right, offset):
        def visible(band, rows, keys):
            return [
                [(band.left is None or j - i - band.offset >= -band.left)
                 and (band.right is None or j - i - band.offset <= band.right) for j in range(keys)]
                for i in range(rows)
            ]  # fmt: skip

        band = Band(offset, left, right)
        whole = visible(band, len_q, len_k)
        cut = Cut.of(band, len_q, len_k)
        if cut is None:
            assert not any(map(any, whole))
            return
        kept = visible(cut.band, cut.rows.stop - cut.rows.start, cut.keys.stop - cut.keys.start)
        assert kept == [row[cut.keys] for row in whole[cut.rows]]
        assert sum(map(sum, kept)) == sum(map(sum, whole))
        assert all(map(any, kept))
        assert all(map(any, zip(*kept, strict=True)))
        assert cut.band.open == all(map(all, kept))


@pytest.mark.parametrize("seen", [(0, 100), (3, 90), (37, 41), (90, 100)])
@pytest.mark.parametrize("all_see", [(0, 100), (40, 60), (20, 10), (50, 100)])
@pytest.mark.parametrize(("size", "grain"), [(16, 16), (32, 16), (512, 16), (7, 1)])
def test_segments_cover_what_is_seen_once(seen, all_see, size, grain):
    found = list(segments(seen, all_see, 100, size, grain))
    covered = [n for first, last, _ in found for n in range(first, last)]
    assert covered == list(range(covered[0], covered[-1] + 1))
    assert covered[0] <= seen[0]
    assert covered[-1] >= seen[1] - 1
    for first, last, whole in found:
        assert 0 < last - first <= size
        assert first % grain == 0
        assert not whole or (all_see[0] <= first and last <= all_see[1])


def test_aligned_takes_what_is_fit_as_it_is():
    t = rand(1, 2, 16, 32)
    assert aligned(t, torch.float32) is t
    odd = aligned(t[..., :30], torch.float32)
    assert odd.shape == t.shape
    assert (odd[..., 30:] == 0).all()
    assert aligned(t.transpose(1, 2), torch.float32).is_contiguous()


def test_exp_is_exact_zero_below_normal_numbers():
    x = torch.tensor([0.0, -86.0, -87.1, -90.0, -104.0, -INF, NAN])
    got = tiled.exp_(x.clone())
    torch.testing.assert_close(got[:2], x[:2].exp())
    assert (got[2:6] == 0).all()
    assert got[6].isnan()
