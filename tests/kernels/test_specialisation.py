"""What a GPU compiles a kernel anew for: options and layouts, never lengths, ends or seeds."""

import itertools

import pytest
import torch
from triton._C.libtriton import native_specialize_impl
from triton.backends.compiler import BaseBackend

from flashwire_kernels.fused import backend
from flashwire_kernels.fused.call import Call
from flashwire_kernels.tensors import Inputs
from flashwire_kernels.testing import resolve_tensors
from flashwire_kernels.types import AttentionSpec

LENGTHS = (65, 96, 129, 1000, 1008, 1023)
OPTIONS = {
    "plain": {},
    "causal": {"causal": True},
    "all": {"causal": True, "softcap": 5.0, "dropout_p": 0.25, "dropout_seed": 2**40},
}


@pytest.fixture
def launched(monkeypatch):
    """Keys of the kernels that forwards would have compiled on sm_90, since the last call."""
    found = set()
    monkeypatch.setattr(Call, "launch", lambda call: found.add(compiled_for(call)))
    monkeypatch.setattr(backend, "_arch", lambda device: "sm_90")

    def launched():
        keys = sorted(found, key=str)
        found.clear()
        return keys

    return launched


def compiled_for(call):
    """What Triton looks a compiled kernel up by."""
    free = set(call.kernel.kwargs["do_not_specialize"])
    arguments = tuple(
        native_specialize_impl(BaseBackend, value, False, name not in free, name not in free)
        for name, value in zip(call.kernel.arg_names, call.positional, strict=False)
    )
    constants = (*call.constants.items(), *call.config.options.items())
    return call.kernel.fn.__name__, arguments, constants


def forward(len_q, len_k, *, batch=2, heads_q=4, heads_kv=2, packed=False, **options):
    def empty(heads, length):
        shape = (batch * length, heads, 64) if packed else (batch, heads, length, 64)
        return torch.empty(shape, dtype=torch.bfloat16, device="meta")

    tensors = {"q": empty(heads_q, len_q), "k": empty(heads_kv, len_k), "v": empty(heads_kv, len_k)}
    offsets = {}
    if packed:
        for name, length in (("cu_seqlens_q", len_q), ("cu_seqlens_k", len_k)):
            offsets[name] = torch.arange(batch + 1, dtype=torch.int32) * length
    problem = resolve_tensors(AttentionSpec(**options), tensors | offsets)
    backend.forward(problem, Inputs(**tensors))


@pytest.mark.parametrize("packed", [False, True], ids=["dense", "packed"])
@pytest.mark.parametrize("options", OPTIONS.values(), ids=OPTIONS)
def test_lengths_compile_nothing_anew(options, packed, launched):
    for len_q, len_k in itertools.product(LENGTHS, (1, 16, *LENGTHS)):
        forward(len_q, len_k, packed=packed, **options)
    assert [name for name, *_ in launched()] == ["forward_kernel"]


@pytest.mark.parametrize("packed", [False, True], ids=["dense", "packed"])
def test_nor_do_those_of_keys_that_are_counted(packed, launched):
    for length in (2048, 2049, 3000, 4096):
        forward(length, length + 7, packed=packed)
        forward(length, 32, packed=packed)
    assert [name for name, *_ in launched()] == ["forward_kernel", "infinite_kernel"]


@pytest.mark.parametrize("packed", [False, True], ids=["dense", "packed"])
@pytest.mark.parametrize("options", OPTIONS.values(), ids=OPTIONS)
def test_nor_do_those_of_a_decode(options, packed, launched):
    for length in (513, 1024, 1025, 1040, 16384, 100001):
        for batch in (1, 3, 16):
            forward(1, length, batch=batch, packed=packed, **options)
    assert [name for name, *_ in launched()] == ["decode_kernel", "merge_kernel"]


def test_nor_ends_of_windows_and_seeds(launched):
    for left, right in itertools.product((0, 1, 15, 16, 100), repeat=2):
        forward(100, 100, window=(left, right))
    assert len(launched()) == 1
    for seed in (0, 1, 16, 17, 2**31, 2**32, 2**32 + 1, 2**36, 2**64 - 1):
        for p in (0.5, 1 / 16, 0.3):
            forward(100, 100, dropout_p=p, dropout_seed=seed)
    assert len(launched()) == 1


def test_layouts_and_options_do(launched):
    forward(100, 100)
    forward(100, 100, causal=True)
    forward(100, 100, packed=True)
    forward(100, 100, heads_kv=1)
    assert len(launched()) == 4


def test_offsets_and_tile_lists_are_uploaded_once(monkeypatch):
    moved = []
    original = torch.Tensor.to
    monkeypatch.setattr(
        torch.Tensor, "to", lambda t, *to, **how: moved.append(t) or original(t, *to, **how)
    )
    monkeypatch.setattr(Call, "launch", lambda call: None)
    monkeypatch.setattr(backend, "_arch", lambda device: "sm_90")
    for _ in range(3):
        forward(777, 779, packed=True, causal=True)
    assert sum(not t.is_floating_point() for t in moved) == 3  # two of offsets, a list of tiles
