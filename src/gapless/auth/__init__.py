"""Who asks: what a bearer token says, and whether it is to be believed (§9; RFC 6750, RFC 9728)."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from gapless.auth.base import DeniedError, Principal, Verifier

if TYPE_CHECKING:
    from gapless.auth.jwt import JwtVerifier
    from gapless.auth.tokens import TokenFile

__all__ = ["DeniedError", "JwtVerifier", "Principal", "TokenFile", "Verifier"]


def __getattr__(name: str) -> Any:
    match name:  # what most servers do without takes its time to import
        case "JwtVerifier":
            from gapless.auth.jwt import JwtVerifier

            return JwtVerifier
        case "TokenFile":
            from gapless.auth.tokens import TokenFile

            return TokenFile
        case _:
            raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
