"""Draw the figures of docs/algorithm.md: `.venv/bin/python docs/figures/make_figures.py`.

tiles.png    which tiles of the score matrix a kernel visits; from flashwire_kernels.geometry.Band
traffic.png  bytes moved and bytes kept over the length; from flashwire_kernels.plan
"""

from __future__ import annotations

from pathlib import Path

import matplotlib as mpl

mpl.use("Agg")
import matplotlib.pyplot as plt
import numpy as np
from matplotlib.axes import Axes
from matplotlib.colors import BoundaryNorm, ListedColormap
from matplotlib.patches import Patch, Rectangle
from matplotlib.ticker import FuncFormatter

from flashwire_kernels.geometry import Band
from flashwire_kernels.plan import SRAM_ELEMENTS, Plan, plan
from flashwire_kernels.types import AttentionSpec, TensorHeader
from flashwire_kernels.validation import resolve

HERE = Path(__file__).parent
INK, GREY = "#24292f", "#8c959f"
SKIPPED, WHOLE, MASKED = "#eef1f4", "#7fb2e5", "#f2a65a"
PLAIN, FLASH, LEAST = "#c8553d", "#1f6fb2", "#5b8c5a"

LENGTH, TILE = 96, 8
DIM = 128  # of traffic.png; elements are float16
PANELS = (
    ("causal", AttentionSpec(causal=True), LENGTH, LENGTH),
    ("causal, window=(31, 0)", AttentionSpec(causal=True, window=(31, 0)), LENGTH, LENGTH),
    ("causal, 40 queries, 96 keys", AttentionSpec(causal=True), 40, LENGTH),
)


def tile_states(spec: AttentionSpec, len_q: int, len_k: int) -> np.ndarray:
    """0 skipped, 1 whole, 2 masked, for every tile: (query blocks, key blocks)."""
    band = Band.of(spec, len_q, len_k)
    states = np.zeros((-(-len_q // TILE), -(-len_k // TILE)), dtype=int)
    for row in range(states.shape[0]):
        first, last = row * TILE, min((row + 1) * TILE, len_q)
        any_lo, any_hi = band.any_range(first, last, len_k)
        all_lo, all_hi = band.all_range(first, last, len_k)
        for column in range(states.shape[1]):
            lo, hi = column * TILE, min((column + 1) * TILE, len_k)
            if max(lo, any_lo) < min(hi, any_hi):
                states[row, column] = 1 if all_lo <= lo and hi <= all_hi else 2
    return states


def draw_tiles() -> None:
    figure, axes = plt.subplots(
        1, 3, figsize=(10.2, 4.3), gridspec_kw={"width_ratios": [1, 1, 1]}, layout="constrained"
    )
    for axis, (title, spec, len_q, len_k) in zip(axes, PANELS, strict=True):
        states = tile_states(spec, len_q, len_k)
        _draw_tiles_panel(axis, states, spec, len_q, len_k)
        counts = [int((states == state).sum()) for state in (1, 2, 0)]
        axis.set_title(
            f"{title}\n{counts[0]} whole, {counts[1]} masked, {counts[2]} skipped",
            fontsize=10,
            color=INK,
        )
    axes[0].set_ylabel("queries, in blocks of 8", fontsize=9, color=INK)
    figure.legend(
        handles=[
            Patch(facecolor=WHOLE, label="whole: every pair visible, no mask computed"),
            Patch(facecolor=MASKED, label="masked: the edge runs through it"),
            Patch(facecolor=SKIPPED, edgecolor=GREY, lw=0.5, label="skipped: never read"),
        ],
        loc="outside lower center",
        ncols=3,
        frameon=False,
        fontsize=9,
    )
    _save(figure, "tiles.png")


def _draw_tiles_panel(
    axis: Axes, states: np.ndarray, spec: AttentionSpec, len_q: int, len_k: int
) -> None:
    """Tiles as coloured squares, and over them a line along the edge of what is visible."""
    colours = ListedColormap([SKIPPED, WHOLE, MASKED])
    axis.imshow(
        states,
        cmap=colours,
        norm=BoundaryNorm([-0.5, 0.5, 1.5, 2.5], 3),
        extent=(0, len_k, len_q, 0),
        interpolation="nearest",
    )
    for row in range(states.shape[0]):
        for column in range(states.shape[1]):
            corner = (column * TILE, row * TILE)
            axis.add_patch(Rectangle(corner, TILE, TILE, fill=False, ec="white", lw=1.2))
    band = Band.of(spec, len_q, len_k)
    rows = np.arange(len_q)
    edges = np.array([band.any_range(i, i + 1, len_k) for i in rows])
    for edge in edges.T[0 if band.left is not None else 1 :]:
        axis.stairs(
            edge, np.arange(len_q + 1), orientation="horizontal", baseline=None, color=INK, lw=0.9
        )
    axis.set_xlim(0, len_k)
    axis.set_ylim(len_q, 0)
    axis.set_aspect("equal")
    axis.set_anchor("N")
    axis.set_xticks([0, len_k])
    axis.set_yticks([0, len_q])
    axis.set_xlabel("keys", fontsize=9, color=INK)
    _quiet(axis)


def draw_traffic() -> None:
    lengths = [2**n for n in range(8, 18)]
    plans = [_plan_of(n) for n in lengths]
    figure, (moved, kept) = plt.subplots(1, 2, figsize=(10.2, 4.1), layout="constrained")
    score_bytes = np.array([p.bytes_materialised_s for p in plans])
    least = np.array([p.bytes_min for p in plans])
    keys_and_values = np.array([2 * n * DIM * 2 for n in lengths])
    passes = np.array([-(-n // (SRAM_ELEMENTS // (2 * DIM))) for n in lengths])
    flash = least + (passes - 1) * keys_and_values
    _line(moved, lengths, 4 * score_bytes + least, PLAIN, "plain: S and P, each written and read")
    _line(moved, lengths, flash, FLASH, "flash: K and V read once per block of queries")
    _line(moved, lengths, least, LEAST, "least possible: inputs once, out and lse once")
    moved.set_title("bytes moved by a forward", fontsize=10, color=INK)
    _line(kept, lengths, score_bytes, PLAIN, "plain: P")
    _line(kept, lengths, [p.bytes_out_lse for p in plans], FLASH, "flash: out and lse")
    kept.set_title("bytes kept for the backward, beside q, k, v", fontsize=10, color=INK)
    for axis in (moved, kept):
        axis.set_xlabel(f"length N (one head, D = {DIM}, float16)", fontsize=9, color=INK)
        axis.set_xscale("log", base=2)
        axis.set_yscale("log", base=2)
        axis.set_ylim(2**15, 2**39)
        axis.set_xticks(lengths[::3], [f"{n:,}" for n in lengths[::3]])
        axis.set_yticks([2**n for n in range(16, 39, 4)])
        axis.yaxis.set_major_formatter(FuncFormatter(lambda b, _: _size(b)))
        axis.minorticks_off()
        axis.grid(color="#e4e8ec", lw=0.8)
        axis.legend(frameon=False, fontsize=9, loc="upper left")
        _quiet(axis)
    _save(figure, "traffic.png")


def _plan_of(length: int) -> Plan:
    header = TensorHeader("float16", (length, DIM))
    return plan(
        resolve(AttentionSpec(), {"q": header, "k": header, "v": header}),
        sram_elements=SRAM_ELEMENTS,
    )


def _line(axis: Axes, x: list[int], y: object, colour: str, label: str) -> None:
    axis.plot(x, y, color=colour, lw=1.8, marker="o", ms=3.5, label=label)


def _size(size: float) -> str:
    for unit in ("B", "KiB", "MiB"):
        if size < 1024:
            return f"{size:g} {unit}"
        size /= 1024
    return f"{size:g} GiB"


def _quiet(axis: Axes) -> None:
    axis.tick_params(labelsize=8, colors=INK, length=0)
    for spine in axis.spines.values():
        spine.set_visible(False)


def _save(figure: plt.Figure, name: str) -> None:
    figure.savefig(HERE / name, dpi=130, metadata={"Software": None})
    plt.close(figure)
    print(f"{name}: {(HERE / name).stat().st_size} bytes")


if __name__ == "__main__":
    draw_tiles()
    draw_traffic()
