"""`gapless version`."""

from __future__ import annotations

import platform
from importlib.metadata import version as version_of

import typer

import gapless
from gapless.cli.output import out

__all__ = ["print_version", "version"]


def version() -> None:
    """Print the versions of Gapless and of what matters to it."""
    print_version(True)


def print_version(wanted: bool) -> None:
    """For `--version`: print, and go."""
    if wanted:
        out.print(
            f"gapless {gapless.__version__} (mcp {version_of('mcp')}, Python {platform.python_version()})"
        )
        raise typer.Exit
