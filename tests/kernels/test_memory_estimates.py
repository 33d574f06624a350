"""What support says a triton attention takes, against what it allocates. No kernel runs."""

import weakref

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from flashwire_kernels import api, support
from flashwire_kernels.fused import backend as fused
from flashwire_kernels.fused import support as fused_support
from flashwire_kernels.fused.call import Call
from flashwire_kernels.tensors import Wanted
from flashwire_kernels.testing import resolve_tensors
from flashwire_kernels.types import AttentionSpec

SLACK = 1 << 20


@pytest.fixture(autouse=True)
def on_an_h200(monkeypatch):
    """Where kernels are not launched, and tensors lie in the host's memory."""
    monkeypatch.setattr(fused_support, "DEVICES", {"cuda", "cpu"})
    monkeypatch.setattr(fused, "_arch", lambda device: "sm_90")
    monkeypatch.setattr(Call, "launch", lambda call: None)


class Held(TorchDispatchMode):
    """Bytes of the storages that operations made and somebody still holds: now, and at most."""

    def __init__(self, given):
        super().__init__()
        self.known = weakref.WeakSet(t.untyped_storage() for t in given)
        self.now = self.most = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        made = func(*args, **(kwargs or {}))
        for t in tree_leaves(made):
            if isinstance(t, torch.Tensor) and t.untyped_storage() not in self.known:
                storage = t.untyped_storage()
                self.known.add(storage)
                weakref.finalize(storage, self.free, storage.nbytes())
                self.now += storage.nbytes()
                self.most = max(self.most, self.now)
        return made

    def free(self, nbytes):
        self.now -= nbytes


KEPT = 1 << 16  # offsets and lists of tiles, for later calls


def peak_beside_results(compute, given):
    """Bytes that were held at once at most while `compute` ran, less those it returned."""
    with Held(given) as held:
        results = compute()
    owned = sum(t.nbytes for t in results if t is not None)
    assert owned <= held.now <= owned + KEPT
    return held.most - owned


def tensors_of(q, k, offsets=None, **more):
    if offsets is not None:
        more |= {"cu_seqlens_q": offsets[0], "cu_seqlens_k": offsets[1]}
    return {"q": torch.empty(q), "k": torch.empty(k), "v": torch.empty(k), **more}


EVEN = torch.arange(0, (1 << 16) + 1, 2)
ONE_IS_LONG = torch.arange(65), torch.cat([torch.arange(64), torch.tensor([63 + 8192])])


CASES = {
    "plain": tensors_of((1, 4, 2048, 8), (1, 2, 1 << 18, 8)),
    "decode": tensors_of((4, 64, 1, 64), (4, 1, 16384, 64)),
    "sinks": tensors_of((1, 4, 1 << 18, 8), (1, 2, 64, 8), sinks=torch.zeros(4)),
    "bias by key": tensors_of((4, 8, 64, 16), (4, 1, 8192, 16), bias=torch.zeros(8, 1, 8192)),
    "bias by query": tensors_of((4, 8, 8192, 16), (4, 1, 64, 16), bias=torch.zeros(8192, 1)),
    "bias of each": tensors_of((4, 8, 64, 16), (4, 1, 8192, 16), bias=torch.zeros(64, 8192)),
    "packed": tensors_of((1 << 16, 2, 8), (1 << 16, 1, 8), (EVEN, EVEN)),
    "packed decode": tensors_of((64, 64, 64), (8255, 1, 64), ONE_IS_LONG),
}


@pytest.mark.parametrize("name", CASES)
@pytest.mark.parametrize("kind", ["forward", "backward", "recomputed"])
def test_estimates_are_enough_and_not_much_more(name, kind):
    x = CASES[name]
    problem = resolve_tensors(AttentionSpec(), x)
    saved = {}

    def forward():
        found = api.forward(**x, backend="triton")
        saved.update(out=found.out, lse=found.lse)
        return found.out, found.lse

    def backward():
        dout = x["q"]
        wanted = Wanted(bias="bias" in x, sinks="sinks" in x)
        g = api.backward(dout, **x, **saved, wanted=wanted, backend="triton").gradients
        return g.dq, g.dk, g.dv, g.dbias, g.dsinks

    if kind == "backward":
        forward()
    compute = forward if kind == "forward" else backward
    taken = peak_beside_results(compute, [*x.values(), *saved.values()])
    told = support.extra_bytes(
        "triton", problem, backward=kind != "forward", recomputed=kind == "recomputed"
    )
    assert taken <= told
    if kind != "recomputed":  # whose forward is done before there are gradients
        assert told <= 1.5 * taken + 2 * SLACK
