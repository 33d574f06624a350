"""Equal requests give equal bits: again, elsewhere in memory, otherwise strided, in company."""

import dataclasses

import pytest
import torch

from flashwire_kernels import api
from flashwire_kernels.tensors import Wanted
from flashwire_kernels.testing import Case, make

CASES = {
    "plain": Case(heads_q=4, len_q=130, len_k=130, dim=40),
    "causal": Case(heads_q=4, heads_kv=2, len_q=70, len_k=203, causal=True, dtype="bfloat16"),
    "odd": Case(heads_q=3, heads_kv=1, len_q=113, len_k=67, dim=59, dim_v=24, sinks=True),
    "tiles": Case(len_q=150, len_k=140, window=(30, 9), softcap=2.0, alibi="bh", mask="b1qk",
                  bias="1hqk", dropout=0.2, dtype="float16"),
    "packed": Case(lens_q=(40, 0, 70), lens_k=(90, 3, 70), padding=3, heads_q=4, heads_kv=2,
                   causal=True, bias="1hqk"),
    "double": Case(len_q=65, len_k=67, dtype="float64", causal=True, window=(20, 0), sinks=True),
    "sinks": Case(batch=9, heads_q=6, len_q=33, len_k=64, dtype="float64", sinks=True),
}  # fmt: skip
SHIFTS = (4, 16, 36, 60)


@pytest.fixture(params=CASES)
def call(request, backend):
    return make(CASES[request.param])


def results(call, backend, place=lambda t: t):
    """Everything that forward and backward give, with every tensor put somewhere by `place`."""
    t = {name: place(tensor) for name, tensor in call.tensors.items()}
    if backend == "triton" and t["q"].dtype == torch.float64:
        pytest.skip("triton has no float64")
    found = api.forward(**t, spec=call.spec, backend=backend)
    g = api.backward(
        place(call.dout),
        **t,
        out=place(found.out),
        lse=place(found.lse),
        dlse=place(call.dlse),
        wanted=Wanted(bias="bias" in t, sinks="sinks" in t),
        spec=call.spec,
        backend=backend,
    ).gradients
    named = {f.name: getattr(g, f.name) for f in dataclasses.fields(g)}
    return {"out": found.out, "lse": found.lse} | {n: t for n, t in named.items() if t is not None}


def assert_same_bits(some, others):
    assert some.keys() == others.keys()
    for name, tensor in some.items():
        whole = {2: torch.int16, 4: torch.int32, 8: torch.int64}[tensor.element_size()]
        bits, other_bits = (t.contiguous().view(whole) for t in (tensor, others[name]))
        assert torch.equal(bits, other_bits), name


def at_address(t, shift):
    """A contiguous copy whose address is `shift` modulo 64."""
    items = t.numel() + 64
    memory = torch.empty(items + 64, dtype=t.dtype)
    first = (shift - memory.data_ptr()) % 64 // t.element_size()
    copy = memory[first : first + t.numel()].view(t.shape).copy_(t)
    assert copy.data_ptr() % 64 == shift - shift % t.element_size()
    return copy


def strided(t):
    """Equal values with gaps after each, in reversed order of dimensions."""
    memory = torch.full((*reversed(t.shape), 3), 77, dtype=t.dtype)
    view = memory[..., 1].permute(*reversed(range(t.dim())))
    return view.copy_(t)


def test_again(call, backend):
    first = results(call, backend)
    for _ in range(3):
        assert_same_bits(first, results(call, backend))


@pytest.mark.parametrize("shift", SHIFTS)
def test_at_any_address(call, shift, backend):
    shifted = results(call, backend, lambda t: at_address(t, shift))
    assert_same_bits(results(call, backend), shifted)


def test_with_any_strides(call, backend):
    assert_same_bits(results(call, backend), results(call, backend, strided))


def test_results_own_their_memory(call, backend):
    given = {t.untyped_storage().data_ptr() for t in (*call.tensors.values(), call.dout, call.dlse)}
    found = results(call, backend)
    memory = [t.untyped_storage().data_ptr() for t in found.values()]
    assert not given & set(memory)
    assert len(set(memory)) == len(memory)


@pytest.mark.parametrize("options", [
    {}, {"causal": True}, {"window": (20, 3)}, {"softcap": 2.0, "alibi": "h", "dropout": 0.2},
    {"len_q": 1, "causal": True}, {"len_q": 7, "dtype": "bfloat16"}, {"heads_kv": 1},
    {"sinks": True, "len_q": 45}, {"causal": True, "len_q": 45},
    {"heads_q": 1, "heads_kv": 1, "len_q": 90, "len_k": 33, "dim": 64, "window": (0, 0),
     "softcap": 0.5, "dtype": "float64"},
    {"heads_q": 1, "heads_kv": 1, "len_q": 90, "len_k": 140, "dim": 64, "window": (3, None),
     "causal_align": "top_left", "dtype": "float64"},
    # What PyTorch's operator would compute with other bits on AMD's processors.
    {"len_q": 1, "len_k": 600}, {"len_q": 3, "len_k": 200}, {"len_q": 13, "dtype": "float64"},
    {"heads_q": 1, "heads_kv": 1, "len_q": 5},
    {"heads_q": 1, "heads_kv": 1, "causal": True, "len_k": 5},
    {"heads_q": 1, "heads_kv": 1, "len_q": 31, "len_k": 513, "dtype": "float64"},
], ids=str)  # fmt: skip
def test_a_batch_row_does_not_depend_on_its_company(options, fast_backend):
    """The first row, which keeps its index and so its dropout, alone and among others."""
    call = make(
        Case(**{"batch": 5, "heads_q": 4, "heads_kv": 2, "len_q": 97, "len_k": 97} | options)
    )
    t = call.tensors
    alone = dataclasses.replace(
        call,
        tensors=t | {name: t[name][:1] for name in "qkv"},
        dout=call.dout[:1],
        dlse=call.dlse[:1],
    )
    summed = ("dbias", "dsinks")
    one, many = ({name: t for name, t in results(c, fast_backend).items() if name not in summed}
                 for c in (alone, call))  # fmt: skip
    assert_same_bits(one, {name: tensor[:1] for name, tensor in many.items()})


@pytest.fixture
def threads():
    """threads(N): torch uses so many, until the test ends."""
    before = torch.get_num_threads()
    yield torch.set_num_threads
    torch.set_num_threads(before)


@pytest.mark.parametrize("backend", ["reference", "cpu"])
@pytest.mark.parametrize("name", CASES)
def test_with_one_thread_as_with_two(name, backend, threads):
    call = make(CASES[name])
    threads(1)
    alone = results(call, backend)
    threads(2)
    assert_same_bits(alone, results(call, backend))


@pytest.mark.long
def test_many_repeats_of_a_large_batch(fast_backend):
    call = make(Case(batch=60, heads_q=4, len_q=128, len_k=128, causal=True, dropout=0.1))
    first = results(call, fast_backend)
    for _ in range(15):
        assert_same_bits(first, results(call, fast_backend))
