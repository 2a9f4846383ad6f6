"""Who may use a server: what the options of `gapless serve` say of it, and `gapless token`."""

from __future__ import annotations

import ipaddress
import socket
import sys
from typing import TYPE_CHECKING, Annotated, Any, Final

import typer

from gapless.cli.output import examples, say
from gapless.errors import UsageError

if TYPE_CHECKING:
    from gapless.auth import Verifier

__all__ = [
    "ACCESS",
    "TOKEN_EXAMPLES",
    "Audience",
    "Issuer",
    "Jwks",
    "Scopes",
    "Tokens",
    "guarded",
    "token",
    "verifier",
]

ACCESS: Final = "Who may"
TOKEN_EXAMPLES: Final = examples(
    "gapless token alice >> tokens    # the line goes to the file, the token to you",
    "gapless serve --tokens tokens -- python server.py",
    "gapless call URL --header 'Authorization: Bearer ${TOKEN}'",
)


def _option(metavar: str, help: str) -> Any:
    return typer.Option(metavar=metavar, show_default=False, help=help, rich_help_panel=ACCESS)


_AUDIENCE: Final = "What these JWTs have to be for. [dim]\\[default: the --public-url][/dim]"
_JWKS: Final = "Where the issuer's keys are. [dim]\\[default: where its metadata says][/dim]"

Tokens = Annotated[
    str | None, _option("FILE", "Bearer tokens that may, hashed, a line each; gapless token makes one.")
]
Issuer = Annotated[str | None, _option("URL", "The authorization server whose JWTs may.")]
Audience = Annotated[str | None, _option("URL", _AUDIENCE)]
Jwks = Annotated[str | None, _option("URL", _JWKS)]
Scopes = Annotated[list[str] | None, _option("NAME", "What these JWTs have to grant; repeat it for several.")]


def verifier(
    tokens: str | None,
    issuer: str | None,
    audience: str | None,
    jwks: str | None,
    scopes: list[str] | None,
    public_url: str | None,
) -> Verifier | None:
    """What knows bearer tokens; `None` if the options name nobody who may.

    Raises:
        UsageError: they do not go together.
    """
    if issuer is None:
        for option, given in (("--jwt-audience", audience), ("--jwt-jwks", jwks), ("--scope", scopes)):
            if given:
                told = f"{option} without --jwt-issuer"
                raise UsageError(told, hint="--jwt-issuer says whose JWTs may")
        if tokens is None:
            return None
        from gapless.auth import TokenFile

        return TokenFile(tokens)
    if tokens is not None:
        raise UsageError("both --tokens and --jwt-issuer are given", hint="leave one out")
    audience = audience or public_url
    if audience is None:
        hint = "--public-url, or --jwt-audience, is what the issuer has to have made them for"
        raise UsageError("--jwt-issuer without what its JWTs are for", hint=hint)
    from gapless.auth import JwtVerifier

    return JwtVerifier(issuer, audience, jwks=jwks, scopes=scopes or ())


def guarded(listening: socket.socket) -> None:
    """Nobody serves everybody by mistake: whoever lets all in listens on this machine alone.

    Raises:
        UsageError: the socket is for others too. It is closed.
    """
    address = listening.getsockname()[0]
    if not ipaddress.ip_address(address).is_loopback:
        listening.close()
        hint = "--tokens or --jwt-issuer says who may; --allow-anonymous, that everybody may"
        raise UsageError(f"{address} lets everybody in who reaches it", hint=hint)


def token(
    name: Annotated[
        str,
        typer.Argument(
            metavar="NAME", help="Whom the token stands for: sessions belong to names.", show_default=False
        ),
    ],
) -> None:
    """Make a bearer token: its line for --tokens on stdout, the token itself on stderr.

    The line holds no more than the token's hash. The token is shown this once.
    """
    from gapless.auth.tokens import new_token

    made, line = new_token(name)
    sys.stdout.write(f"{line}\n")
    say(f"the token of {name}: {made}")
