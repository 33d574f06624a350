"""The cpu backend beside F.scaled_dot_product_attention and materialised attention, in one run.

    python bench/cpu.py [--quick]

Each ratio is the median of pairs run one after the other, so that whatever else the machine does
falls on both. Above 1 the cpu backend is the faster. Waiting threads sleep, as in a worker of the
service: spinning, they would take the cores from whatever else runs.
"""

import argparse
import os
import platform
import statistics
import time
from collections.abc import Callable
from dataclasses import dataclass

os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")  # read when torch is loaded

import torch
from torch.nn.functional import scaled_dot_product_attention

from flashwire_kernels import AttentionSpec, api

HEADS = 8
LENGTHS, DIMS = (512, 1024, 4096), (64, 128)
WINDOW = 256
Tensors = tuple[torch.Tensor, torch.Tensor, torch.Tensor]
Attention = Callable[[torch.Tensor, torch.Tensor, torch.Tensor], torch.Tensor]


@dataclass(frozen=True)
class Kind:
    """One kind of attention, by each of the three."""

    name: str
    spec: AttentionSpec

    def hidden(self, length: int) -> torch.Tensor | None:
        """Boolean (length, length), True = hidden."""
        if not self.spec.causal:
            return None
        ones = torch.ones(length, length, dtype=torch.bool)
        hidden = ones.triu(1)
        if self.spec.window is not None and self.spec.window[0] is not None:
            hidden |= ones.tril(-self.spec.window[0] - 1)
        return hidden

    def sdpa(self, hidden: torch.Tensor | None) -> Attention:
        if self.spec.window is not None and hidden is not None:
            visible = ~hidden
            return lambda q, k, v: scaled_dot_product_attention(q, k, v, attn_mask=visible)
        causal = self.spec.causal
        return lambda q, k, v: scaled_dot_product_attention(q, k, v, is_causal=causal)

    def materialised(self, hidden: torch.Tensor | None) -> Attention:
        def attention(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
            s = (q @ k.mT) * q.shape[-1] ** -0.5
            if hidden is not None:
                s = s.masked_fill(hidden, float("-inf"))
            return s.softmax(-1) @ v

        return attention


KINDS = (
    Kind("dense", AttentionSpec()),
    Kind("causal", AttentionSpec(causal=True)),
    Kind(f"window {WINDOW}", AttentionSpec(causal=True, window=(WINDOW - 1, 0))),
)


def forward_and_backward(attention: Attention, tensors: Tensors, dout: torch.Tensor) -> None:
    leaves = [t.detach().requires_grad_() for t in tensors]
    torch.autograd.grad(attention(*leaves), leaves, dout)


def seconds(run: Callable[[], object]) -> float:
    start = time.perf_counter()
    run()
    return time.perf_counter() - start


def compare(mine: Callable[[], object], other: Callable[[], object], budget: float):
    """(median seconds of mine, of other, median of other / mine) from interleaved pairs."""
    mine()
    other()
    once = seconds(mine) + seconds(other)
    pairs = [(seconds(mine), seconds(other)) for _ in range(max(3, min(50, int(budget / once))))]
    ratio = statistics.median(b / a for a, b in pairs)
    return statistics.median(a for a, _ in pairs), statistics.median(b for _, b in pairs), ratio


def row(kind: Kind, length: int, dim: int, backward: bool, budget: float) -> str:
    generator = torch.Generator().manual_seed(0)
    q, k, v, dout = (torch.randn(1, HEADS, length, dim, generator=generator) for _ in range(4))
    hidden = kind.hidden(length)
    runs = []
    if backward:

        def mine() -> object:
            f = api.forward(q, k, v, spec=kind.spec, backend="cpu")
            return api.backward(dout, q, k, v, out=f.out, lse=f.lse, spec=kind.spec, backend="cpu")

        runs = [
            lambda other=other: forward_and_backward(other, (q, k, v), dout)
            for other in (kind.sdpa(hidden), kind.materialised(hidden))
        ]
    else:

        def mine() -> object:
            return api.forward(q, k, v, spec=kind.spec, backend="cpu")

        runs = [
            lambda other=other: other(q, k, v)
            for other in (kind.sdpa(hidden), kind.materialised(hidden))
        ]
    cpu, sdpa, over_sdpa = compare(mine, runs[0], budget)
    _, materialised, over_materialised = compare(mine, runs[1], budget)
    what = "fwd+bwd" if backward else "fwd"
    return (
        f"{kind.name:11} {length:5} {dim:4}  {what:7} {cpu * 1e3:9.2f} {sdpa * 1e3:9.2f} "
        f"{materialised * 1e3:12.2f} {over_sdpa:8.2f} {over_materialised:14.2f}"
    )


def processor() -> str:
    """The processor's name, where Linux tells it."""
    try:
        with open("/proc/cpuinfo", encoding="utf-8") as lines:
            names = [line.partition(":")[2].strip() for line in lines if "model name" in line]
    except OSError:
        names = []
    return names[0] if names else platform.machine()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--quick", action="store_true", help="fewer repeats, no L=4096")
    quick = parser.parse_args().quick
    print(f"{processor()}, {os.cpu_count()} cores", end="; ")
    print(f"torch {torch.__version__}, {torch.get_num_threads()} threads", end="; ")
    print(f"float32, B=1, H={HEADS}, medians in ms; ratios: other / cpu")
    print(
        f"{'kind':11} {'L':>5} {'D':>4}  {'what':7} {'cpu':>9} {'sdpa':>9} {'materialised':>12} "
        f"{'vs sdpa':>8} {'vs materialised':>14}"
    )
    for kind in KINDS:
        for length in LENGTHS[:2] if quick else LENGTHS:
            for dim in DIMS:
                for backward in (False, True):
                    print(row(kind, length, dim, backward, 0.2 if quick else 2.0), flush=True)


if __name__ == "__main__":
    main()
