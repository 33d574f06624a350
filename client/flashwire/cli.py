"""`flashwire`: ask a server from the command line.

Exit codes: 0 done and within budget, 1 a check is over budget, 2 wrong usage, 3 the server refused
or could not be reached. What went wrong is one line on stderr.
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import os
import statistics
import sys
import time
from collections.abc import Iterable, Sequence
from typing import Any

import numpy as np

from flashwire._version import __version__
from flashwire.client import Client
from flashwire.errors import FlashwireError
from flashwire.results import CheckReport
from flashwire.tensors import dtype_name, pack

OK, OVER_BUDGET, USAGE, FAILED, INTERRUPTED = 0, 1, 2, 3, 130
_FORWARD = ("q", "k", "v", "mask", "bias", "alibi_slopes", "sinks", "cu_seqlens_q", "cu_seqlens_k")
_MINE = ("out", "lse", "dq", "dk", "dv")


def main(argv: Sequence[str] | None = None) -> int:
    """Run one command; the exit code."""
    arguments = _parser().parse_args(argv)
    try:
        with Client(
            arguments.url, api_key=arguments.api_key or None, timeout=arguments.timeout
        ) as client:
            code: int = arguments.run(client, arguments)
    except (FlashwireError, OSError, ValueError) as exc:
        print(f"flashwire: {' '.join(str(exc).split())}", file=sys.stderr)
        return FAILED if isinstance(exc, FlashwireError) else USAGE
    except KeyboardInterrupt:
        return INTERRUPTED
    return code


def info(client: Client, arguments: argparse.Namespace) -> int:
    """What the server is, as JSON."""
    print(json.dumps(client.info(), indent=2))
    return OK


def plan(client: Client, arguments: argparse.Namespace) -> int:
    """What an attention of given shapes would cost."""
    planned = client.plan(
        arguments.q,
        arguments.k,
        arguments.v,
        dtype=arguments.dtype,
        sram_elements=arguments.sram_elements,
        **_options(arguments),
    )
    values = dataclasses.asdict(planned)
    if arguments.json:
        print(json.dumps(values, indent=2))
    else:
        _print_table([(name, _cell(value)) for name, value in values.items()])
    return OK


def check(client: Client, arguments: argparse.Namespace) -> int:
    """Compare backends, or results of one's own, with the reference."""
    case = _load(arguments.npz) if arguments.npz else _random_case(arguments)
    if arguments.grad and "dout" not in case:
        case["dout"] = _random_dout(case, arguments)
    mine = {name: case.pop(name) for name in _MINE if name in case}
    report = client.check(
        **case,
        mine=mine or None,
        backends=arguments.backends,
        dtype=arguments.dtype,
        **_options(arguments),
    )
    _print_report(report)
    return OK if report.passed else OVER_BUDGET


def bench(client: Client, arguments: argparse.Namespace) -> int:
    """Time one attention, over and over: medians."""
    case = _random_case(arguments)
    options = _options(arguments)
    result = client.attention(**case, dtype=arguments.dtype, **options)
    moved = sum(
        pack(name, x, dtype_name(arguments.dtype)).header.nbytes for name, x in case.items()
    )
    moved += pack("out", result.out).header.nbytes
    whole, server = [], []
    for _ in range(arguments.repeat):
        start = time.perf_counter()
        result = client.attention(**case, dtype=arguments.dtype, **options)
        whole.append((time.perf_counter() - start) * 1e3)
        server.append(float(result.meta.get("timings_ms", {}).get("compute", "nan")))
    median = statistics.median(whole)
    _print_table(
        [
            ("backend", str(result.meta.get("backend", "?"))),
            ("requests", str(len(whole))),
            ("median ms", f"{median:.3f}"),
            ("best ms", f"{min(whole):.3f}"),
            ("compute ms", f"{statistics.median(server):.3f}"),
            ("payload MB", f"{moved / 1e6:.3f}"),
            ("MB/s", f"{moved / 1e3 / median:.1f}"),
        ]
    )
    return OK


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="flashwire", description="Ask a flashwire server.")
    parser.add_argument("--version", action="version", version=f"flashwire {__version__}")
    common = argparse.ArgumentParser(add_help=False)
    common.add_argument(
        "--url",
        default=os.environ.get("FLASHWIRE_URL", "http://127.0.0.1:8000"),
        help="the server (FLASHWIRE_URL), %(default)s",
    )
    common.add_argument(
        "--api-key", default=os.environ.get("FLASHWIRE_API_KEY"), help="key (FLASHWIRE_API_KEY)"
    )
    common.add_argument("--timeout", type=float, default=60.0, help="seconds, %(default)s")
    commands = parser.add_subparsers(required=True, metavar="COMMAND")
    _add(commands, "info", info, common)
    planning = _add(commands, "plan", plan, common, _spec_parser("float16"))
    planning.add_argument("--q", type=_shape, required=True, metavar="B,H,L,D")
    planning.add_argument("--k", type=_shape, metavar="B,H,L,D", help="default: q's")
    planning.add_argument("--v", type=_shape, metavar="B,H,L,D", help="default: q's")
    planning.add_argument("--sram-elements", type=int, help="elements of fast memory")
    planning.add_argument("--json", action="store_true", help="print JSON")
    checking = _add(commands, "check", check, common, _spec_parser("float32"), _case_parser())
    checking.add_argument(
        "--npz", help="arrays by name: q, k, v, mask, ..., dout, out, lse, dq, ..."
    )
    checking.add_argument("--grad", action="store_true", help="check gradients too")
    checking.add_argument("--backends", nargs=2, metavar=("A", "B"), help="the two to compare")
    benching = _add(commands, "bench", bench, common, _spec_parser("float32"), _case_parser())
    benching.add_argument("--repeat", type=_positive, default=20, help="requests, %(default)s")
    return parser


def _add(
    commands: Any, name: str, run: Any, *parents: argparse.ArgumentParser
) -> argparse.ArgumentParser:
    parser: argparse.ArgumentParser = commands.add_parser(
        name, help=run.__doc__, description=run.__doc__, parents=parents
    )
    parser.set_defaults(run=run)
    return parser


def _spec_parser(dtype: str) -> argparse.ArgumentParser:
    """Options of an attention; those not given are left out of the request."""
    parser = argparse.ArgumentParser(add_help=False, argument_default=argparse.SUPPRESS)
    parser.add_argument("--dtype", default=dtype, help="of q, k and v, %(default)s")
    group = parser.add_argument_group("attention")
    group.add_argument("--scale", type=float)
    group.add_argument("--causal", action="store_true")
    group.add_argument("--causal-align", choices=("bottom_right", "top_left"))
    group.add_argument("--window", type=_window, metavar="LEFT,RIGHT", help="empty: an open end")
    group.add_argument("--softcap", type=float)
    group.add_argument("--dropout", type=float)
    group.add_argument("--seed", type=int, help="of dropout")
    group.add_argument("--layout", choices=("bhld", "blhd"))
    group.add_argument("--precision", choices=("ieee", "tf32"))
    group.add_argument("--backend", choices=("auto", "reference", "cpu", "triton"))
    return parser


def _case_parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(add_help=False)
    group = parser.add_argument_group("random case")
    group.add_argument("--shape", type=_shape, default=(1, 8, 256, 64), metavar="B,H,L,D")
    group.add_argument("--kv-heads", type=_positive, help="heads of k and v, default H")
    group.add_argument("--kv-length", type=_positive, help="length of k and v, default L")
    group.add_argument("--case-seed", type=int, default=0, help="of the values, %(default)s")
    return parser


def _options(arguments: argparse.Namespace) -> dict[str, Any]:
    names = (
        "scale", "causal", "causal_align", "window", "softcap", "dropout", "seed", "layout",
        "precision", "backend",
    )  # fmt: skip
    given = vars(arguments)
    return {name: given[name] for name in names if name in given}


def _random_case(arguments: argparse.Namespace) -> dict[str, Any]:
    if len(arguments.shape) != 4:
        raise ValueError("--shape has four numbers: B,H,L,D")
    batch, heads, length, dim = arguments.shape
    kv = (batch, arguments.kv_heads or heads, arguments.kv_length or length, dim)
    rng = np.random.default_rng(arguments.case_seed)
    shapes = {"q": (batch, heads, length, dim), "k": kv, "v": kv}
    if getattr(arguments, "layout", None) == "blhd":
        shapes = {name: (b, n, h, d) for name, (b, h, n, d) in shapes.items()}
    return {name: rng.standard_normal(s, np.float32) for name, s in shapes.items()}


def _random_dout(case: dict[str, Any], arguments: argparse.Namespace) -> Any:
    rng = np.random.default_rng((arguments.case_seed, 1))
    return rng.standard_normal((*case["q"].shape[:-1], case["v"].shape[-1]), np.float32)


def _load(path: str) -> dict[str, Any]:
    with np.load(path, allow_pickle=False) as archive:
        case = {name: archive[name] for name in archive.files}
    unknown = set(case) - {*_FORWARD, *_MINE, "dout"}
    if unknown or not {"q", "k", "v"} <= set(case):
        names = ", ".join(sorted(unknown)) or "no q, k or v"
        raise ValueError(f"{path}: {names}; known: {', '.join((*_FORWARD, 'dout', *_MINE))}")
    return case


def _print_report(report: CheckReport) -> None:
    rows = [("tensor", "max abs", "rel", "budget", "worst", "")]
    for name, found in report.tensors.items():
        worst = "" if found.worst is None else _worst(found.worst.index, found.worst)
        verdict = "ok" if found.passed else "OVER"
        numbers = (f"{x:.3g}" for x in (found.max_abs, found.rel, found.budget))
        rows.append((name, *numbers, worst, verdict))  # type: ignore[arg-type]
    _print_table(rows)


def _worst(index: Iterable[int], worst: Any) -> str:
    return f"{list(index)}: {worst.got:.7g}, not {worst.want:.7g}"


def _print_table(rows: Sequence[tuple[str, ...]]) -> None:
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    for row in rows:
        cells = (cell.ljust(width) for cell, width in zip(row, widths, strict=True))
        print("  ".join(cells).rstrip())


def _cell(value: Any) -> str:
    if isinstance(value, float):
        return f"{value:.6g}"
    return f"{value:,}" if isinstance(value, int) else json.dumps(value)


def _shape(text: str) -> tuple[int, ...]:
    return tuple(int(part) for part in text.split(","))


def _window(text: str) -> tuple[int | None, int | None]:
    left, right = (int(part) if part else None for part in text.split(","))
    return left, right


def _positive(text: str) -> int:
    if int(text) < 1:
        raise argparse.ArgumentTypeError(f"must be at least 1, got {text}")
    return int(text)
