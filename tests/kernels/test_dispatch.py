"""api.forward and api.backward: what they accept, which backend runs, and what they refuse."""

import pytest
import torch

from flashwire_kernels import api, support
from flashwire_kernels.errors import InvalidAttention, NotEnoughMemory, UnsupportedBackend
from flashwire_kernels.types import AttentionSpec
from flashwire_kernels.validation import Problem, resolve


def rand(*shape, dtype=torch.float32, seed=0):
    return torch.randn(shape, dtype=dtype, generator=torch.Generator().manual_seed(seed))


def qkv(*shape):
    return tuple(rand(*shape, seed=seed) for seed in range(3))


def problem(**shapes) -> Problem:
    headers = {"q": (1, 2, 8, 16), "k": (1, 2, 8, 16), "v": (1, 2, 8, 16)} | shapes
    return resolve(
        AttentionSpec(), {name: api.header(torch.empty(s)) for name, s in headers.items()}
    )


def violations(error) -> dict[str, str]:
    return {v.field: v.message for v in error.value.violations}


class TestChoice:
    def test_auto_takes_the_fastest_and_says_why_not_a_faster_one(self):
        r = api.forward(*qkv(2, 8, 16))
        assert r.backend == "cpu"
        assert [s.backend for s in r.skipped] == ["triton"]
        assert all(s.reasons for s in r.skipped)
        assert r.precision == "ieee"

    def test_a_permission_for_less_precision_is_not_an_order(self):
        r = api.forward(*qkv(2, 8, 16), spec=AttentionSpec(precision="tf32"))
        assert r.precision == "ieee"

    @pytest.mark.parametrize("name", ["cpu", "reference"])
    def test_a_named_backend_runs(self, name):
        q, k, v = qkv(2, 8, 16)
        assert api.forward(q, k, v, backend=name).backend == name
        b = api.backward(q, q, k, v, backend=name)
        assert (b.backend, b.skipped) == (name, ())

    def test_a_named_backend_that_cannot_refuses_with_its_reasons(self):
        with pytest.raises(UnsupportedBackend) as error:
            api.forward(*qkv(2, 8, 16), backend="triton")
        assert error.value.backend == "triton"
        assert error.value.reasons == support.reasons("triton", problem(), "cpu")

    def test_reasons_name_the_device(self):
        (reason,) = support.reasons("cpu", problem(), "cuda:0")
        assert "device" in reason
        assert "cuda:0" in reason
        assert support.reasons("reference", problem(), "cuda:0") == ()

    @pytest.mark.parametrize("name", ["refrence", "CPU", "", "cuda"])
    def test_an_unknown_backend_is_refused_with_the_nearest(self, name):
        with pytest.raises(InvalidAttention) as error:
            api.forward(*qkv(2, 8, 16), backend=name)
        assert list(violations(error)) == ["backend"]
        if name == "refrence":
            assert "nearest is 'reference'" in violations(error)["backend"]

    def test_every_backend_has_a_row_everywhere(self):
        for name in support.BACKENDS:
            assert name in api._MODULES
            assert any(not support.reasons(name, problem(), device) for device in ("cpu", "cuda:0"))
            assert support.extra_bytes(name, problem(), backward=True) >= 0


class TestMemory:
    def test_more_than_the_limit_is_refused_before_anything_runs(self):
        q, k, v = qkv(1, 1, 4096, 16)
        with pytest.raises(NotEnoughMemory) as error:
            api.forward(q, k, v, backend="reference", memory_limit=100_000_000)
        assert error.value.available == 100_000_000
        assert error.value.needed >= 4096**2 * 8 * 3

    def test_the_cpu_backend_needs_little(self):
        q, k, v = qkv(1, 1, 4096, 16)
        assert api.forward(q, k, v, memory_limit=100_000_000).backend == "cpu"
        with pytest.raises(NotEnoughMemory):
            api.backward(q, q, k, v, memory_limit=1000)

    def test_the_backward_needs_more(self):
        for name in ("cpu", "reference"):
            forward, backward = (
                support.extra_bytes(name, problem(), backward=b) for b in (False, True)
            )
            assert forward < backward


class TestForms:
    """One attention in every layout and rank gives the same numbers, formed alike."""

    @pytest.mark.parametrize("layout", [None, "bhld", "blhd"])
    @pytest.mark.parametrize("rank", [2, 3, 4])
    def test_layouts_and_ranks(self, layout, rank):
        batch, heads = {2: (1, 1), 3: (1, 3), 4: (2, 3)}[rank]
        full = (*qkv(batch, heads, 9, 16), rand(batch, heads, 9, 16, seed=4))

        def form(t):
            if layout == "blhd" and rank > 2 and t.dim() == 4:
                t = t.transpose(1, 2)
            return t[(0,) * (4 - rank)]

        spec = AttentionSpec(layout=layout, causal=True)
        q, k, v, dout = map(form, full)
        f = api.forward(q, k, v, spec=spec)
        dlse = torch.ones_like(f.lse)
        g = api.backward(dout, q, k, v, out=f.out, lse=f.lse, dlse=dlse, spec=spec).gradients
        again = api.backward(dout, q, k, v, dlse=dlse, spec=spec).gradients
        plain = AttentionSpec(causal=True)
        want = api.forward(*full[:3], spec=plain)
        want_g = api.backward(
            full[3], *full[:3], dlse=torch.ones_like(want.lse), spec=plain
        ).gradients
        assert torch.equal(f.out, form(want.out))
        assert torch.equal(f.lse, want.lse[(0,) * (4 - rank)])
        for name in ("dq", "dk", "dv"):
            assert torch.equal(getattr(g, name), form(getattr(want_g, name)))
            assert torch.equal(getattr(g, name), getattr(again, name))

    @pytest.mark.parametrize(
        "form",
        [list, tuple, torch.tensor, lambda o: torch.tensor(o, dtype=torch.int32)],
        ids=["list", "tuple", "int64", "int32"],
    )
    def test_offsets_in_any_form(self, form):
        q, k, v = qkv(7, 2, 16)
        f = api.forward(q, k, v, cu_seqlens_q=form([0, 3, 7]), cu_seqlens_k=form([0, 3, 7]))
        assert f.lse.shape == (7, 2)
        alone = api.forward(*(t[3:].transpose(0, 1) for t in (q, k, v)))
        assert torch.equal(f.out[3:], alone.out.transpose(0, 1))

    @pytest.mark.parametrize("softcap", [None, 5.0])
    def test_what_surrounds_the_call_changes_nothing(self, softcap):
        """Autocast, another default dtype or device: precision and place are the tensors' own."""
        q, k, v = qkv(2, 8, 16)
        spec = AttentionSpec(softcap=softcap)

        def both():
            f = api.forward(q, k, v, spec=spec, sinks=torch.zeros(2, device="cpu"))
            return f.out, f.lse, api.backward(q, q, k, v, spec=spec, dlse=f.lse).gradients.dk

        want = both()
        torch.set_default_dtype(torch.float64)
        try:
            with torch.autocast("cpu", dtype=torch.bfloat16), torch.device("meta"):
                found = both()
        finally:
            torch.set_default_dtype(torch.float32)
        assert all(torch.equal(a, b) for a, b in zip(found, want, strict=True))

    def test_nothing_is_left_to_differentiate(self):
        q, k, v = (t.requires_grad_() for t in qkv(2, 8, 16))
        assert not api.forward(q, k, v).out.requires_grad


class TestRefusals:
    def test_what_is_no_tensor(self):
        with pytest.raises(InvalidAttention) as error:
            api.forward([[1.0]], rand(1, 1), 3, mask="no")
        assert violations(error) == {
            "q": "must be a torch.Tensor, got list",
            "v": "must be a torch.Tensor, got int",
            "mask": "must be a torch.Tensor, got str",
        }

    def test_devices_that_differ(self):
        q, k, v = qkv(2, 8, 16)
        with pytest.raises(InvalidAttention) as error:
            api.forward(q, k.to("meta"), v, bias=torch.empty(8, 8, device="meta"))
        assert violations(error) == dict.fromkeys(
            ["k", "bias"], "must be on q's device cpu, got meta"
        )

    def test_tensors_without_data(self):
        with pytest.raises(InvalidAttention, match="holds no data"):
            api.forward(*(t.to("meta") for t in qkv(8, 16)), backend="reference")

    def test_sparse_tensors(self):
        q, k, v = qkv(8, 16)
        with pytest.raises(InvalidAttention, match="dense in memory"):
            api.forward(q, k.to_sparse(), v)

    @pytest.mark.parametrize("offsets", [[0, 2.5, 7], [0, True, 7], ["0", "7"]])
    def test_offsets_that_are_no_integers(self, offsets):
        with pytest.raises(InvalidAttention) as error:
            api.forward(*qkv(7, 2, 16), cu_seqlens_q=offsets, cu_seqlens_k=[0, 7])
        assert "cu_seqlens_q" in violations(error)

    def test_offsets_of_another_dtype_or_rank(self):
        with pytest.raises(InvalidAttention) as error:
            api.forward(
                *qkv(7, 2, 16),
                cu_seqlens_q=torch.tensor([0.0, 7.0]),
                cu_seqlens_k=torch.tensor([[0, 7]]),
            )
        assert set(violations(error)) == {"cu_seqlens_q", "cu_seqlens_k"}

    def test_saved_tensors_that_do_not_fit_are_all_named(self):
        q, k, v = qkv(2, 8, 16)
        with pytest.raises(InvalidAttention) as error:
            api.backward(
                rand(2, 8, 15), q, k, v, out=q.double(), lse=rand(2, 8, 1), dlse=rand(2, 8).half()
            )
        assert violations(error) == {
            "dout": "must have shape [2, 8, 16], got [2, 8, 15]",
            "out": "must be float32, got float64",
            "lse": "must have shape [2, 8], got [2, 8, 1]",
            "dlse": "must be float32, got float16",
        }

    @pytest.mark.parametrize("missing", ["out", "lse"])
    def test_out_and_lse_come_together(self, missing):
        q, k, v = qkv(2, 8, 16)
        saved = {"out": q, "lse": rand(2, 8)}
        del saved[missing]
        with pytest.raises(InvalidAttention) as error:
            api.backward(q, q, k, v, **saved)
        assert list(violations(error)) == [missing]
