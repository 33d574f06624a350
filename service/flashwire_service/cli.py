"""`flashwire-serve`: settings from flags and environment, then the supervisor."""

from __future__ import annotations

import argparse
import os
import sys
from collections.abc import Sequence
from importlib.metadata import version
from importlib.util import find_spec

from flashwire_service import settings, tracing

# What a child imports and the base install lacks, by module: the name to install it by.
_NEEDED = {
    "fastapi": "fastapi",
    "uvicorn": "uvicorn",
    "httptools": "httptools",
    "pydantic": "pydantic",
    "prometheus_client": "prometheus-client",
    "torch": "torch",
}

_EPILOG = "Sizes may be written as 64MiB. A flag wins over its environment variable."


def main(argv: Sequence[str] | None = None) -> int:
    """Serve until stopped. Returns the exit status: 2 when the settings are wrong, EX_OSFILE when
    a package is missing, else that of `supervisor.run`.
    """
    given = {k: v for k, v in vars(_parser().parse_args(argv)).items() if v is not None}
    try:
        configured = settings.load(given, os.environ)
    except settings.SettingsError as exc:
        _say(*exc.mistakes)
        return 2
    if missing := [name for module, name in _NEEDED.items() if find_spec(module) is None]:
        _say(f"needs {', '.join(missing)}: pip install 'flashwire[service]'")
        return os.EX_OSFILE
    if configured.device.startswith("cuda") and find_spec("triton") is None:
        _say(f"--device: {configured.device} needs triton: pip install 'flashwire[gpu]'")
        return os.EX_OSFILE
    if configured.traces and not tracing.installed():
        _say("--traces: needs OpenTelemetry: pip install 'flashwire[otel]'")
        return os.EX_OSFILE
    _say(*(f"warning: {line}" for line in settings.warnings(configured, os.environ)))
    from flashwire_service.supervisor import run  # only once there is something to supervise

    return run(configured)


def _say(*lines: str) -> None:
    for line in lines:
        print(f"flashwire-serve: {line}", file=sys.stderr)


class _Parser(argparse.ArgumentParser):
    """Says in its help which backends this version lacks; only then is that looked up."""

    def format_help(self) -> str:
        from flashwire_service.front.info import lacking

        self.epilog = f"{_EPILOG} {lacking()}"
        return super().format_help()


def _parser() -> argparse.ArgumentParser:
    parser = _Parser(
        prog="flashwire-serve",
        description="Serve exact attention, forward and backward, over HTTP.",
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
        default = f"; default {row.default_text}" if row.default_text else ""
        text = f"{row.meaning} [{row.variable}{default}]"
        if row.is_switch:
            parser.add_argument(row.flag, action="store_const", const="true", help=text)
        else:
            parser.add_argument(row.flag, metavar=row.metavar, help=text)
    return parser
