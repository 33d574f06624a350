"""Attention of transformers' models over the wire.

flashwire.transformers.register(client)
model = AutoModelForCausalLM.from_pretrained(path, attn_implementation="flashwire")
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any, Final

try:
    import torch
    from transformers import AttentionInterface, AttentionMaskInterface, PreTrainedModel
    from transformers.masking_utils import (
        bidirectional_mask_function,
        causal_mask_function,
        prepare_padding_mask,
        sdpa_mask,
    )
except ModuleNotFoundError as exc:
    if exc.name not in ("torch", "transformers"):
        raise
    hint = "flashwire.transformers needs both: pip install 'flashwire[transformers]'"
    raise ImportError(hint, name=exc.name) from None

from flashwire.client import Client
from flashwire.options import Backend
from flashwire.patterns import Pattern, PatternMask, recognise
from flashwire.torch import flash_attention

# Arguments by which a model asks for what this attention does not do.
_REFUSED: Final = (
    "output_attentions", "block_table", "k_cache", "v_cache", "indices", "block_indices", "sinks"
)  # fmt: skip
_registered: set[str] = set()


def register(client: Client, name: str = "flashwire", *, backend: Backend | None = None) -> None:
    """Make `attn_implementation=name` mean attention by this client, for every model.

    Registers the attention and the function that makes its masks. Registering a name again
    replaces its client. The client stays open for as long as models use it.

    backend   what computes on the server; None is the server's choice

    Raises TypeError for a client that is none, ValueError for a name with "/" or "|", which
    transformers reads as a kernel of its hub.
    """
    if not isinstance(client, Client):
        raise TypeError(f"client must be a flashwire.Client, got {type(client).__name__}")
    if not name or set(name) & set("/|"):
        raise ValueError(f"name must be a word without '/' and '|', got {name!r}")
    attend = _Attention(client, {} if backend is None else {"backend": backend})
    AttentionInterface.register(name, torch.compiler.disable(attend))  # type: ignore[no-untyped-call]
    AttentionMaskInterface.register(name, torch.compiler.disable(make_mask))  # type: ignore[no-untyped-call]
    if not _registered:
        _skip_the_hub()
    _registered.add(name)


def _skip_the_hub() -> None:
    """Let the names registered here pass the check that every model makes of its implementation.

    transformers takes any name with "flash" in it for a flash-attn package or a kernel to be loaded
    from its hub, and replaces it where a model lists kernels of its own (GPT-OSS).
    """
    check = PreTrainedModel._check_and_adjust_attn_implementation

    def pass_ours(self: Any, attn_implementation: str | None, *args: Any, **kwargs: Any) -> Any:
        if attn_implementation in _registered:
            return attn_implementation
        return check(self, attn_implementation, *args, **kwargs)

    PreTrainedModel._check_and_adjust_attn_implementation = pass_ours


def make_mask(
    batch_size: int,
    q_length: int,
    kv_length: int,
    q_offset: int | torch.Tensor = 0,
    kv_offset: int = 0,
    mask_function: Callable[..., torch.Tensor] = causal_mask_function,
    attention_mask: torch.Tensor | None = None,
    use_vmap: bool = False,
    device: torch.device | str = "cpu",
    **_: Any,
) -> Any:
    """The mask (B, 1, Lq, Lk) of a forward, as transformers' AttentionMaskInterface asks for it.

    A PatternMask wherever options and at most one row of padding for each of the batch say it, else
    boolean, True = visible. Never None, which attention would have to guess the meaning of.

    q_offset, kv_offset  positions of the first query and key: a cache holds what came before
    mask_function        (batch, head, query, key) -> visible, by position
    attention_mask       (B, positions so far), True = no padding
    """
    device = torch.device(device)
    offset = int(q_offset) - kv_offset
    padding = None
    if attention_mask is not None:
        seen = prepare_padding_mask(attention_mask, kv_length, kv_offset)
        padding = seen[:, None, None, kv_offset : kv_offset + kv_length].bool()
    plain = {causal_mask_function: Pattern(offset, right=0), bidirectional_mask_function: Pattern()}
    pattern, mask = plain.get(mask_function), None
    if pattern is None or pattern.keys(q_length, kv_length) is None:
        mask = sdpa_mask(
            batch_size, q_length, kv_length, int(q_offset), kv_offset, mask_function,
            allow_is_causal_skip=False, use_vmap=use_vmap, device=device,
        )  # fmt: skip
        pattern = recognise(mask, offset)
    keys = None if pattern is None else pattern.keys(q_length, kv_length)
    if padding is not None and bool(padding[..., :keys].all()):
        padding = None
    if pattern is not None and keys is not None and (padding is None or pattern.lengths is None):
        shape = (batch_size, 1, q_length, kv_length)
        return PatternMask(replace(pattern, padding=padding), shape, device)
    return mask if padding is None else mask & padding


@dataclass(frozen=True)
class _Attention:
    """Attention as transformers' AttentionInterface calls it."""

    client: Client
    options: dict[str, Any]

    def __call__(
        self,
        module: torch.nn.Module,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        attention_mask: torch.Tensor | None,
        *,
        scaling: float | None = None,
        dropout: float = 0.0,
        is_causal: bool | None = None,
        sliding_window: int | None = None,
        softcap: float | None = None,
        s_aux: torch.Tensor | None = None,
        position_bias: torch.Tensor | None = None,
        cu_seq_lens_q: torch.Tensor | None = None,
        cu_seq_lens_k: torch.Tensor | None = None,
        **others: Any,
    ) -> tuple[torch.Tensor, None]:
        """q (B, Hq, Lq, D), k and v (B, Hkv, Lk, D or Dv) to out (B, Lq, Hq, Dv), contiguous.

        Raises ValueError for what cannot be had: attention weights, a paged cache, sparse indices.
        """
        refused = [n for n in _REFUSED if others.get(n) is not None and others[n] is not False]
        if refused:
            raise ValueError(f"flashwire's attention does not take {', '.join(refused)}")
        options = dict(self.options, scale=scaling, softcap=softcap, sinks=s_aux, mask=None)
        if dropout:
            # From torch's generator: a checkpoint that runs the forward again drops the same.
            options.update(dropout=dropout, seed=int(torch.randint(2**63 - 1, ())))
        if is_causal is None:
            is_causal = getattr(module, "is_causal", True)
        seen = _what_is_seen(attention_mask, query, key, is_causal, sliding_window)
        offsets = None
        if cu_seq_lens_q is not None and cu_seq_lens_k is not None:
            offsets = cu_seq_lens_q, cu_seq_lens_k
        return self._attend((query, key, value), seen, position_bias, offsets, options), None

    def _attend(
        self,
        qkv: tuple[torch.Tensor, ...],
        seen: Pattern | torch.Tensor,
        bias: torch.Tensor | None,
        offsets: tuple[torch.Tensor, torch.Tensor] | None,
        options: dict[str, Any],
    ) -> torch.Tensor:
        """(B, Lq, Hq, Dv). offsets are of sequences packed over the batch, from the caller."""
        rows, columns = qkv[0].shape[2], qkv[1].shape[2]
        if isinstance(seen, Pattern) and seen.lengths is not None:
            if bias is None:
                edges = torch.tensor((0, *seen.lengths)).cumsum(0)
                offsets = edges, edges
            else:
                seen = seen.dense(rows, columns, bias.device)
        if isinstance(seen, torch.Tensor):
            keys = columns
            if seen.dtype.is_floating_point:  # a mask of the caller's own, added to the scores
                bias = seen if bias is None else bias + seen
            else:
                options["mask"] = seen
        else:
            keys = seen.keys(rows, columns) or columns
            options.update(_band(seen), mask=seen.padding)
        if offsets is not None:
            if options["mask"] is not None or bias is not None:
                raise ValueError("cu_seq_lens_q and cu_seq_lens_k take no mask and no bias")
            return self._packed(qkv, offsets, options)
        query, key, value = qkv[0], qkv[1][:, :, :keys], qkv[2][:, :, :keys]
        for name, tensor in (("mask", options["mask"]), ("bias", bias)):
            options[name] = tensor if tensor is None else tensor[..., :keys]
        out: torch.Tensor = flash_attention(query, key, value, client=self.client, **options)
        return out.transpose(1, 2).contiguous()

    def _packed(
        self,
        qkv: tuple[torch.Tensor, ...],
        offsets: tuple[torch.Tensor, torch.Tensor],
        options: dict[str, Any],
    ) -> torch.Tensor:
        batch, _, rows, _ = qkv[0].shape
        options.update(cu_seqlens_q=offsets[0], cu_seqlens_k=offsets[1])
        query, key, value = (x.transpose(1, 2).flatten(0, 1) for x in qkv)  # (B*L, H, D)
        out: torch.Tensor = flash_attention(query, key, value, client=self.client, **options)
        return out.reshape(batch, rows, *out.shape[1:])


def _what_is_seen(
    mask: torch.Tensor | None,
    query: torch.Tensor,
    key: torch.Tensor,
    causal: bool,
    sliding_window: int | None,
) -> Pattern | torch.Tensor:
    """What a model's mask says. A mask of make_mask says all; else causal and sliding_window count.

    As transformers' flash attention reads them: (B, Lk) is padding, a window W is the key itself
    and W-1 on its left, or on either side where it is not causal.
    """
    rows, columns = query.shape[2], key.shape[2]
    if isinstance(mask, PatternMask):
        return mask.pattern if mask.shape[2:] == (rows, columns) else mask.dense()
    if mask is not None and mask.ndim != 2:
        return mask
    left = None if sliding_window is None else sliding_window - 1
    padding = None if mask is None else mask[:, None, None, -columns:].bool()
    return Pattern(columns - rows, left, 0 if causal else left, padding=padding)


def _band(pattern: Pattern) -> dict[str, Any]:
    """A pattern's options but for its padding."""
    causal = pattern.right == 0
    ends = pattern.left, pattern.right
    plain = pattern.left is None and (causal or pattern.right is None)
    return {"causal": causal, "window": None if plain else ends}
