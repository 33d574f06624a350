"""Train a small transformer whose every attention runs on a server, beside its local twin.

Two copies of a character-level language model start from the same weights and see the same batches.
One attends in process, by PyTorch's scaled_dot_product_attention; the other over the wire, forward
and backward, by flashwire.torch.flash_attention. Both learn; their losses must stay together, and
the server must have let go of all it saved for backward. The loss curves become a picture.

A server on a CPU computes with PyTorch's own operator where it can: then losses may be the same to
the bit. `--backend reference` computes attention in float64, and they are not.

The text is the Declaration of Independence of the United States (1776; public domain) without its
signatures and one of its grievances. Exits 0 when the losses differ by less than --tolerance at
every step and nothing is left on the server, else 1.
"""

from __future__ import annotations

import argparse
import copy
import os
import re
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

import httpx
import matplotlib.pyplot as plt
import torch
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn
from torch import nn
from torch.nn.functional import cross_entropy, scaled_dot_product_attention

from flashwire import Client
from flashwire.torch import flash_attention
from serving import ExampleError, arguments, connected, exit_status

TEXT = Path(__file__).parent / "data" / "declaration.txt"
WIDTH, HEADS, LAYERS, CONTEXT, BATCH, RATE = 64, 4, 2, 64, 8, 1e-3
Attend = Callable[[torch.Tensor, torch.Tensor, torch.Tensor], torch.Tensor]


class Block(nn.Module):
    """Attention and a perceptron, each added to its input, as in GPT-2."""

    def __init__(self) -> None:
        super().__init__()
        self.before, self.between = nn.LayerNorm(WIDTH), nn.LayerNorm(WIDTH)
        self.qkv, self.out = nn.Linear(WIDTH, 3 * WIDTH), nn.Linear(WIDTH, WIDTH)
        self.mlp = nn.Sequential(
            nn.Linear(WIDTH, 4 * WIDTH), nn.GELU(), nn.Linear(4 * WIDTH, WIDTH)
        )

    def forward(self, x: torch.Tensor, attend: Attend) -> torch.Tensor:
        split = self.qkv(self.before(x)).unflatten(-1, (3, HEADS, -1))  # (B, L, 3, H, D)
        q, k, v = split.permute(2, 0, 3, 1, 4)  # (B, H, L, D) each
        x = x + self.out(attend(q, k, v).transpose(1, 2).flatten(2))
        return x + self.mlp(self.between(x))


class Model(nn.Module):
    """(B, L) characters to (B, L, vocabulary) logits of the next ones."""

    def __init__(self, vocabulary: int) -> None:
        super().__init__()
        self.characters = nn.Embedding(vocabulary, WIDTH)
        self.positions = nn.Embedding(CONTEXT, WIDTH)
        self.blocks = nn.ModuleList(Block() for _ in range(LAYERS))
        self.head = nn.Sequential(nn.LayerNorm(WIDTH), nn.Linear(WIDTH, vocabulary))

    def forward(self, x: torch.Tensor, attend: Attend) -> torch.Tensor:
        h = self.characters(x) + self.positions.weight[: x.shape[1]]
        for block in self.blocks:
            h = block(h, attend)
        return self.head(h)


@dataclass
class Learner:
    """A model in training: the loss and the seconds of each step so far."""

    model: Model
    attend: Attend
    losses: list[float] = field(default_factory=list)
    seconds: list[float] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.optimizer = torch.optim.AdamW(self.model.parameters(), RATE)

    def step(self, batch: torch.Tensor) -> None:
        start = time.perf_counter()
        logits = self.model(batch[:, :-1], self.attend)
        loss = cross_entropy(logits.flatten(0, 1), batch[:, 1:].flatten())
        self.optimizer.zero_grad()
        loss.backward()
        self.optimizer.step()
        self.losses.append(loss.item())
        self.seconds.append(time.perf_counter() - start)


def learners(client: Client, backend: Any, vocabulary: int) -> tuple[Learner, Learner]:
    """The local and the remote one, with the same weights."""
    torch.manual_seed(0)
    model = Model(vocabulary)
    remote = partial(flash_attention, client=client, causal=True, backend=backend)
    local = Learner(copy.deepcopy(model), partial(scaled_dot_product_attention, is_causal=True))
    return local, Learner(model, remote)


def saved_bytes(url: str) -> int:
    """What the server keeps for backward passes, by its own metrics, over all its workers."""
    key = os.environ.get("FLASHWIRE_API_KEY")
    headers = {"authorization": f"Bearer {key}"} if key else {}
    said = httpx.get(f"{url}/metrics", headers=headers).raise_for_status().text
    found = re.findall(r"^flashwire_residual_bytes(?:{.*})? (\S+)$", said, re.MULTILINE)
    if not found:
        raise ExampleError("the server's metrics do not say what it keeps")
    return int(sum(map(float, found)))


def draw(path: Path, local: Learner, remote: Learner) -> None:
    """Both curves, and below them how far they are apart."""
    figure, (curves, apart) = plt.subplots(
        2, sharex=True, height_ratios=(3, 1), figsize=(7, 5), layout="constrained"
    )
    steps = range(1, len(local.losses) + 1)
    curves.plot(steps, local.losses, color="#9ecae1", linewidth=6, label="attention in process")
    curves.plot(steps, remote.losses, color="#08306b", linewidth=1.2, label="attention on a server")
    curves.set_ylabel("loss, nats per character")
    curves.legend()
    differences = [abs(a - b) for a, b in zip(local.losses, remote.losses, strict=True)]
    apart.plot(steps, differences, color="#a50f15", linewidth=1)
    apart.set_yscale("symlog", linthresh=1e-8)
    apart.set_ylim(bottom=0)
    apart.set_ylabel("|difference|")
    apart.set_xlabel("step")
    figure.savefig(path, dpi=120)
    plt.close(figure)


def train(console: Console, args: argparse.Namespace, client: Client) -> tuple[Learner, Learner]:
    text = TEXT.read_text(encoding="utf-8")
    alphabet = sorted(set(text))
    data = torch.tensor([alphabet.index(c) for c in text])
    local, remote = learners(client, args.backend, len(alphabet))
    size = sum(p.numel() for p in local.model.parameters())
    console.print(
        f"{len(text)} characters; a model of {size:,} parameters, {LAYERS} layers of {HEADS} "
        f"heads; {BATCH} x {CONTEXT} characters a step, float32"
    )
    draws = torch.Generator().manual_seed(1)
    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn())
    with Progress(*columns, TimeElapsedColumn(), console=console, transient=True) as progress:
        task = progress.add_task("training", total=args.steps)
        for _ in range(args.steps):
            begins = torch.randint(len(data) - CONTEXT, (BATCH,), generator=draws)
            batch = torch.stack([data[i : i + CONTEXT + 1] for i in begins])
            for learner in (local, remote):
                learner.step(batch)
            loss = remote.losses[-1]
            progress.update(task, advance=1, description=f"training, loss {loss:.3f}")
    return local, remote


def run(console: Console, args: argparse.Namespace) -> int:
    """The whole example; the exit status."""
    torch.set_num_threads(1)  # idle threads of a local server's client spin, and take its cores
    plt.switch_backend("agg")  # a file, no window
    with connected(args) as (url, client):
        local, remote = train(console, args, client)
        left = saved_bytes(url)
    draw(args.plot, local, remote)
    apart = max(abs(a - b) for a, b in zip(local.losses, remote.losses, strict=True))
    for name, learner in (("local", local), ("remote", remote)):
        middle = sorted(learner.seconds)[len(learner.seconds) // 2]
        console.print(
            f"{name:6}  loss {learner.losses[0]:.4f} -> {learner.losses[-1]:.4f}"
            f"   {middle * 1e3:.0f} ms a step"
        )
    console.print(f"apart by at most {apart:.1e} in {args.steps} steps; allowed: {args.tolerance}")
    console.print(f"kept on the server for backward: {left} bytes")
    console.print(f"curves: {args.plot}", highlight=False)
    good = apart < args.tolerance and left == 0
    console.print("[bold green]the same training[/]" if good else "[bold red]not the same[/]")
    return 0 if good else 1


def main() -> int:
    """Parse the command line; turn failures into one line each."""
    parser = arguments(__doc__.splitlines()[0])
    parser.add_argument("--steps", type=int, default=100)
    parser.add_argument("--backend", help="of the service; reference computes in float64")
    parser.add_argument("--tolerance", type=float, default=1e-4)
    parser.add_argument("--plot", type=Path, default=Path("loss.png"), help="the picture to write")
    args = parser.parse_args()
    return exit_status(lambda console: run(console, args))


if __name__ == "__main__":
    sys.exit(main())
