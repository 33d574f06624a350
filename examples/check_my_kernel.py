"""Check an attention kernel of your own, outputs and gradients, against a server.

The kernel here is flash attention in NumPy: tiles of keys, an online softmax, and a backward that
recomputes the weights from lse. Put yours in its place: in JAX, MLX, Rust, WebGPU, whatever can
hand over arrays. The server compares with float64, and judges by the error budget of the contract.

Then the same kernel with a mistake that is easily made, and easily missed by a test of one tile:
sums are not scaled down when a later tile brings a larger maximum. It must be caught.

Exits 0 when the right one passes and the wrong one does not, else 1.
"""

from __future__ import annotations

import argparse
import sys

import numpy as np
from rich.console import Console

from flashwire import Client
from serving import arguments, connected, exit_status

TILE = 16
SHAPE = (2, 4, 50, 24)  # B, Hq, L, D: no multiple of a tile
KEY_HEADS = 2


def forward(
    q: np.ndarray, k: np.ndarray, v: np.ndarray, *, rescale: bool = True
) -> tuple[np.ndarray, np.ndarray]:
    """out (B, H, L, D) and lse (B, H, L) of causal attention, one tile of keys after another."""
    scale = np.float32(q.shape[-1] ** -0.5)
    rows = np.arange(q.shape[2])[:, None]
    top = np.full(q.shape[:3], -np.inf, q.dtype)
    total, out = np.zeros_like(top), np.zeros_like(q)
    for begin in range(0, k.shape[2], TILE):
        keys = slice(begin, min(begin + TILE, k.shape[2]))
        s = scale * q @ k[:, :, keys].swapaxes(2, 3)
        s = np.where(np.arange(keys.start, keys.stop) <= rows, s, -np.inf)
        higher = np.maximum(top, s.max(-1))
        p = np.exp(s - higher[..., None])
        shrink = np.exp(top - higher) if rescale else np.ones_like(top)
        total = total * shrink + p.sum(-1)
        out = out * shrink[..., None] + p @ v[:, :, keys]
        top = higher
    return out / total[..., None], top + np.log(total)


def backward(
    q: np.ndarray, k: np.ndarray, v: np.ndarray,
    out: np.ndarray, lse: np.ndarray, dout: np.ndarray,
) -> tuple[np.ndarray, np.ndarray, np.ndarray]:  # fmt: skip
    """dq, dk, dv from what the forward gave; weights are computed again from lse."""
    scale = np.float32(q.shape[-1] ** -0.5)
    s = np.where(np.tri(q.shape[2], dtype=bool), scale * q @ k.swapaxes(2, 3), -np.inf)
    p = np.exp(s - lse[..., None])
    ds = p * (dout @ v.swapaxes(2, 3) - (dout * out).sum(-1, keepdims=True)) * scale
    return ds @ k, ds.swapaxes(2, 3) @ q, p.swapaxes(2, 3) @ dout


def my_kernel(
    q: np.ndarray, k: np.ndarray, v: np.ndarray, dout: np.ndarray, *, rescale: bool = True
) -> dict[str, np.ndarray]:
    """Everything that can be checked. Heads of q that share one of k add up their gradients."""
    group = q.shape[1] // k.shape[1]
    keys, values = (np.repeat(x, group, 1) for x in (k, v))
    out, lse = forward(q, keys, values, rescale=rescale)
    dq, dk, dv = backward(q, keys, values, out, lse, dout)
    dk, dv = (x.reshape(*k.shape[:2], group, *k.shape[2:]).sum(2) for x in (dk, dv))
    return {"out": out, "lse": lse, "dq": dq, "dk": dk, "dv": dv}


def run(console: Console, args: argparse.Namespace) -> int:
    """Both checks; the exit status."""
    rng = np.random.default_rng(0)
    shapes = [(SHAPE[0], heads, *SHAPE[2:]) for heads in (SHAPE[1], KEY_HEADS, KEY_HEADS, SHAPE[1])]
    q, k, v, dout = (rng.standard_normal(shape, np.float32) for shape in shapes)
    with connected(args) as (_, client):
        right = _judge(console, client, "my kernel", (q, k, v, dout), rescale=True)
        wrong = _judge(console, client, "without rescaling", (q, k, v, dout), rescale=False)
    if right and not wrong:
        console.print("[bold green]The kernel passes, and its mistake is caught.[/]")
        return 0
    said = "The mistake went unnoticed." if right else "The kernel is over budget."
    console.print(f"[bold red]{said}[/]")
    return 1


def _judge(
    console: Console, client: Client, name: str, tensors: tuple[np.ndarray, ...], *, rescale: bool
) -> bool:
    """Print the server's report on a kernel, and whether it passed."""
    q, k, v, dout = tensors
    mine = my_kernel(q, k, v, dout, rescale=rescale)
    report = client.check(q, k, v, causal=True, mine=mine, dout=dout)
    console.print(f"{name}:", style="bold")
    console.print(str(report), markup=False, highlight=False, soft_wrap=True)
    if not report.passed:
        tensor, found = max(report.tensors.items(), key=lambda item: item[1].used)
        where = ", ".join(map(str, found.worst.index))
        console.print(
            f"worst: {tensor}[{where}] is {found.worst.got:.6g}, and should be "
            f"{found.worst.want:.6g}: {found.used:,.0f} times its budget",
            markup=False, highlight=False, soft_wrap=True,
        )  # fmt: skip
    return report.passed


def main() -> int:
    """Parse the command line; turn failures into one line each."""
    args = arguments(__doc__.splitlines()[0]).parse_args()
    return exit_status(lambda console: run(console, args))


if __name__ == "__main__":
    sys.exit(main())
