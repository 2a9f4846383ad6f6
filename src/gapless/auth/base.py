"""What every verifier of bearer tokens has in common."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass
from typing import Final, Literal

__all__ = ["ANONYMOUS", "Denial", "DeniedError", "Principal", "Revoke", "Verifier"]

Denial = Literal["invalid_token", "insufficient_scope"]
"""Why a token does not do, as RFC 6750 §3.1 has it."""

Revoke = Callable[[str], Awaitable[None]]
"""Ends every connection of the principal of that name; its sessions stay, for a token that does."""


@dataclass(frozen=True, slots=True)
class Principal:
    """Somebody who is who they say.

    Attributes:
        name: who; the same for every token of theirs. Sessions belong to names.
        expires: Unix time, in seconds, from which the token is none any more; `None` if it stays good.
    """

    name: str
    expires: float | None = None


ANONYMOUS: Final = Principal("anonymous")
"""Everybody, where nobody is asked."""


class DeniedError(Exception):
    """A token that does not do. Its message says why, and never holds any of the token."""

    def __init__(self, message: str, error: Denial = "invalid_token") -> None:
        super().__init__(message)
        self.error: Denial = error


class Verifier(ABC):
    """Knows whom a bearer token stands for. Subclass it for tokens of another kind.

    Attributes:
        issuers: the authorization servers that give out tokens, for the protected-resource metadata.
        scopes: what a token has to grant.
    """

    issuers: Sequence[str] = ()
    scopes: Sequence[str] = ()

    async def start(self) -> None:  # noqa: B027
        """Make ready; called once, before anything is served.

        Raises:
            GaplessError: it cannot be; nothing is served.
        """

    @abstractmethod
    async def verify(self, token: str) -> Principal:
        """Whom a token stands for.

        Raises:
            DeniedError: nobody, or nobody who may.
            OSError: that cannot be found out at the moment; the request is to be tried again.
        """

    async def watch(self, revoke: Revoke) -> None:  # noqa: B027
        """Call `revoke` whenever somebody's tokens have ceased to be good; runs for as long as it serves."""

    async def close(self) -> None:  # noqa: B027
        """Release what is held."""
