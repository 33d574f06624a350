"""Client and AsyncClient against a server on a real socket: what is sent, what comes back."""

import json
from typing import Any

import ml_dtypes
import msgpack
import numpy as np
import pytest
import torch

import flashwire
from flashwire import AsyncClient, Client, errors, wire


def expected(q: Any, k: Any, v: Any) -> np.ndarray:
    s = np.einsum("bhid,bhjd->bhij", q, k, dtype=np.float64) * q.shape[-1] ** -0.5
    p = np.exp(s - s.max(-1, keepdims=True))
    return p / p.sum(-1, keepdims=True) @ v.astype(np.float64)


def test_numpy_in_numpy_out(client: Client, qkv: Any) -> None:
    result = client.attention(*qkv, return_lse=True)
    np.testing.assert_allclose(result.out, expected(*qkv), rtol=1e-6)
    assert (result.out.dtype, result.lse.dtype) == (np.float32, np.float32)
    assert result.lse.shape == (2, 3, 4)
    assert result.residual is None
    assert result.meta["backend"] == "cpu"
    for array in (result.out, result.lse):
        assert array.flags.writeable
        assert array.flags.owndata
    assert not np.shares_memory(result.out, result.lse)


def test_torch_in_torch_out(client: Client, qkv: Any) -> None:
    q, k, v = (torch.from_numpy(x).bfloat16() for x in qkv)
    result = client.attention(q.requires_grad_(), k, v)
    assert isinstance(result.out, torch.Tensor)
    assert (result.out.dtype, result.out.device) == (torch.bfloat16, q.device)
    assert result.lse is None
    np.testing.assert_allclose(result.out.float(), expected(*qkv), atol=0.05)


def test_results_are_what_q_is(client: Client, qkv: Any) -> None:
    q, k, v = qkv
    assert isinstance(client.attention(torch.from_numpy(q), k, v).out, torch.Tensor)
    assert isinstance(client.attention(q, torch.from_numpy(k), v).out, np.ndarray)


def test_dtype_rounds_on_the_way(server: Any, client: Client, qkv: Any) -> None:
    """S02: fp32 with dtype "bf16" is rounded to nearest even and comes back as bf16."""
    q, k, _ = (x[:, :, :1] for x in qkv)
    v = np.array([0.01, 1.0, -2.5, 3e38, 1.00390625], np.float32).reshape(1, 1, 1, 5)
    result = client.attention(q[:1, :1], k[:1, :1], v, dtype="bf16")
    assert {t.dtype for t in server.last.tensors.values()} == {torch.bfloat16}
    assert result.out.dtype == ml_dtypes.bfloat16
    assert result.out.tobytes() == v.astype(ml_dtypes.bfloat16).tobytes()
    assert result.out.view(np.uint16).ravel()[0] == 0x3C24
    same = client.attention(*(x.astype(ml_dtypes.bfloat16) for x in (q[:1, :1], k[:1, :1], v)))
    assert same.out.tobytes() == result.out.tobytes()


def test_body_is_the_canonical_message(server: Any, client: Client, qkv: Any) -> None:
    mask = np.array([True, False, True, True])
    client.attention(
        *qkv, scale=1, causal=True, window=(2, -1), softcap=0, dropout=0.5, seed=3, mask=mask,
        bias=None, layout="bhld", return_lse=True,
    )  # fmt: skip
    data = {name: memoryview(x.tobytes()) for name, x in zip("qkv", qkv, strict=True)}
    header = wire.Header("float32", (2, 3, 4, 5))
    assert server.last.body == wire.encode(
        {
            "scale": 1.0,
            "causal": True,
            "window": [2, None],
            "dropout": {"p": 0.5, "seed": 3},
            "return_lse": True,
        },
        {name: (header, view) for name, view in data.items()}
        | {"mask": (wire.Header("bool", (4,)), memoryview(mask.tobytes()))},
    )


def test_offsets_may_be_lists(server: Any, client: Client) -> None:
    message = wire.encode({}, {"out": (wire.Header("float32", (0,)), memoryview(b""))})
    server.script = [(200, {"content-type": wire.MEDIA_TYPE}, message)]
    q = np.zeros((3, 1, 2), np.float32)
    client.attention(q, q, q, cu_seqlens_q=[0, 1, 3], cu_seqlens_k=np.array([0, 1, 3], np.int32))
    sent = wire.decode(server.last.body, wire.ATTENTION).tensors
    assert sent["cu_seqlens_q"].header == wire.Header("int64", (3,))
    assert sent["cu_seqlens_k"].header == wire.Header("int32", (3,))


def test_headers(server: Any, qkv: Any) -> None:
    with Client(server.url + "/", api_key="s3cret", timeout=2.5) as client:
        client.attention(*qkv)
        sent = server.last.headers
        client.attention(*qkv, timeout=0.75)
    assert sent["authorization"] == "Bearer s3cret"
    assert sent["content-type"] == "application/msgpack"
    assert sent["content-length"] == str(len(server.last.body))
    assert "transfer-encoding" not in sent
    assert sent["accept-encoding"] == "identity"
    assert sent["user-agent"] == f"flashwire/{flashwire.__version__}"
    assert 2400 < int(sent["flashwire-timeout-ms"]) <= 2500
    assert 650 < int(server.last.headers["flashwire-timeout-ms"]) <= 750


def test_no_deadline_is_no_header(server: Any, qkv: Any) -> None:
    with Client(server.url, timeout=None) as client:
        client.attention(*qkv)
    assert "flashwire-timeout-ms" not in server.last.headers
    assert "authorization" not in server.last.headers


def test_large_bodies(server: Any, client: Client) -> None:
    rng = np.random.default_rng(1)
    q, k, v = (rng.standard_normal((1, 1, 8, 50_000), np.float32) for _ in range(3))
    result = client.attention(q, k, v)
    np.testing.assert_allclose(result.out, expected(q, k, v), rtol=1e-5)
    assert len(server.last.body) > 3 * q.nbytes


def test_backward_by_residual(server: Any, client: Client, qkv: Any) -> None:
    result = client.attention(*qkv, causal=True, save_for_backward=True)
    dout = np.asfortranarray(np.ones_like(result.out))
    first = client.backward(result, dout)
    second = client.backward(result.residual, dout, release=True)
    for name in ("dq", "dk", "dv"):
        np.testing.assert_array_equal(getattr(first, name), getattr(second, name))
    assert first.dbias is None
    assert server.last.options == {"residual": result.residual, "release": True}
    with pytest.raises(errors.Gone, match=r"it has expired \[410, request req-1\]"):
        client.backward(result, dout)


def test_gradients_need_nothing_on_the_server(server: Any, client: Client, qkv: Any) -> None:
    saved = client.attention(*qkv, save_for_backward=True, return_lse=True)
    dout, dlse = np.ones_like(saved.out), np.ones_like(saved.lse)
    by_residual = client.backward(saved, dout, dlse=dlse)
    stateless = client.gradients(*qkv, dout, out=saved.out, lse=saved.lse, dlse=dlse)
    for name in ("dq", "dk", "dv"):
        np.testing.assert_array_equal(getattr(stateless, name), getattr(by_residual, name))
    assert set(server.last.tensors) == {"q", "k", "v", "out", "lse", "dout", "dlse"}


def test_backward_without_a_residual_is_refused_here(server: Any, client: Client, qkv: Any) -> None:
    result = client.attention(*qkv)
    with pytest.raises(errors.Invalid, match="save_for_backward=True"):
        client.backward(result, result.out)
    assert len(server.received) == 1


def test_release(server: Any, client: Client, qkv: Any) -> None:
    result = client.attention(*qkv, save_for_backward=True)
    client.release(result)
    assert server.residuals == {}
    client.release(result)  # gone is as good as freed
    client.release("a/b?c")
    assert server.last.path == "/attention/residual/a%2Fb%3Fc"


def test_check(server: Any, client: Client, qkv: Any) -> None:
    found = {"max_abs": 1e-7, "rel": 2e-7, "budget": 1e-6, "pass": True,
             "worst": {"index": [0, 1, 2, 3], "got": 1.0, "want": "NaN"}}  # fmt: skip
    values = {
        "pass": True,
        "tensors": {"out": found, "lse": found | {"worst": None}},
        "meta": {"got": "cpu", "want": "reference"},
    }
    server.script = [(200, {"content-type": wire.MEDIA_TYPE}, msgpack.packb(values))]
    report = client.check(*qkv, causal=True, mine={"out": qkv[0]}, backends=("cpu", "reference"))
    assert report.passed
    assert report.tensors["out"].worst.index == (0, 1, 2, 3)
    assert np.isnan(report.tensors["out"].worst.want)
    assert report.tensors["lse"].worst is None
    assert str(report).splitlines() == [
        "tensor  max abs  relative  budget  used        worst",
        "out     1e-07    2e-07     1e-06   10.00%  ok  at [0, 1, 2, 3]: got 1, want nan",
        "lse     1e-07    2e-07     1e-06   10.00%  ok",
        "cpu against reference: within budget",
    ]
    assert repr(report).startswith("CheckReport(passed=True, ")
    message = wire.decode(server.last.body, wire.CHECK)
    assert message.options == {
        "backends": ["cpu", "reference"], "request": {"causal": True}, "mine": {},
    }  # fmt: skip
    assert set(message.tensors) == {"request.q", "request.k", "request.v", "mine.out"}


@pytest.mark.parametrize(
    ("max_abs", "budget", "used"),
    [(2.0, 1.0, 2.0), (0.0, 0.0, 0.0), (1.0, 0.0, float("inf")), (float("inf"), 1.0, float("inf"))],
)
def test_share_of_a_budget(max_abs: float, budget: float, used: float) -> None:
    found = flashwire.TensorCheck(False, max_abs, 0.0, budget)
    assert found.used == used
    assert "OVER" in str(flashwire.CheckReport(False, {"out": found}))


def test_check_of_results_as_they_come(server: Any, client: Client, qkv: Any) -> None:
    result = client.attention(*qkv, return_lse=True)
    grads = client.gradients(*qkv, result.out)
    answer = (200, {"content-type": wire.MEDIA_TYPE}, msgpack.packb({"pass": False, "tensors": {}}))
    for mine, names in ((result, {"out", "lse"}), (grads, {"dq", "dk", "dv"})):
        server.script = [answer]
        assert not client.check(*qkv, mine=mine, dout=result.out).passed
        sent = set(wire.decode(server.last.body, wire.CHECK).tensors)
        assert sent == {"dout", *(f"mine.{n}" for n in names), *(f"request.{n}" for n in "qkv")}
    with pytest.raises(errors.Invalid, match="'doubt' cannot be checked; did you mean 'out'"):
        client.check(*qkv, mine={"doubt": qkv[0]})


PLAN = {
    "backend": "cpu", "skipped": [], "visible_pairs": 7,
    "flops_fwd": 1, "flops_bwd": 2, "bytes_materialised_s": 3,
    "bytes_out_lse": 4, "materialised_ratio": 0.75, "sram_elements": 1024,
    "bytes_min": 5, "bytes_flash": 6, "traffic_reduction": 8.0,
    "intensity": 9.0, "peak_bytes": 10, "tiles": {"total": 4}, "wire_bytes_up": 11,
    "wire_bytes_down": 12, "estimated_ms": None, "more": 1,
}  # fmt: skip


def test_plan(server: Any, client: Client) -> None:
    answer = json.dumps(PLAN).encode()
    server.script = [(200, {"content-type": "application/json"}, answer)]
    planned = client.plan(
        (1, 2, 3, 4), (1, 1, 5, 4), dtype=torch.bfloat16, causal=True, mask_shape=(5,),
        bias_shape=(3, 5), cu_seqlens_q=np.array([0, 3]), sram_elements=1024,
    )  # fmt: skip
    assert planned.traffic_reduction == 8.0
    message = wire.decode(server.last.body, wire.PLAN)
    assert message.options == {"causal": True, "sram_elements": 1024, "cu_seqlens_q": [0, 3]}
    assert {name: ref.header for name, ref in message.tensors.items()} == {
        "q": wire.Header("bfloat16", (1, 2, 3, 4)),
        "k": wire.Header("bfloat16", (1, 1, 5, 4)),
        "v": wire.Header("bfloat16", (1, 1, 5, 4)),  # k's, not q's
        "mask": wire.Header("bool", (5,)),
        "bias": wire.Header("bfloat16", (3, 5)),
    }


def test_plan_of_other_heads(server: Any, client: Client) -> None:
    """k and v default to q's, v to k's."""
    given: list[tuple[Any, set[Any]]] = [
        (((1, 8, 4, 16),), {("q", (1, 8, 4, 16))}),
        (
            ((1, 8, 4, 16), (1, 2, 9, 16)),
            {("q", (1, 8, 4, 16)), ("k", (1, 2, 9, 16)), ("v", (1, 2, 9, 16))},
        ),
        (
            ((1, 8, 4, 16), None, (1, 8, 4, 3)),
            {("q", (1, 8, 4, 16)), ("v", (1, 8, 4, 3))},
        ),
    ]
    for shapes, sent in given:
        server.script = [(200, {"content-type": "application/json"}, json.dumps(PLAN).encode())]
        client.plan(*shapes, dtype="fp16")
        message = wire.decode(server.last.body, wire.PLAN)
        assert {(name, ref.shape) for name, ref in message.tensors.items()} == sent


def test_info_and_ready(server: Any, client: Client) -> None:
    server.script = [
        (200, {"content-type": "application/json"}, b'{"device": "cpu"}'),
        (200, {"content-type": "application/json"}, b"{}"),
        server.problem(503, "no_worker", "starting", retry_after=1),
    ]
    assert client.info() == {"device": "cpu"}
    assert client.ready()
    assert not client.ready()
    assert [r.path for r in server.received] == ["/info", "/readyz", "/readyz"]


def test_ready_is_false_without_a_server() -> None:
    with Client("http://127.0.0.1:1") as client:
        assert not client.ready()
        with pytest.raises(errors.ConnectionLost, match="connection refused"):
            client.info()


def test_unknown_options_are_errors(client: Client, qkv: Any) -> None:
    with pytest.raises(TypeError, match="'causl'; did you mean 'causal'"):
        client.attention(*qkv, causl=True)
    with pytest.raises(TypeError, match="'release'"):
        client.gradients(*qkv, qkv[0], release=True)
    with pytest.raises(TypeError, match="'mask'"):
        client.plan((1, 1, 1, 1), dtype="fp16", mask=None)
    with pytest.raises(TypeError, match="'causal'"):
        client.backward("id", qkv[0], causal=True)


@pytest.mark.parametrize(
    ("name", "hint"),
    [
        ("softmax_scale", r"; did you mean 'scale'\?"),
        ("is_causal", r"; did you mean 'causal'\?"),
        ("attn_mask", r"; did you mean 'mask' \(boolean\) or 'bias' \(added\)\?"),
        ("dropout_p", r"; did you mean 'dropout'\?"),
        ("window_size", r"; did you mean 'window'\?"),
        ("enable_gqa", "; GQA needs no option"),
        ("max_seqlen_q", "; not needed"),
        ("max_seqlen_k", "; not needed"),
        ("cu_seqlens", "; give both 'cu_seqlens_q' and 'cu_seqlens_k'"),
    ],
)
def test_names_of_torch_and_flash_attn(client: Client, qkv: Any, name: str, hint: str) -> None:
    with pytest.raises(TypeError, match=f"'{name}'{hint}"):
        client.attention(*qkv, **{name: 1})


@pytest.mark.parametrize(
    ("options", "field"),
    [
        ({"scale": object()}, "scale"),
        ({"dtype": "float17"}, "dtype"),
        ({"mask": np.zeros(3, np.uint8)}, "mask"),
        ({"sinks": [0.0]}, "sinks"),
        ({"cu_seqlens_q": [0, 2.5]}, "cu_seqlens_q"),
        ({"timeout": 0}, "timeout"),
        ({"timeout": float("nan")}, "timeout"),
        ({"dropout": 0.5, "seed": 2**64}, "dropout.seed"),
        ({"dropout": 0.5, "seed": -(2**70)}, "dropout.seed"),
        ({"seed": 7}, "seed"),
        ({"window": (1, 2, 3)}, "window"),
        ({"window": 5}, "window"),
        ({"layout": "bhld", "cu_seqlens_q": [0, 4], "cu_seqlens_k": [0, 4]}, "layout"),
        ({"layout": "blhd", "cu_seqlens_q": [0, 4], "cu_seqlens_k": [0, 4]}, "layout"),
    ],
)
def test_what_cannot_be_sent_is_invalid(
    server: Any, client: Client, qkv: Any, options: Any, field: str
) -> None:
    with pytest.raises(errors.Invalid) as caught:
        client.attention(*qkv, **options)
    assert (caught.value.field, caught.value.status, caught.value.request_id) == (field, 422, None)
    assert server.received == []


def test_refusals_of_plans_are_those_of_attention(server: Any, client: Client) -> None:
    with pytest.raises(errors.Invalid, match="packed tensors are") as caught:
        client.plan((4, 1, 8), dtype="fp16", layout="bhld", cu_seqlens_q=[0], cu_seqlens_k=[0])
    assert caught.value.field == "layout"
    with pytest.raises(errors.Invalid, match=r"window: must be a pair .left, right., got 3"):
        client.plan((1, 1, 4, 8), dtype="fp16", window=(1, 2, 3))  # type: ignore[arg-type]
    with pytest.raises(errors.Invalid, match="seed: is that of dropout"):
        client.plan((1, 1, 4, 8), dtype="fp16", seed=3)
    assert server.received == []


def test_a_seed_may_wait_for_its_dropout(server: Any, client: Client, qkv: Any) -> None:
    """Code that turns dropout off for evaluation keeps its seed."""
    client.attention(*qkv, dropout=0.0, seed=7)
    assert server.last.options == {"dropout": {"p": 0.0, "seed": 7}}


@pytest.mark.parametrize(
    "url", ["localhost:8000", "ftp://x", "http://", "", "http://h:0", "http://h:65536"]
)
def test_urls_are_checked(url: str) -> None:
    with pytest.raises(ValueError, match="must be http"):
        Client(url)


def test_keys_stay_out_of_sight() -> None:
    assert repr(Client("http://host:1", api_key="s3cret")) == "Client('http://host:1')"
    assert repr(AsyncClient("http://host:1", api_key="s3cret")) == "AsyncClient('http://host:1')"
    with pytest.raises(ValueError, match="printable ASCII") as caught:
        Client("http://host:1", api_key="s3cret\n")
    assert "s3cret" not in str(caught.value)


def test_methods_are_documented() -> None:
    assert Client.attention.__doc__ == AsyncClient.attention.__doc__
    assert "lse" in (Client.attention.__doc__ or "")
    assert Client.attention.__qualname__ == "attention"


async def test_async(server: Any, qkv: Any) -> None:
    async with AsyncClient(server.url) as client:
        result = await client.attention(*qkv, save_for_backward=True)
        np.testing.assert_allclose(result.out, expected(*qkv), rtol=1e-6)
        grads = await client.backward(result, result.out, release=True)
        assert grads.dq.shape == (2, 3, 4, 5)
        with pytest.raises(errors.Gone):
            await client.backward(result, result.out)
        rng = np.random.default_rng(1)
        large = tuple(rng.standard_normal((1, 1, 8, 50_000), np.float32) for _ in range(3))
        result = await client.attention(*large)
        np.testing.assert_allclose(result.out, expected(*large), rtol=1e-5)
        server.script = [(200, {}, b"")]
        assert await client.ready()


async def test_async_retries(server: Any, qkv: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    noted: list[float] = []

    async def sleep(seconds: float) -> None:
        noted.append(seconds)

    monkeypatch.setattr("anyio.sleep", sleep)
    server.script = ["drop", server.problem(429, "queue_full", "full", retry_after=3)]
    async with AsyncClient(server.url) as client:
        result = await client.attention(*qkv)
    np.testing.assert_allclose(result.out, expected(*qkv), rtol=1e-6)
    assert noted[0] == 0
    assert 3 < noted[1] < 3.5
