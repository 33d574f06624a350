"""`flashwire`: ask a server from the command line.

Exit codes are those of `_EXITS`. What went wrong is one line on stderr.
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import os
import re
import statistics
import sys
import time
from collections.abc import Sequence
from typing import Any

import numpy as np

from flashwire._version import __version__
from flashwire.client import Client
from flashwire.errors import FlashwireError
from flashwire.results import table
from flashwire.tensors import dtype_name, pack
from flashwire.wire import nearest

OK, OVER_BUDGET, USAGE, FAILED, INTERRUPTED, BROKEN_PIPE = 0, 1, 2, 3, 130, 141
_EXITS = (
    "Exit codes: 0 done and within budget, 1 a check is over budget, 2 wrong usage, "
    "3 the server refused or could not be reached."
)
_OPTIONS = (
    "scale", "causal", "causal_align", "window", "softcap", "dropout", "seed", "layout",
    "precision", "backend",
)  # fmt: skip
_FORWARD = ("q", "k", "v", "mask", "bias", "alibi_slopes", "sinks", "cu_seqlens_q", "cu_seqlens_k")
_MINE = ("out", "lse", "dq", "dk", "dv")


def main(argv: Sequence[str] | None = None) -> int:
    """Run one command; the exit code."""
    arguments = _parse(sys.argv[1:] if argv is None else argv)
    try:
        with Client(
            arguments.url, api_key=arguments.api_key or None, timeout=arguments.timeout
        ) as client:
            code: int = arguments.run(client, arguments)
        sys.stdout.flush()
    except BrokenPipeError:  # as in `flashwire info | head`
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())  # the last flush is no error
        return BROKEN_PIPE
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
        print(table([(name, _cell(value)) for name, value in values.items()]))
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
    print(report)
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
    shapes = (f"{name} {'x'.join(map(str, x.shape))}" for name, x in case.items())
    print(
        table(
            [
                ("shape", ", ".join(shapes)),
                ("dtype", dtype_name(arguments.dtype)),
                ("backend", str(result.meta.get("backend", "?"))),
                ("requests", str(len(whole))),
                ("median ms", f"{median:.3f}"),
                ("best ms", f"{min(whole):.3f}"),
                ("compute ms", f"{statistics.median(server):.3f}"),
                ("payload MB", f"{moved / 1e6:.3f}"),
                ("MB/s", f"{moved / 1e3 / median:.1f}"),
            ]
        )
    )
    return OK


def _parse(argv: Sequence[str]) -> argparse.Namespace:
    """The command line; a wrong one ends the process. An unknown flag gets a hint."""
    arguments, rest = _parser().parse_known_args(_joined(argv))
    if rest:
        flag = rest[0].partition("=")[0].lstrip("-").replace("-", "_")
        known = (action.dest for action in arguments.parser._actions)
        hint = nearest(flag, known).replace("_", "-")
        arguments.parser.error(f"unknown: {' '.join(rest)}{hint}")
    return arguments


def _joined(argv: Sequence[str]) -> list[str]:
    """`--window -1,0` as `--window=-1,0`: argparse would take such a value for a flag."""
    joined: list[str] = []
    for word in argv:
        if joined and re.match(r"-[\d.,]", word) and re.fullmatch(r"--[a-z-]+", joined[-1]):
            joined[-1] += f"={word}"
        else:
            joined.append(word)
    return joined


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="flashwire", description="Ask a flashwire server.", epilog=_EXITS
    )
    parser.add_argument("--version", action="version", version=f"flashwire {__version__}")
    common = argparse.ArgumentParser(add_help=False)
    common.add_argument(
        "--url",
        default=os.environ.get("FLASHWIRE_URL", "http://127.0.0.1:8000"),
        help="the server; default: FLASHWIRE_URL, now %(default)s",
    )
    common.add_argument(
        "--api-key",
        metavar="KEY",
        default=os.environ.get("FLASHWIRE_API_KEY"),
        help="default: FLASHWIRE_API_KEY",
    )
    common.add_argument(
        "--timeout", type=_number, default=60.0, metavar="SECONDS", help="default: %(default)s"
    )
    commands = parser.add_subparsers(required=True, metavar="COMMAND")
    _add(commands, info, common)
    planning = _add(commands, plan, common, _spec_parser())
    planning.add_argument("--q", type=_sizes, required=True, metavar="B,H,L,D")
    planning.add_argument("--k", type=_sizes, metavar="B,H,L,D", help="default: q's")
    planning.add_argument("--v", type=_sizes, metavar="B,H,L,D", help="default: k's")
    planning.add_argument(
        "--sram-elements", type=_positive, metavar="N", help="of fast memory; default: the server's"
    )
    planning.add_argument("--json", action="store_true", help="print JSON")
    checking = _add(commands, check, common, _spec_parser(), _case_parser())
    checking.add_argument(
        "--npz",
        metavar="FILE",
        help="check these arrays instead, by name: q, k, v, mask, ..., dout, out, lse, dq, ...",
    )
    checking.add_argument("--grad", action="store_true", help="check gradients too")
    checking.add_argument(
        "--backends", nargs=2, metavar=("A", "B"), help="default: the fastest and reference"
    )
    benching = _add(commands, bench, common, _spec_parser(), _case_parser())
    benching.add_argument(
        "--repeat", type=_positive, default=20, metavar="N", help="requests; default: %(default)s"
    )
    return parser


def _add(commands: Any, run: Any, *parents: argparse.ArgumentParser) -> argparse.ArgumentParser:
    parser: argparse.ArgumentParser = commands.add_parser(
        run.__name__, help=run.__doc__, description=run.__doc__, parents=parents, epilog=_EXITS
    )
    parser.set_defaults(run=run, parser=parser)
    return parser


def _spec_parser() -> argparse.ArgumentParser:
    """Options of an attention; those not given are left out of the request."""
    parser = argparse.ArgumentParser(add_help=False, argument_default=argparse.SUPPRESS)
    parser.add_argument("--dtype", default="float32", help="of q, k and v; default: %(default)s")
    group = parser.add_argument_group("attention")
    group.add_argument("--scale", type=_number, metavar="X", help="default: D**-0.5")
    group.add_argument("--causal", action="store_true", help="default: every key is visible")
    group.add_argument(
        "--causal-align", choices=("bottom_right", "top_left"), help="default: bottom_right"
    )
    group.add_argument(
        "--window", type=_window, metavar="LEFT,RIGHT", help="empty or -1: an open end, the default"
    )
    group.add_argument("--softcap", type=_number, metavar="X", help="default: none")
    group.add_argument("--dropout", type=_number, metavar="P", help="default: 0")
    group.add_argument(
        "--seed", type=_integer, metavar="N", help="of dropout; default: the server draws one"
    )
    group.add_argument("--layout", choices=("bhld", "blhd"), help="default: bhld")
    group.add_argument("--precision", choices=("ieee", "tf32"), help="default: ieee")
    group.add_argument(
        "--backend", choices=("auto", "reference", "cpu", "triton"), help="default: auto"
    )
    return parser


def _case_parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(add_help=False)
    group = parser.add_argument_group("random case")
    group.add_argument(
        "--shape",
        type=_four_sizes,
        default=(1, 8, 256, 64),
        metavar="B,H,L,D",
        help="of q; default: 1,8,256,64",
    )
    group.add_argument("--kv-heads", type=_positive, metavar="N", help="default: q's")
    group.add_argument("--kv-length", type=_positive, metavar="N", help="default: q's")
    group.add_argument(
        "--case-seed", type=_integer, default=0, metavar="N", help="of values; default: %(default)s"
    )
    return parser


def _options(arguments: argparse.Namespace) -> dict[str, Any]:
    given = vars(arguments)
    return {name: given[name] for name in _OPTIONS if name in given}


def _random_case(arguments: argparse.Namespace) -> dict[str, Any]:
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


def _cell(value: Any) -> str:
    if isinstance(value, float):
        return f"{value:.6g}"
    return f"{value:,}" if isinstance(value, int) else json.dumps(value)


def _sizes(text: str) -> tuple[int, ...]:
    if not re.fullmatch(r"\d+(,\d+)*", text):
        raise argparse.ArgumentTypeError(f"must be sizes, e.g. 1,8,256,64; got {text!r}")
    return tuple(map(int, text.split(",")))


def _four_sizes(text: str) -> tuple[int, ...]:
    if not re.fullmatch(r"\d+,\d+,\d+,\d+", text):
        raise argparse.ArgumentTypeError(f"must be B,H,L,D, e.g. 1,8,256,64; got {text!r}")
    return _sizes(text)


def _window(text: str) -> tuple[int | None, int | None]:
    found = re.fullmatch(r"(-?\d+)?,(-?\d+)?", text)
    if found is None:
        raise argparse.ArgumentTypeError(f"must be LEFT,RIGHT, e.g. 128,0; got {text!r}")
    left, right = (int(end) if end else None for end in found.groups())
    return left, right


def _number(text: str) -> float:
    try:
        return float(text)
    except ValueError:
        raise argparse.ArgumentTypeError(f"must be a number, got {text!r}") from None


def _integer(text: str) -> int:
    try:
        return int(text)
    except ValueError:
        raise argparse.ArgumentTypeError(f"must be an integer, got {text!r}") from None


def _positive(text: str) -> int:
    if (value := _integer(text)) < 1:
        raise argparse.ArgumentTypeError(f"must be at least 1, got {text}")
    return value
