"""Bearer tokens that are handed out by hand, in a file that holds no token (§9)."""

from __future__ import annotations

import asyncio
import logging
import os
import re
import secrets
from hashlib import sha256
from hmac import compare_digest
from typing import Final

from gapless.auth.base import DeniedError, Principal, Revoke, Verifier
from gapless.errors import UsageError

__all__ = ["TokenFile", "new_token"]

_LINE: Final = re.compile(r"([^\s:#][^\s:]*):([0-9a-f]{64})")
_log: Final = logging.getLogger("gapless.auth")
_LOOK: Final = 2.0
"""Seconds between looks at the file."""


def new_token(name: str) -> tuple[str, str]:
    """A fresh token for `name`, of 256 random bits, and its line for the file.

    Raises:
        UsageError: the name cannot stand in a line.
    """
    token = secrets.token_urlsafe(32)
    line = f"{name}:{_hash(token)}"
    if _LINE.fullmatch(line) is None:
        raise UsageError(f"{name!r} is no name", hint="use neither white space nor colons, and no # in front")
    return token, line


class TokenFile(Verifier):
    """A line for each token: a name, a colon, and the SHA-256 of the token in hexadecimal digits.

    A name may have several tokens. The file is looked at every two seconds; whoever's lines have all gone,
    is gone. Blank lines, and those that begin with `#`, say nothing.
    """

    def __init__(self, path: str | os.PathLike[str]) -> None:
        """Read the file.

        Raises:
            UsageError: it cannot be read, or has a line that is none.
        """
        self._path = os.fspath(path)
        self._seen: tuple[int, int, int] | None = None
        self._names: dict[bytes, str] = {}
        self._trouble = ""
        """What was wrong with the file when it was looked at last."""
        try:
            self._read()
        except OSError as error:
            raise UsageError(f"the tokens {self._path} cannot be read: {error.strerror}") from None

    async def verify(self, token: str) -> Principal:
        """Whom a token stands for; every line is compared, in constant time."""
        asked, found = _hash(token).encode(), None
        for known, name in self._names.items():
            if compare_digest(known, asked):
                found = name
        if found is None:
            raise DeniedError("nobody has this token")
        return Principal(found)

    async def watch(self, revoke: Revoke) -> None:
        """Look at the file for as long as it is served.

        One that cannot be read changes nothing, and says so in the log: whoever was to be let in or kept out
        by it is not.
        """
        while True:
            await asyncio.sleep(_LOOK)
            for name in self.look():
                await revoke(name)

    def look(self) -> frozenset[str]:
        """Read the file if it has changed; the names that have lost a token."""
        before = dict(self._names)
        try:
            self._read()
        except (OSError, UsageError) as error:
            told = str(error)
            if told != self._trouble:
                _log.warning("the tokens stay as they were read last, and nobody is revoked: %s", told)
            self._trouble = told
            return frozenset()
        self._trouble = ""
        return frozenset(name for known, name in before.items() if known not in self._names)

    def _read(self) -> None:
        status = os.stat(self._path)
        seen = status.st_mtime_ns, status.st_size, status.st_ino
        if seen == self._seen:
            return
        names: dict[bytes, str] = {}
        with open(self._path, encoding="utf-8", errors="replace") as file:
            for number, text in enumerate(file, 1):
                line = text.strip()
                if not line or line.startswith("#"):
                    continue
                found = _LINE.fullmatch(line)
                if found is None:
                    told = f"{self._path}, line {number}: this is not NAME:SHA256"
                    raise UsageError(told, hint="gapless token NAME makes such a line")
                names[found[2].encode()] = found[1]
        self._seen, self._names = seen, names


def _hash(token: str) -> str:
    return sha256(token.encode(errors="replace")).hexdigest()
