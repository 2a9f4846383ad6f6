"""`gapless serve`: any MCP server, durably, over HTTP."""

from __future__ import annotations

import os
import re
import shutil
import sys
from dataclasses import replace
from typing import TYPE_CHECKING, Annotated, Final, Literal

import typer

from gapless.cli.access import ACCESS, Audience, Issuer, Jwks, Scopes, Tokens, guarded, verifier
from gapless.cli.config import Config, configured
from gapless.cli.headers import read_headers
from gapless.cli.limits import with_limits
from gapless.cli.output import examples, say
from gapless.errors import UsageError
from gapless.protocol.settings import Limits

if TYPE_CHECKING:
    from gapless.backends.base import BackendFactory

__all__ = ["DEFAULT_LOG", "SERVE_EXAMPLES", "serve"]

DEFAULT_LOG: Final = "sqlite:///gapless.db"
SERVE_EXAMPLES: Final = examples(
    "gapless serve -- python server.py      # a stdio server, started per session",
    "gapless serve server:mcp --port 9000   # the MCPServer mcp in server.py",
    "gapless serve --log memory: --port 0 -- npx -y @scope/some-server",
    "gapless serve --upstream https://example.com/mcp --upstream-header 'Authorization: Bearer ${TOKEN}'",
)

_MODULE: Final = re.compile(r"[^\W\d]\w*(\.[^\W\d]\w*)*:[\w.]+")
_ANY: Final = ("", "0.0.0.0", "::")
_NETWORK: Final = "Network"
_UPSTREAM: Final = "Upstream"
_SEEN: Final = "What is seen"


@configured
@with_limits
def serve(
    target: Annotated[
        list[str] | None,
        typer.Argument(
            metavar="MODULE:ATTR | -- CMD",
            show_default=False,
            help="An MCPServer or Server of the Python SDK, in this process; or a stdio server's command.",
        ),
    ] = None,
    *,
    upstream: Annotated[
        str | None,
        typer.Option(
            metavar="URL",
            show_default=False,
            help="Instead of those, an MCP server that is served over Streamable HTTP already.",
            rich_help_panel=_UPSTREAM,
        ),
    ] = None,
    upstream_header: Annotated[
        list[str] | None,
        typer.Option(
            metavar="<name: value>",
            help="Sent with every request to it; repeat it for several. ${NAME} is taken from the "
            "environment, where other users of this machine cannot see it; $$ is a dollar sign.",
            rich_help_panel=_UPSTREAM,
        ),
    ] = None,
    log: Annotated[
        str,
        typer.Option(
            help="Where sessions are kept: sqlite:///relative.db, sqlite:////absolute.db or memory:"
        ),
    ] = DEFAULT_LOG,
    on_backend_loss: Annotated[
        Literal["restart", "supersede"],
        typer.Option(
            help="When a session's MCP server is gone: restart gives it a fresh one, and answers what the "
            "last one was at; supersede ends the session."
        ),
    ] = "restart",
    host: Annotated[
        str, typer.Option(help="The address to listen on.", rich_help_panel=_NETWORK)
    ] = "127.0.0.1",
    port: Annotated[
        int, typer.Option(min=0, max=65535, help="0 takes one that is free.", rich_help_panel=_NETWORK)
    ] = 8000,
    path: Annotated[str, typer.Option(help="Where the endpoints are.", rich_help_panel=_NETWORK)] = "/mcp",
    allowed_host: Annotated[
        list[str] | None,
        typer.Option(
            help="allowed_hosts: a name that clients may call this server by; repeat it for several, "
            "* allows any. [dim]\\[default: localhost, and what --host names][/dim]",
            rich_help_panel=_NETWORK,
        ),
    ] = None,
    allowed_origin: Annotated[
        list[str] | None,
        typer.Option(
            help="allowed_origins: a web origin (https://app.example) whose pages may call this server; "
            "repeat it for several, * allows any. [dim]\\[default: localhost][/dim]",
            rich_help_panel=_NETWORK,
        ),
    ] = None,
    public_url: Annotated[
        str | None,
        typer.Option(
            metavar="URL",
            show_default=False,
            help="The URL of the endpoints as clients know it, behind a proxy: its host and its origin are "
            "allowed, and tokens are for it.",
            rich_help_panel=_NETWORK,
        ),
    ] = None,
    trusted_proxy: Annotated[
        list[str] | None,
        typer.Option(
            metavar="ADDRESS",
            show_default=False,
            help="A proxy whose X-Forwarded-For and -Proto are believed; repeat it for several.",
            rich_help_panel=_NETWORK,
        ),
    ] = None,
    tokens: Tokens = None,
    jwt_issuer: Issuer = None,
    jwt_audience: Audience = None,
    jwt_jwks: Jwks = None,
    scope: Scopes = None,
    allow_anonymous: Annotated[
        bool,
        typer.Option(
            "--allow-anonymous",
            help="Let everybody in who reaches --host, without a token.",
            rich_help_panel=ACCESS,
        ),
    ] = False,
    log_level: Annotated[
        Literal["error", "warning", "info"],
        typer.Option(help="info has a line for every turn of a session's transport.", rich_help_panel=_SEEN),
    ] = "warning",
    log_format: Annotated[
        Literal["text", "json"], typer.Option(help="json is one object a line.", rich_help_panel=_SEEN)
    ] = "text",
    config: Config = None,
    limits: Limits,
) -> None:
    """Serve an MCP server so that its sessions survive their connections.

    Clients that speak only standard Streamable HTTP are served too, at the same URL.
    """
    if not path.startswith("/"):
        raise UsageError(f"--path {path} does not start with /", hint=f"write --path /{path}")

    who = verifier(tokens, jwt_issuer, jwt_audience, jwt_jwks, scope, public_url)

    from gapless.cli.process import Manner, bind, run
    from gapless.log.open import open_log
    from gapless.server.access import LOOPBACK
    from gapless.server.app import Settings, build

    if upstream is None:
        if upstream_header:
            raise UsageError("--upstream-header without --upstream", hint="--upstream URL names the server")
        name, backends = _backends(target or [], limits)
    else:
        if target:
            raise UsageError("both --upstream and another server are given", hint="leave one out")
        name, backends = _upstream(upstream, upstream_header or [], limits)
    store = open_log(log)
    shown = f"[{host}]" if ":" in host else host or "0.0.0.0"
    hosts = allowed_host or ([*LOOPBACK] if host in _ANY else [*LOOPBACK, shown.lower()])
    limits = replace(limits, on_backend_loss=on_backend_loss)
    names = [name.lower() for name in hosts]
    settings = Settings(path, limits, names, allowed_origin or LOOPBACK, who, public_url)
    listening = bind(host, port)
    if who is None and not allow_anonymous:
        guarded(listening)
    url = f"http://{shown}:{listening.getsockname()[1]}{path.rstrip('/')}"

    def started() -> None:
        say(f"{name} is served at {url}, log {log}, durability {store.durability}; Ctrl-C stops it")
        if host in _ANY and not allowed_host and not public_url:
            say("only requests to localhost are answered: --allowed-host names the hosts clients may call")

    manner = Manner(log_level, log_format, tuple(trusted_proxy or ()))
    run(build(store, backends, settings), listening, started, manner)


def _backends(target: list[str], limits: Limits) -> tuple[str, BackendFactory]:
    """What is to be served, and its name."""
    if not target:
        hint = "gapless serve -- CMD ARGS, gapless serve module:attr, or gapless serve --upstream URL"
        raise UsageError("nothing to serve", hint=hint)
    program = target[0]
    if len(target) == 1 and _MODULE.fullmatch(program):
        return program, _imported(program)
    from gapless.backends.stdio import StdioBackends

    if shutil.which(program) is None:
        raise UsageError(f"there is no program {program!r}", hint=_meant(program))
    shown = os.path.basename(program) + (" ..." if len(target) > 1 else "")  # arguments may hold secrets
    return shown, StdioBackends(target, max_message_bytes=limits.max_message_bytes)


def _upstream(url: str, headers: list[str], limits: Limits) -> tuple[str, BackendFactory]:
    from gapless.backends.http import HttpBackends
    from gapless.backends.upstream import shown

    given = read_headers(headers, "--upstream-header")
    backends = HttpBackends(url, headers=given, max_message_bytes=limits.max_message_bytes)
    return shown(url).partition("://")[2], backends


def _meant(program: str) -> str:
    if program.startswith(("http://", "https://")):
        return f"gapless serve --upstream {program}"
    if program.endswith(".py") and os.path.isfile(program):
        return f"gapless serve -- python {program}"
    return "check its spelling and the PATH; a server of this process is written module:attr"


def _imported(name: str) -> BackendFactory:
    from gapless.backends import open_backends

    sys.path.insert(0, os.getcwd())
    try:
        return open_backends(name)
    except UsageError:
        raise
    except Exception as error:
        told = f"{name} cannot be imported: {type(error).__name__}: {error}"
        raise UsageError(told, hint="gapless --debug serve ... shows where") from error
