"""What a worker compiles before it is ready: the list, and that it covers what it says.

Triton's own rule tells which launches share a compiled kernel; nothing is compiled or run.
"""

import itertools
import json
import random

import pytest
import torch
from triton.backends.compiler import GPUTarget
from triton.compiler import make_backend
from triton.runtime.jit import JITFunction, create_function_from_signature

from flashwire_kernels import api, support
from flashwire_kernels.fused import backend as fused
from flashwire_kernels.fused import support as fused_support
from flashwire_kernels.fused.call import Call
from flashwire_kernels.tensors import Wanted
from flashwire_kernels.types import AttentionSpec, TensorHeader
from flashwire_kernels.validation import resolve
from flashwire_service import logs, warmup
from flashwire_service.compute import device as devices
from flashwire_service.compute import warming
from flashwire_service.logs import Log

CPU, GPU = torch.device("cpu"), torch.device("cuda", 0)
FORWARD = {"forward_kernel", "infinite_kernel"}
BACKWARD = {"delta_kernel", "keys_kernel", "queries_kernel"}
DECODE = {"decode_kernel", "merge_kernel"}


class Compiled:
    """The kernels, by name and specialisation, that launches on an H200 would have compiled."""

    def __init__(self):
        self.keys = set()
        self._binders = {}
        self._backend = make_backend(GPUTarget("cuda", 90, 32))

    def launch(self, call):
        name = call.kernel.__name__
        if not call.programs:
            return
        if name not in self._binders:
            jit = call.kernel
            if not isinstance(jit, JITFunction):  # other tests have kernels interpreted
                jit = JITFunction(jit.fn, do_not_specialize=jit.kwargs["do_not_specialize"])
            bind = create_function_from_signature(jit.signature, jit.params, self._backend)
            self._binders[name] = bind
        given = {**call.constants, **call.config.options}
        _, specialisation, options = self._binders[name](*call.positional, **given)
        self.keys.add((name, str(specialisation), str(options)))

    @property
    def names(self):
        return {name for name, *_ in self.keys}


@pytest.fixture
def compiled(monkeypatch):
    found = Compiled()
    monkeypatch.setattr(fused_support, "DEVICES", {"cuda", "cpu"})
    monkeypatch.setattr(fused, "_arch", lambda device: "sm_90")
    monkeypatch.setattr(Call, "launch", lambda call: found.launch(call))
    return found


# What a list covers


LENGTHS = (1, 2, 3, 16, 17, 24, 100, 128, 250, 512, 600, 1024, 1500, 2049, 2050, 2064, 3000)
LARGEST = 1 << 22  # elements


def some_sizes(entry, rng):
    """(heads_kv, lengths of queries, lengths of keys) of a request that an entry covers."""
    lengths = [n for n in LENGTHS if n >= 120] if entry.window else LENGTHS
    while True:
        heads_kv, batch = rng.choice([1, 2, 3, 4, 5, 8, 12, 16, 32]), rng.choice([1, 1, 2, 3, 16])
        many = batch if entry.packed else 1
        lens_q, lens_k = ([rng.choice(lengths) for _ in range(many)] for _ in range(2))
        if not entry.packed:
            lens_q, lens_k = lens_q * batch, lens_k * batch
        rows = max(lens_q) * entry.group
        few_that_share_out = max(lens_q) > 1 and rows <= 64 and max(lens_k) > 512
        most = max(sum(lens_q) * entry.group, sum(lens_k)) * heads_kv * entry.dim
        if not few_that_share_out and most <= LARGEST:
            return heads_kv, lens_q, lens_k


def some_request(entry, rng):
    """(tensors, spec, dout) of such a request."""
    heads_kv, lens_q, lens_k = some_sizes(entry, rng)
    heads, dtype = heads_kv * entry.group, getattr(torch, entry.dtype)
    layout = "blhd" if not entry.packed and rng.random() < 0.3 else None
    spec = AttentionSpec(
        causal=entry.causal,
        window=(101, 99) if entry.window else None,
        softcap=7.0 if entry.softcap else None,
        layout=layout,
    )

    def rows(heads, lengths, dim):
        shape = {
            "blhd": (len(lengths), lengths[0], heads, dim),
            None: (len(lengths), heads, lengths[0], dim),
        }[layout]
        return torch.empty((sum(lengths), heads, dim) if entry.packed else shape, dtype=dtype)

    tensors = {
        "q": rows(heads, lens_q, entry.dim),
        "k": rows(heads_kv, lens_k, entry.dim),
        "v": rows(heads_kv, lens_k, entry.dim_v),
    }
    if entry.packed:
        for name, lengths in (("cu_seqlens_q", lens_q), ("cu_seqlens_k", lens_k)):
            tensors[name] = torch.tensor([0, *itertools.accumulate(lengths)])
    if entry.sinks:
        tensors["sinks"] = torch.empty(heads, dtype=dtype)
    if entry.alibi:
        tensors["alibi_slopes"] = torch.empty(heads)
    return tensors, spec, rows(heads, lens_q, entry.dim_v)


@pytest.mark.parametrize("text", [
    "bfloat16:d128:gqa4:causal", "float16:d64", "bfloat16:d128:gqa7:sinks:packed",
    "float16:d64x128:softcap:alibi", "float32:d64:gqa8:causal:window:sinks"])  # fmt: skip
def test_no_request_that_an_entry_covers_compiles_anything(text, compiled):
    (entry,) = warmup.parse(text)
    warming.compute(entry, CPU, lambda: None)
    folded = not (entry.softcap or entry.alibi)
    assert compiled.names == (FORWARD if folded else {"forward_kernel"}) | BACKWARD | DECODE
    warm, rng = set(compiled.keys), random.Random(text)
    for _ in range(150):
        tensors, spec, dout = some_request(entry, rng)
        forward = api.forward(**tensors, spec=spec)
        api.backward(
            dout, **tensors, out=forward.out, lse=forward.lse, spec=spec,
            wanted=Wanted(sinks=entry.sinks),
        )  # fmt: skip
        shapes = {name: tuple(t.shape) for name, t in tensors.items()}
        assert {name for name, *_ in compiled.keys - warm} == set(), shapes


def test_another_request_does(compiled):
    (entry, other) = warmup.parse("float16:d64, float16:d64:causal")
    warming.compute(entry, CPU, lambda: None)
    warm = set(compiled.keys)
    warming.request(other, warming.Shape(1, 1, 8, 8, backward=True), CPU)
    assert "forward_kernel" in {name for name, *_ in compiled.keys - warm}


def test_a_proof_runs_every_kernel_that_requests_run(compiled):
    for dtype in devices._TOLERANCE:
        for proof in devices._PROOFS:
            devices._known_attention(CPU, dtype, *proof)
    assert compiled.names >= {"forward_kernel"} | BACKWARD | DECODE


# The run


def events(capfd):
    logs.flush()
    return [json.loads(line) for line in capfd.readouterr().err.splitlines()]


@pytest.fixture
def computed(monkeypatch):
    """The entries that were computed; those with a window fail."""
    found = []

    def compute(entry, device, step):
        step()
        found.append(str(entry))
        if entry.window:
            raise RuntimeError("PassManager::run failed")

    monkeypatch.setattr(warming, "compute", compute)
    monkeypatch.setattr(devices, "answers", lambda device: True)
    monkeypatch.setattr(devices, "release_cached", lambda device: None)
    return found


def test_an_entry_that_fails_is_said_and_left(computed, capfd):
    steps = []
    text = "float16:d64, float16:d64:window, bfloat16:d128"
    warming.run(text, GPU, Log("worker-0", "info"), lambda: steps.append(1))
    assert computed == text.split(", ")
    assert len(steps) == 3
    said = [(e["event"], e["entry"], e["number"], e["of"]) for e in events(capfd)]
    assert said == [
        ("warming up", "float16:d64", 1, 3),
        ("warmed up", "float16:d64", 1, 3),
        ("warming up", "float16:d64:window", 2, 3),
        ("warm-up failed", "float16:d64:window", 2, 3),
        ("warming up", "bfloat16:d128", 3, 3),
        ("warmed up", "bfloat16:d128", 3, 3),
    ]


def test_progress_has_times_and_reasons(computed, capfd):
    warming.run("float16:d64, float16:d64:window", GPU, Log("worker-0", "info"), lambda: None)
    _, warmed, _, failed = events(capfd)
    assert warmed["seconds"] >= 0
    assert failed["level"] == "warning"
    assert failed["reason"] == "RuntimeError: PassManager::run failed"


def test_a_device_that_is_lost_is_no_matter_of_an_entry(computed, monkeypatch):
    monkeypatch.setattr(devices, "answers", lambda device: False)
    with pytest.raises(RuntimeError, match="PassManager"):
        warming.run("float16:d64:window, float16:d64", GPU, Log("test", "error"), lambda: None)
    assert computed == ["float16:d64:window"]


def test_a_cpu_compiles_nothing(computed):
    warming.run("float16:d64", CPU, Log("test", "error"), lambda: None)
    assert computed == []


# The list


def test_a_list_is_read_and_said_again():
    text = " bfloat16:causal:d128:gqa4 ,float16 : d64x32,, float16:d64x32:packed:dropout:alibi"
    canonical = "bfloat16:d128:gqa4:causal, float16:d64x32, float16:d64x32:alibi:dropout:packed"
    assert warmup.normalised(text) == canonical
    assert warmup.normalised(f"{canonical}, {canonical}") == canonical
    entry = warmup.parse(text)[0]
    assert (entry.dtype, entry.dim, entry.dim_v, entry.group) == ("bfloat16", 128, 128, 4)
    assert entry.causal
    assert not entry.window
    assert warmup.normalised("") == ""


def test_every_mistake_of_a_list_is_said():
    with pytest.raises(ValueError, match="must begin with") as caught:
        warmup.parse("bf16, float16:d64:d32:causl:gqa0, float32:d512, float16:d8")
    said = str(caught.value).split("; ")
    assert len(said) == 4
    assert all(word in said[0] for word in ("'bf16'", "bfloat16, float16, float32", "d128"))
    assert all(word in str(caught.value) for word in ("'d32' repeats", "'causal'", "1 to 256"))
    assert "float16:d8" not in str(caught.value)


@pytest.mark.parametrize("dtype", warmup.DTYPES)
def test_what_a_list_may_name_can_run(dtype):
    header = TensorHeader(dtype, (1, warmup.MAX_GROUP, 8, warmup.MAX_DIM))
    shared = TensorHeader(dtype, (1, 1, 8, warmup.MAX_DIM))
    problem = resolve(AttentionSpec(), {"q": header, "k": shared, "v": shared})
    assert support.reasons("triton", problem, "cuda:0") == ()
