"""The `gapless` command: serve, call, bridge, sessions, log, token, audit, torture, version."""

from __future__ import annotations

import sys
from typing import Annotated

import typer

from gapless.cli.access import TOKEN_EXAMPLES, token
from gapless.cli.audit import AUDIT_EXAMPLES, audit_log
from gapless.cli.bridge import BRIDGE_EXAMPLES, bridge
from gapless.cli.call import CALL_EXAMPLES, call
from gapless.cli.config import ENVIRONMENT
from gapless.cli.log import log
from gapless.cli.output import examples, fail, options
from gapless.cli.serve import SERVE_EXAMPLES, serve
from gapless.cli.sessions import sessions
from gapless.cli.torture import TORTURE_EXAMPLES, torture
from gapless.cli.version import print_version, version
from gapless.errors import GaplessError

__all__ = ["app", "main"]

app = typer.Typer(
    name="gapless",
    no_args_is_help=True,
    add_completion=False,
    rich_markup_mode="rich",
    pretty_exceptions_enable=False,
    context_settings={"help_option_names": ["-h", "--help"]},
    epilog=examples(
        "gapless serve -- python server.py",
        "gapless call http://127.0.0.1:8000/mcp",
        "gapless sessions list",
    ),
)


@app.callback()
def gapless(
    *,
    version: Annotated[
        bool,
        typer.Option("--version", callback=print_version, is_eager=True, help="Print the version and exit."),
    ] = False,
    debug: Annotated[bool, typer.Option("--debug", help="Show where an error comes from.")] = False,
) -> None:
    """MCP sessions that survive their connections."""
    options.debug = debug


app.command(epilog=SERVE_EXAMPLES, context_settings=ENVIRONMENT)(serve)
app.command(epilog=CALL_EXAMPLES)(call)
app.command(epilog=BRIDGE_EXAMPLES)(bridge)
app.add_typer(sessions)
app.add_typer(log)
app.command(epilog=TOKEN_EXAMPLES)(token)
app.command("audit", epilog=AUDIT_EXAMPLES)(audit_log)
app.command(epilog=TORTURE_EXAMPLES)(torture)
app.command(epilog=examples("gapless version", "gapless --version"))(version)


def main() -> None:
    """Run the command line; an expected error is one line on stderr, and exit status 1, or 2 for misuse."""
    try:
        app(prog_name="gapless")
    except GaplessError as error:
        if options.debug:
            raise
        sys.exit(fail(error))
