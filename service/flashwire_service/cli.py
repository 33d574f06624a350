"""`flashwire-serve`: settings from flags and environment, then the supervisor."""

from __future__ import annotations

import argparse
import os
import sys
from collections.abc import Sequence
from importlib.metadata import version

from flashwire_service import settings


def main(argv: Sequence[str] | None = None) -> int:
    """Serve until stopped. Returns the exit status: 2 when the settings are wrong."""
    given = {k: v for k, v in vars(_parser().parse_args(argv)).items() if v is not None}
    try:
        configured = settings.load(given, os.environ)
    except settings.SettingsError as exc:
        print("\n".join(f"flashwire-serve: {line}" for line in exc.mistakes), file=sys.stderr)
        return 2
    from flashwire_service.supervisor import run  # only once there is something to supervise

    return run(configured)


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="flashwire-serve",
        description="Serve exact attention, forward and backward, over HTTP.",
        epilog="Sizes may be written as 64MiB. A flag wins over its environment variable.",
        allow_abbrev=False,
    )
    parser.add_argument("--version", action="version", version=f"flashwire {version('flashwire')}")
    secrets = parser.add_argument_group("secrets, from the environment only")
    for row in settings.table():
        if row.flag is None:
            secrets.description = (
                f"{secrets.description or ''}{row.variable}: {row.meaning}. "  # argparse wraps it
            )
            continue
        default = "" if row.default == () else f"; default {row.default}"
        text = f"{row.meaning} [{row.variable}{default}]"
        if row.is_switch:
            parser.add_argument(row.flag, action="store_const", const="true", help=text)
        else:
            parser.add_argument(row.flag, metavar="X", help=text)
    return parser
