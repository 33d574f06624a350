"""Attention over the wire on real input: every layer of a small language model, both ways.

Starts `flashwire-serve` on a free port and sends it the q, k and v of each layer of
all-MiniLM-L6-v2 (capture_minilm.py made the file) as one padded batch of two sentences, forward and
backward. What comes back is compared with

- the model's own attention output. The file holds it in float16, so up to half a unit in the last
  place of each value is the file's own doing and is taken off the difference first;
- attention and its gradients by torch autograd in float64, written out below.

How far apart they may be is the contract's error budget. Exits 0 when everything is within it, 1
when something is not or the service fails. `--url` checks a server that is already running.
"""

from __future__ import annotations

import argparse
import sys
import time
import zipfile
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar

import numpy as np
import torch
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn
from rich.table import Table

from flashwire import Client
from flashwire_kernels.budget import expectations
from flashwire_kernels.tensors import Inputs
from flashwire_kernels.types import AttentionSpec, TensorHeader
from flashwire_kernels.validation import resolve
from serving import ExampleError, arguments, connected, exit_status

DATA = Path(__file__).parent / "data" / "minilm_attention.npz"
FIELDS = ("q", "k", "v", "out", "lengths", "sentences", "source", "model")
LEGEND = """\
model    the served out against the model's own, less what its storage in float16 explains
float64  against attention by autograd in float64: one row for the worse of out and lse, one for
         the worst of dq, dk and dv
worst is the tensor that uses most of its error budget; compute is the server's time, trip includes
the network."""
T = TypeVar("T")


@dataclass(frozen=True, slots=True)
class Layer:
    """A layer's attention on the padded batch: all (B, H, L, D), but mask (B, 1, 1, L).

    `out` is the model's own, in float16. `dout` is random, and 0 where there is no token.
    """

    q: np.ndarray
    k: np.ndarray
    v: np.ndarray
    mask: np.ndarray
    dout: np.ndarray
    out: np.ndarray


@dataclass(frozen=True, slots=True)
class Expected:
    """float64 results of a layer, and how far each may be missed, by the tensor's name."""

    tensors: Mapping[str, np.ndarray]
    budget: Mapping[str, float]


@dataclass(frozen=True, slots=True)
class Check:
    """A row of the table: the tensor of a reply that uses the largest share of its budget."""

    layer: int
    against: str
    tensor: str
    error: float
    budget: float
    meta: Mapping[str, Any]
    trip_ms: float

    @property
    def ok(self) -> bool:
        return self.error <= self.budget  # false for NaN


def load(path: Path, dtype: str) -> tuple[list[Layer], list[str]]:
    """The layers in the file, with q, k, v as dtype, and lines that say what they are."""
    try:
        with np.load(path, allow_pickle=False) as file:
            data = {name: file[name] for name in FIELDS}
    except (OSError, ValueError, KeyError, zipfile.BadZipFile) as e:
        raise ExampleError(f"cannot read {path}: {e}") from e
    lengths = data["lengths"]
    real = np.arange(lengths.max()) < lengths[:, None]  # (B, L)
    rng = np.random.default_rng(0)
    layers = []
    for packed in zip(*(data[name] for name in ("q", "k", "v", "out")), strict=True):
        q, k, v, out = (_pad(t, real) for t in packed)
        dout = _pad(rng.standard_normal(packed[3].shape), real)
        q, k, v, dout = (t.astype(dtype) for t in (q, k, v, dout))
        layers.append(Layer(q, k, v, real[:, None, None, :], dout, out))
    sentences = zip(lengths, data["sentences"], strict=True)
    about = [f"{data['model']}: {len(layers)} layers; {data['source']}"]
    return layers, about + [f"{n:3d} tokens: {text}" for n, text in sentences]


def _pad(packed: np.ndarray, real: np.ndarray) -> np.ndarray:
    """(T, H, D) of sentences laid end to end as (B, H, L, D), zeros where there is no token."""
    padded = np.zeros((*real.shape, *packed.shape[1:]), packed.dtype)
    padded[real] = packed
    return np.ascontiguousarray(padded.transpose(0, 2, 1, 3))


def expect(layer: Layer) -> Expected:
    """Attention by autograd in float64, and the contract's budgets."""
    x = {name: torch.from_numpy(getattr(layer, name)) for name in ("q", "k", "v", "mask", "dout")}
    q, k, v = (x[name].double().requires_grad_() for name in "qkv")
    scores = (q @ k.mT * q.shape[-1] ** -0.5).masked_fill(~x["mask"], -torch.inf)
    out = torch.softmax(scores, -1) @ v
    grads = torch.autograd.grad(out, (q, k, v), x["dout"].double())
    lse = torch.logsumexp(scores, -1)
    found = zip(("out", "lse", "dq", "dk", "dv"), (out, lse, *grads), strict=True)

    headers = {
        name: TensorHeader(str(x[name].dtype).removeprefix("torch."), tuple(x[name].shape))
        for name in ("q", "k", "v", "mask")
    }
    problem = resolve(AttentionSpec(), headers)
    allowed = expectations(problem, Inputs(**{name: x[name] for name in headers}), x["dout"])
    return Expected(
        {name: tensor.detach().numpy() for name, tensor in found},
        {name: e.budget for name, e in allowed.items()},
    )


def check(client: Client, number: int, layer: Layer) -> Iterator[Check]:
    """Send a layer forward and backward."""
    want = expect(layer)
    forward, trip_ms = _timed(
        lambda: client.attention(
            layer.q, layer.k, layer.v, mask=layer.mask, return_lse=True, save_for_backward=True
        )
    )
    error = _beyond_storage(forward.out, layer)
    yield Check(number, "model", "out", error, want.budget["out"], forward.meta, trip_ms)
    got = {"out": forward.out, "lse": forward.lse}
    yield Check(number, "float64", *_worst(got, want), forward.meta, trip_ms)

    backward, trip_ms = _timed(lambda: client.backward(forward, layer.dout, release=True))
    got = {"dq": backward.dq, "dk": backward.dk, "dv": backward.dv}
    yield Check(number, "float64", *_worst(got, want), backward.meta, trip_ms)


def _beyond_storage(out: np.ndarray, layer: Layer) -> float:
    """How far out is from the model's own at real tokens, less what float16 storage explains."""
    explained = np.spacing(np.abs(layer.out)).astype(np.float64) / 2
    beyond = np.abs(out.astype(np.float64) - layer.out.astype(np.float64)) - explained
    real = np.broadcast_to(layer.mask.swapaxes(2, 3), out.shape)
    return float(np.maximum(beyond, 0)[real].max())


def _worst(got: Mapping[str, np.ndarray], want: Expected) -> tuple[str, float, float]:
    """(name, error, budget) of the tensor that uses most of its budget; a NaN is worst of all."""
    rows = []
    for name, tensor in got.items():
        error = float(np.abs(tensor.astype(np.float64) - want.tensors[name]).max())
        rows.append((name, error, want.budget[name]))
    return max(rows, key=lambda row: np.inf if np.isnan(row[1]) else row[1] / row[2])


def _timed(call: Callable[[], T]) -> tuple[T, float]:
    start = time.perf_counter()
    return call(), (time.perf_counter() - start) * 1e3


def report(console: Console, checks: list[Check]) -> None:
    """Print the table, and what its rows say."""
    table = Table(box=None, header_style="bold", padding=(0, 1, 0, 0))
    for name in ("layer", "against", "worst", "error", "budget", "", "backend", "device"):
        table.add_column(name)
    table.add_column("compute ms", justify="right")
    table.add_column("trip ms", justify="right")
    for c in checks:
        table.add_row(
            str(c.layer),
            c.against,
            c.tensor,
            f"{c.error:.1e}",
            f"{c.budget:.1e}",
            "[green]ok[/]" if c.ok else "[bold red]over[/]",
            str(c.meta["backend"]),
            str(c.meta["device"]),
            f"{c.meta['timings_ms']['compute']:.2f}",
            f"{c.trip_ms:.1f}",
        )
    console.print(table)
    console.print(LEGEND, style="dim", highlight=False)


def run(console: Console, args: argparse.Namespace) -> int:
    """The whole demo; the exit status."""
    layers, about = load(args.data, args.dtype)
    console.print(*about, sep="\n", highlight=False)
    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn())
    checks: list[Check] = []
    with Progress(*columns, TimeElapsedColumn(), console=console, transient=True) as progress:
        task = progress.add_task("starting the service", total=len(layers))
        with connected(args) as (_, client):
            for number, layer in enumerate(layers):
                progress.update(task, description=f"layer {number}")
                checks += check(client, number, layer)
                progress.advance(task)
    report(console, checks)
    over = sum(not c.ok for c in checks)
    if over or not checks:
        console.print(f"[bold red]{over} of {len(checks)} checks over budget[/]")
        return 1
    share = max(c.error / c.budget for c in checks)
    console.print(
        f"[bold green]All {len(layers)} layers within budget[/], forward and backward; "
        f"the worst uses {share:.0%} of its own."
    )
    return 0


def main() -> int:
    """Parse the command line; turn failures into one line each."""
    parser = arguments(__doc__.splitlines()[0])
    parser.add_argument("--data", type=Path, default=DATA, help="what capture_minilm.py wrote")
    parser.add_argument("--dtype", choices=("float32", "float16"), default="float32")
    args = parser.parse_args()
    return exit_status(lambda console: run(console, args))


if __name__ == "__main__":
    sys.exit(main())
