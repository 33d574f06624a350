"""Jobs on the real kernels: real message bytes in, real reply bytes out."""

import dataclasses
import errno
import json
import math
import os
import time
import weakref

import numpy as np
import pytest
import torch

from flashwire import wire
from flashwire_kernels import api
from flashwire_kernels.types import AttentionSpec
from flashwire_service import logs, meter
from flashwire_service.compute import device as devices
from flashwire_service.compute import replies
from flashwire_service.compute.arrays import NAMES, bytes_of, tensor_at
from flashwire_service.compute.failures import DeviceLost
from flashwire_service.compute.intake import Ticket
from flashwire_service.compute.jobs import Jobs
from flashwire_service.compute.residuals import OWN_BYTES
from flashwire_service.ipc.channel import MAX_INLINE
from flashwire_service.ipc.frames import Failure, Job, Reply, TensorSlot
from flashwire_service.ipc.memory import Memory
from flashwire_service.logs import Log
from flashwire_service.meter import Meter
from flashwire_service.settings import Settings

CPU = torch.device("cpu")
SCHEMAS = {"attention": wire.ATTENTION, "backward": wire.BACKWARD, "check": wire.CHECK}


@pytest.fixture
def jobs():
    return Jobs(CPU, Settings(residual_bytes=2**20), 0, Log("test", "error"))


def randn(*shape, dtype=torch.float32, seed=0):
    generator = torch.Generator().manual_seed(seed + sum(shape))
    return torch.randn(*shape, generator=generator, dtype=torch.float64).to(dtype)


def qkv(*shape, dtype=torch.float32):
    return {name: randn(*shape, dtype=dtype, seed=i) for i, name in enumerate("qkv")}


def ticket(route, options=None, tensors=None, *, accept="msgpack", owner="", memory=False):
    """A job as the front end would make it of the message that a client would send."""
    options, tensors = options or {}, tensors or {}
    payloads = {
        n: (wire.Header(NAMES[t.dtype], tuple(t.shape)), bytes_of(t)) for n, t in tensors.items()
    }
    body = wire.encode(options, payloads)
    slots = {}
    if route in SCHEMAS:
        refs = wire.decode(body, SCHEMAS[route]).tensors
        slots = {n: TensorSlot(r.dtype, r.shape, r.segments) for n, r in refs.items()}
    job = Job(
        id=7,
        route=route,
        options=options,
        tensors=slots,
        size=len(body),
        body=None if memory else body,
        owner=owner,
        accept=accept,
        received=time.monotonic(),
        deadline=time.monotonic() + 60,
    )
    if not memory:
        return Ticket(job, None)
    with Memory.create() as sent:
        sent.write([body])
        return Ticket(job, None, Memory.receive(os.dup(sent.fd), len(body)))


def reply_of(answer):
    """(values, tensors) of a good msgpack reply."""
    assert isinstance(answer.frame, Reply), answer.frame
    raw = bytearray(answer.frame.body or answer.memory.view)
    assert len(raw) == answer.frame.size
    answer.close()
    message = wire.decode(raw, wire.REPLY)
    tensors = {
        name: tensor_at(raw, TensorSlot(ref.dtype, ref.shape, ref.segments))
        for name, ref in message.tensors.items()
    }
    return message.options, tensors


def failure_of(answer) -> Failure:
    assert isinstance(answer.frame, Failure), answer.frame
    assert answer.frame.id == 7
    return answer.frame


def json_of(answer):
    assert isinstance(answer.frame, Reply), answer.frame
    raw = bytes(answer.frame.body or answer.memory.view)
    answer.close()
    return json.loads(raw)


@pytest.mark.parametrize("memory", [False, True])
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32, torch.float64])
def test_attention_is_what_the_kernels_say_bit_for_bit(jobs, dtype, memory):
    x = qkv(1, 2, 5, 8, dtype=dtype)
    answer = jobs.run(ticket("attention", {"causal": True, "return_lse": True}, x, memory=memory))
    assert answer.frame.id == 7
    values, tensors = reply_of(answer)
    want = api.forward(**x, spec=AttentionSpec(causal=True))
    assert torch.equal(tensors["out"], want.out)
    assert torch.equal(tensors["lse"], want.lse)
    assert tensors["out"].dtype == dtype
    meta = values["meta"]
    assert meta["backend"] == answer.frame.backend == want.backend
    assert meta["device"] == "cpu"
    assert meta["precision"] == "ieee"
    assert set(meta["timings_ms"]) == {"queue", "compute", "total"}
    assert "seed" not in meta
    assert "residual" not in values


def test_lse_only_when_asked(jobs):
    assert list(reply_of(jobs.run(ticket("attention", {}, qkv(1, 1, 2, 4))))[1]) == ["out"]


def test_small_replies_travel_in_the_frame_and_large_ones_in_memory(jobs):
    small = jobs.run(ticket("attention", {}, qkv(1, 1, 8, 8)))
    assert small.memory is None
    assert len(small.frame.body) <= MAX_INLINE
    large = jobs.run(ticket("attention", {}, qkv(1, 4, 64, 64), memory=True))
    assert large.frame.body is None
    assert large.memory.size == large.frame.size > MAX_INLINE
    _, tensors = reply_of(large)
    assert torch.equal(tensors["out"], api.forward(**qkv(1, 4, 64, 64)).out)


def test_a_named_backend_runs(jobs):
    values, _ = reply_of(jobs.run(ticket("attention", {"backend": "reference"}, qkv(1, 1, 2, 4))))
    assert values["meta"]["backend"] == "reference"


def test_the_seed_of_a_dropout_is_returned(jobs):
    x = {**qkv(1, 1, 64, 8), "v": torch.ones(1, 1, 64, 8)}
    runs = [
        reply_of(jobs.run(ticket("attention", {"dropout": {"p": 0.5, "seed": seed}}, x)))
        for seed in (1, 1, 2**64 - 1)
    ]
    assert [values["meta"]["seed"] for values, _ in runs] == [1, 1, 2**64 - 1]
    assert torch.equal(runs[0][1]["out"], runs[1][1]["out"])
    assert not torch.equal(runs[0][1]["out"], runs[2][1]["out"])


def test_backward_needs_the_forwards_seed(jobs):
    tensors = {**qkv(1, 1, 2, 4), "dout": randn(1, 1, 2, 4)}
    failure = failure_of(jobs.run(ticket("backward", {"dropout": {"p": 0.5}}, tensors)))
    assert (failure.code, failure.field) == ("invalid", "dropout")


OPTIONS = {"causal": True, "window": [3, None], "softcap": 5.0, "dropout": {"p": 0.2, "seed": 5}}


def extras(heads, length):
    return {
        "bias": randn(1, heads, length, length),
        "sinks": randn(heads),
        "alibi_slopes": randn(heads).abs(),
        "mask": torch.rand(length, length, generator=torch.Generator().manual_seed(1)) > 0.3,
    }


def test_backward_by_residual_equals_backward_of_everything(jobs):
    x = {**qkv(1, 2, 6, 8), **extras(2, 6)}
    dout, dlse = randn(1, 2, 6, 8, seed=9), randn(1, 2, 6)
    asked = {**OPTIONS, "return_lse": True, "save_for_backward": True, "backend": "reference"}
    values, forward = reply_of(jobs.run(ticket("attention", asked, x, memory=True)))

    wanted = {"bias_grad": True, "sinks_grad": True}
    by_residual = {"residual": values["residual"], **wanted}
    got_values, got = reply_of(
        jobs.run(ticket("backward", by_residual, {"dout": dout, "dlse": dlse}))
    )
    assert got_values["meta"]["backend"] == "reference"  # the forward's own
    assert got_values["meta"]["seed"] == 5
    stateless = {**OPTIONS, **wanted, "backend": "reference"}
    for known in (forward, {}):  # with out and lse, and recomputing them
        _, want = reply_of(
            jobs.run(ticket("backward", stateless, {**x, **known, "dout": dout, "dlse": dlse}))
        )
        assert set(got) == set(want) == {"dq", "dk", "dv", "dbias", "dsinks"}
        for name in want:
            torch.testing.assert_close(got[name], want[name])


def test_a_residual_serves_until_it_is_released(jobs):
    asked = {"save_for_backward": True}
    answer = jobs.run(ticket("attention", asked, qkv(1, 1, 4, 8), owner="me"))
    assert jobs._residuals.held_bytes == 4 * (4 * 4 * 8 + 4) + OWN_BYTES
    residual = reply_of(answer)[0]["residual"]
    dout = {"dout": randn(1, 1, 4, 8)}

    def backward(owner="me", **options):
        return jobs.run(ticket("backward", {"residual": residual, **options}, dout, owner=owner))

    assert set(reply_of(backward())[1]) == {"dq", "dk", "dv"}
    assert failure_of(backward(owner="you")).code == "gone"
    reply_of(backward(release=True))
    assert failure_of(backward()).code == "gone"


def test_the_release_route(jobs):
    answer = jobs.run(ticket("attention", {"save_for_backward": True}, qkv(1, 1, 4, 8)))
    residual = {"residual": reply_of(answer)[0]["residual"]}
    freed = jobs.run(ticket("release", residual))
    assert isinstance(freed.frame, Reply)
    assert jobs._residuals.held_bytes == 0
    assert failure_of(jobs.run(ticket("release", residual))).code == "gone"


def test_a_failed_backward_keeps_the_residual(jobs):
    answer = jobs.run(ticket("attention", {"save_for_backward": True}, qkv(1, 1, 4, 8)))
    options = {"residual": reply_of(answer)[0]["residual"], "release": True}
    failure = failure_of(jobs.run(ticket("backward", options, {"dout": randn(1, 1, 3, 8)})))
    assert (failure.code, failure.field) == ("invalid", "dout")
    assert failure_of(jobs.run(ticket("backward", options))).field == "dout"
    reply_of(jobs.run(ticket("backward", options, {"dout": randn(1, 1, 4, 8)})))


def test_gradients_of_what_a_residual_lacks_are_refused(jobs):
    answer = jobs.run(ticket("attention", {"save_for_backward": True}, qkv(1, 1, 4, 8)))
    options = {"residual": reply_of(answer)[0]["residual"], "bias_grad": True, "sinks_grad": True}
    failure = failure_of(jobs.run(ticket("backward", options, {"dout": randn(1, 1, 4, 8)})))
    assert (failure.code, failure.field) == ("invalid", "bias_grad")
    assert len(failure.reasons) == 2


def check_ticket(request, tensors, accept="msgpack", **options):
    tensors = {n if "." in n or n == "dout" else f"request.{n}": t for n, t in tensors.items()}
    return ticket("check", {"request": request, **options}, tensors, accept=accept)


def test_check_compares_the_fastest_with_the_reference(jobs):
    x = {**qkv(1, 2, 6, 8), "dout": randn(1, 2, 6, 8, seed=9)}
    values, _ = reply_of(jobs.run(check_ticket({"causal": True}, x)))
    assert values["pass"] is True
    assert set(values["tensors"]) == {"out", "lse", "dq", "dk", "dv"}
    for found in values["tensors"].values():
        assert found["max_abs"] <= found["budget"]
        assert set(found) == {"max_abs", "rel", "budget", "pass", "worst"}
    meta = values["meta"]
    assert (meta["backend"], meta["got"], meta["want"]) == ("cpu", "cpu", "reference")
    assert meta["timings_ms"]["compute"] > 0


def test_check_of_the_callers_own_results_finds_the_wrong_entry(jobs):
    x = qkv(1, 2, 6, 8)
    mine = api.forward(**x).out.clone()
    mine[0, 1, 2, 3] += 0.5
    values, _ = reply_of(jobs.run(check_ticket({}, {**x, "mine.out": mine})))
    assert values["pass"] is False
    assert values["tensors"]["out"]["worst"]["index"] == [0, 1, 2, 3]
    mine[0, 1, 2, 3] = math.nan
    got = json_of(jobs.run(check_ticket({}, {**x, "mine.out": mine}, accept="json")))
    assert got["tensors"]["out"]["max_abs"] == "Infinity"
    assert got["tensors"]["out"]["worst"]["got"] == "NaN"


def test_a_check_too_large_to_materialise_is_507():
    few = Jobs(CPU, Settings(max_materialise_bytes=2**16), 0, Log("test", "error"))
    failure = failure_of(few.run(check_ticket({}, qkv(1, 1, 64, 8))))
    assert failure.code == "not_enough_memory"
    assert str(2**16) in failure.detail
    assert "raise FLASHWIRE_MAX_MATERIALISE_BYTES" in failure.detail
    assert "'auto'" not in failure.detail  # a check always asks the reference
    reference = failure_of(few.run(ticket("attention", {"backend": "reference"}, qkv(1, 1, 64, 8))))
    assert reference.code == "not_enough_memory"
    assert "use backend 'auto'" in reference.detail
    assert "raise FLASHWIRE_MAX_MATERIALISE_BYTES" in reference.detail


def test_fields_of_a_check_are_named_as_in_its_message(jobs):
    x = qkv(4, 2, 8)
    offsets = torch.tensor([0, 9])
    packed = {**x, "cu_seqlens_q": offsets, "cu_seqlens_k": offsets}
    failure = failure_of(jobs.run(check_ticket({}, packed)))
    assert failure.field == "request.cu_seqlens_q"
    assert all(reason.startswith("request.") for reason in failure.reasons)
    failure = failure_of(jobs.run(check_ticket({}, {**x, "mine.out": randn(3)})))
    assert failure.field == "mine.out"
    failure = failure_of(jobs.run(check_ticket({}, x, backends=["triton", "reference"])))
    assert failure.code == "unsupported_backend"


def test_a_residual_beyond_the_budget_is_507_before_anything_is_computed(jobs, monkeypatch):
    monkeypatch.setattr(api, "forward", lambda *_, **__: pytest.fail("computed"))
    x = qkv(1, 1, 512, 256)
    failure = failure_of(jobs.run(ticket("attention", {"save_for_backward": True}, x, memory=True)))
    assert failure.code == "not_enough_memory"
    assert str(2**20) in failure.detail
    assert "raise FLASHWIRE_RESIDUAL_BYTES" in failure.detail


def test_a_residual_beyond_what_its_owner_may_hold_is_507(jobs, monkeypatch):
    monkeypatch.setattr(api, "forward", lambda *_, **__: pytest.fail("computed"))
    x = ticket("attention", {"save_for_backward": True}, qkv(1, 1, 16, 64), owner="me")
    x.job = dataclasses.replace(x.job, max_residual_bytes=10_000)
    failure = failure_of(jobs.run(x))
    assert failure.code == "not_enough_memory"
    assert "10000 are available" in failure.detail
    assert "FLASHWIRE_KEY_RESIDUAL_BYTES" in failure.detail


def test_an_answer_that_nobody_waits_for_leaves_no_residual(jobs):
    abandoned = ticket("attention", {"save_for_backward": True}, qkv(1, 1, 4, 8))
    answer = jobs.run(abandoned)
    jobs.discard(abandoned, answer)
    jobs.run(ticket("attention", {}, qkv(1, 1, 4, 8)))
    assert jobs._residuals.held_bytes == 0


def test_the_requests_memory_goes_with_the_request(jobs):
    def mapped():
        with open("/proc/self/maps") as maps:
            return sum("memfd:flashwire" in line for line in maps)

    before = mapped()
    for options in ({"save_for_backward": True}, {"window": [-9, 0]}, {"backend": "triton"}):
        sent = ticket("attention", options, qkv(1, 1, 64, 32), memory=True)
        answer = jobs.run(sent)
        sent.free()
        assert mapped() == before
        answer.close()


def test_json_in_nested_lists_with_words_for_what_json_cannot_say(jobs):
    x = {n: torch.tensor([[v]]) for n, v in {"q": 1.0, "k": 1.0, "v": math.inf}.items()}
    options = {"return_lse": True, "dropout": {"p": 0.0, "seed": 1}}
    got = json_of(jobs.run(ticket("attention", options, x, accept="json")))
    assert got["lse"] == [1.0]
    assert got["out"][0][0] in ("NaN", "Infinity")
    assert got["meta"]["backend"]
    hidden = {**x, "mask": torch.tensor([[False]])}
    got = json_of(jobs.run(ticket("attention", options, hidden, accept="json")))
    assert got["out"] == [[0.0]]
    assert got["lse"] == ["-Infinity"]


def test_json_of_other_dtypes_and_no_elements_says_so(jobs):
    x = {n: torch.tensor([[1.5]], dtype=torch.bfloat16) for n in "qkv"}
    got = json_of(jobs.run(ticket("attention", {}, x, accept="json")))
    assert got["out"] == {"dtype": "bfloat16", "shape": [1, 1], "data": [[1.5]]}
    empty = qkv(0, 4)
    got = json_of(jobs.run(ticket("attention", {}, empty, accept="json")))
    assert got["out"] == {"dtype": "float32", "shape": [0, 4], "data": []}


@pytest.mark.parametrize("shape", [(3, 1, 20000, 1), (1, 2, 3, 20000), (40000, 1), (1, 70000)])
def test_large_json_is_made_piece_by_piece_and_reads_the_same(shape):
    values = randn(*shape)
    values.view(-1)[[0, -1]] = torch.tensor([math.inf, math.nan])
    body = replies.encode("json", {"meta": {"a": 1}}, {"out": values, "lse": values.double()})
    got = json.loads(bytes(body.memory.view))
    body.memory.close()
    assert list(got) == ["out", "lse", "meta"]
    for data, dtype in ((got["out"], torch.float32), (got["lse"]["data"], torch.float64)):
        read = np.array(data).astype(np.float64)
        assert read.shape == shape
        assert torch.equal(torch.tensor(read).to(dtype).nan_to_num(), values.to(dtype).nan_to_num())


def test_a_seed_is_a_string_in_json(jobs):
    options = {"dropout": {"p": 0.5, "seed": 2**64 - 1}}
    got = json_of(jobs.run(ticket("attention", options, qkv(2, 2), accept="json")))
    assert got["meta"]["seed"] == str(2**64 - 1)


def test_every_violation_is_named(jobs):
    x = {
        **qkv(4, 2, 8),
        "cu_seqlens_q": torch.tensor([0, 3, 2]),
        "cu_seqlens_k": torch.tensor([0, 9, 9]),
    }
    failure = failure_of(jobs.run(ticket("attention", {}, x)))
    assert (failure.code, failure.field) == ("invalid", "cu_seqlens_q")
    assert len(failure.reasons) == 2
    assert all(reason in failure.detail for reason in failure.reasons)


def test_a_backend_that_cannot_gives_its_reasons(jobs):
    failure = failure_of(jobs.run(ticket("attention", {"backend": "triton"}, qkv(2, 8))))
    assert (failure.code, failure.field) == ("unsupported_backend", "backend")
    assert failure.reasons


def test_a_result_larger_than_memory_is_refused_before_it_is_made(jobs):
    """A few kilobytes can ask for terabytes: every query times every value dimension."""
    x = {"q": torch.zeros(1, 1, 2**20, 1), "k": torch.zeros(1, 1, 1, 1)}
    x["v"] = torch.zeros(1, 1, 1, 2**20)
    failure = failure_of(jobs.run(ticket("attention", {}, x, memory=True)))
    assert failure.code == "not_enough_memory"
    assert str(2 * 4 * (2**40 + 2**20)) in failure.detail
    assert "on this device now" in failure.detail
    assert "FLASHWIRE_" not in failure.detail


@pytest.mark.parametrize(
    ("error", "code"),
    [
        (RuntimeError("secret at /home/me/file.py:3"), "internal"),
        (MemoryError(), "not_enough_memory"),
        (OSError(errno.ENOSPC, "no space", "/a/b"), "not_enough_memory"),
        (OSError(errno.EIO, "secret at", "/a/b"), "internal"),
        (OSError(errno.EMFILE, "no descriptor", "/a/b"), "queue_full"),
        (torch.OutOfMemoryError("CUDA out of memory at /a/b"), "not_enough_memory"),
        (
            RuntimeError("[enforce fail at alloc_cpu.cpp:117] . DefaultCPUAllocator: can't"),
            "not_enough_memory",
        ),
    ],
)
def test_foreign_errors_are_mapped_without_their_text(jobs, monkeypatch, capfd, error, code):
    def fail(*_args, **_kwargs):
        raise error

    monkeypatch.setattr(api, "forward", fail)
    failure = failure_of(jobs.run(ticket("attention", {}, qkv(2, 8))))
    assert failure.code == code
    assert not any(word in failure.detail for word in ("/", ".py", ".cpp", "secret"))
    logs.flush()
    logged = capfd.readouterr().err
    assert ("secret at" in logged) == (code == "internal")


def fatal(code):
    error = torch.AcceleratorError("HIP error: something new")
    error.error_code = code
    return error


@pytest.mark.parametrize(
    "error",
    [
        torch.AcceleratorError("CUDA error: an illegal memory access was encountered"),
        torch.AcceleratorError("CUDA error: device-side assert triggered"),
        torch.AcceleratorError("HIP error: unspecified launch failure"),
        fatal(719),
        RuntimeError("CUDA error: uncorrectable ECC error encountered"),
        RuntimeError("Triton Error [CUDA]: an illegal instruction was encountered"),
        RuntimeError("Triton Error [HIP]:  Code: 700, an illegal memory access was encountered"),
    ],
)
def test_a_lost_device_is_no_answer(jobs, monkeypatch, capfd, error):
    def fail(*_args, **_kwargs):
        raise error

    monkeypatch.setattr(api, "forward", fail)
    with pytest.raises(DeviceLost):
        jobs.run(ticket("attention", {}, qkv(2, 8)))
    logs.flush()
    assert "job failed" in capfd.readouterr().err


def test_a_device_that_answers_nothing_more_is_lost_whatever_it_said(jobs, monkeypatch):
    def fail(*_args, **_kwargs):
        raise torch.AcceleratorError("CUDA error: something new")

    monkeypatch.setattr(api, "forward", fail)
    assert failure_of(jobs.run(ticket("attention", {}, qkv(2, 8)))).code == "internal"
    monkeypatch.setattr(devices, "synchronize", fail)
    with pytest.raises(DeviceLost):
        jobs.run(ticket("attention", {}, qkv(2, 8)))


def test_a_launch_that_fails_late_is_no_reply_and_keeps_nothing(jobs, monkeypatch):
    def fail(device):
        monkeypatch.undo()
        raise torch.OutOfMemoryError("CUDA out of memory")

    monkeypatch.setattr(devices, "synchronize", fail)
    saving = ticket("attention", {"save_for_backward": True}, qkv(1, 1, 4, 8))
    assert failure_of(jobs.run(saving)).code == "not_enough_memory"
    assert jobs._residuals.held_bytes == 0


@pytest.mark.parametrize(
    "error",
    [
        torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB"),
        RuntimeError("Triton Error [CUDA]: out of memory"),
        torch.AcceleratorError("HIP error: out of memory"),
    ],
)
def test_memory_that_runs_out_is_given_back_and_the_next_request_is_well(jobs, monkeypatch, error):
    held, freed = [], []

    def fail(q, k, v, **_):
        more = torch.zeros(100)
        held.extend(weakref.ref(t) for t in (q, k, v, more))
        raise type(error)(*error.args)  # one that nobody else holds, with what it holds

    def release(device):
        freed.append([t() for t in held])

    monkeypatch.setattr(devices, "release_cached", release)
    with monkeypatch.context() as patch:
        patch.setattr(api, "forward", fail)
        failure = failure_of(jobs.run(ticket("attention", {}, qkv(2, 8))))
    assert failure.code == "not_enough_memory"
    assert freed == [[None] * 4]  # after everything that the job held is gone
    assert set(reply_of(jobs.run(ticket("attention", {}, qkv(2, 8))))[1]) == {"out"}
    assert len(freed) == 1


def test_tensors_in_pieces_or_out_of_line_are_read_right():
    want = torch.arange(6, dtype=torch.float32).view(2, 3)
    raw = bytes_of(want)
    shifted = tensor_at(bytearray(b"x" + bytes(raw)), TensorSlot("float32", (2, 3), ((1, 24),)))
    assert torch.equal(shifted, want)
    assert shifted.data_ptr() % 4 == 0
    parts = bytearray(bytes(raw[:10]) + b"??" + bytes(raw[10:]))
    pieces = TensorSlot("float32", (2, 3), ((0, 10), (12, 14)))
    assert torch.equal(tensor_at(parts, pieces), want)


def test_aligned_tensors_share_the_bytes_they_lie_in():
    raw = bytearray(16)
    tensor = tensor_at(raw, TensorSlot("float32", (2,), ((8, 8),)))
    tensor.fill_(1.0)
    assert np.frombuffer(raw, np.float32).tolist() == [0, 0, 1, 1]


def test_any_byte_but_zero_is_true():
    raw = bytearray([0, 1, 2, 255])
    mask = tensor_at(raw, TensorSlot("bool", (4,), ((0, 4),)))
    assert mask.tolist() == [False, True, True, True]
    assert mask.view(torch.uint8).tolist() == [0, 1, 1, 1]


def test_zero_size_and_rank_zero():
    assert tensor_at(bytearray(), TensorSlot("bfloat16", (2, 0), ())).shape == (2, 0)
    assert tensor_at(bytearray(8), TensorSlot("int64", (), ((0, 8),))).shape == ()
    assert bytes(bytes_of(torch.tensor(2.0).expand(1, 1))) == b"\0\0\0\x40"
    assert len(bytes_of(torch.empty(0, 3))) == 0


def test_bytes_are_those_of_the_logical_order():
    assert bytes(bytes_of(torch.arange(4, dtype=torch.int32).view(2, 2).T)) == bytes(
        np.array([0, 2, 1, 3], "<i4")
    )


def test_a_device_proves_itself():
    devices.prove(CPU)
    assert devices.choose("auto").type in ("cpu", "cuda")
    assert devices.choose("cpu") == CPU


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a CUDA device")
@pytest.mark.parametrize("setting", ["cuda", "cuda:3"])
def test_a_device_that_is_not_there_is_named(setting):
    with pytest.raises(devices.NoDevice, match=setting):
        devices.choose(setting)


def test_a_device_that_computes_nonsense_is_found_out(monkeypatch):
    forward = api.forward

    def wrong(*args, **kwargs):
        result = forward(*args, **kwargs)
        result.lse.add_(0.001)
        return result

    monkeypatch.setattr(api, "forward", wrong)
    with pytest.raises(devices.WrongAnswer, match="lse"):
        devices.prove(CPU)


def test_memory_that_is_left_is_measured():
    total = devices.facts(CPU)["memory_bytes"]
    assert 0 < devices.available_bytes(CPU) <= total


def test_what_is_held_and_the_memory_of_a_gpu_are_shown(monkeypatch):
    shown = Meter()
    jobs = Jobs(CPU, Settings(), 3, Log("test", "error"), shown)
    jobs.run(ticket("attention", {"save_for_backward": True}, qkv(1, 1, 4, 8)))
    jobs.measure()
    assert shown.value(meter.RESIDUALS, "3") == 1
    assert shown.value(meter.RESIDUAL_BYTES, "3") == jobs._residuals.held_bytes > 0
    (row,) = [
        n for key, n in shown.region.rows() if key == (meter.COMPUTE.name, "attention", "cpu")
    ]
    assert sum(row[:-1]) == 1
    assert not [key for key, _ in shown.region.rows() if key[0] == meter.DEVICE_MEMORY.name]
    monkeypatch.setattr(devices, "allocated_bytes", lambda device: (5, 9))
    jobs.measure()
    assert shown.value(meter.DEVICE_MEMORY, "3") == 5
    assert shown.value(meter.DEVICE_MEMORY_PEAK, "3") == 9


@pytest.mark.parametrize(("dtype", "nbytes"), [("int32", 8), ("int64", 16)])
def test_integers_are_no_views_of_a_body(dtype: str, nbytes: int) -> None:
    """Whoever shares the memory may write there after they were checked."""
    body = bytearray(64)
    offsets = tensor_at(body, TensorSlot(dtype, (2,), ((0, nbytes),)))
    values = tensor_at(body, TensorSlot("float32", (2,), ((32, 8),)))
    body[:] = b"\x01" * 64
    assert not offsets.any()
    assert values.all()
