"""What happened in a run: the latest lines to read, and a digest of them all to compare runs by."""

from __future__ import annotations

from collections import deque
from hashlib import blake2b
from typing import Final

from tests.simulation.loop import Loop

__all__ = ["Trace"]

_KEPT: Final = 4000


class Trace:
    """A run's diary."""

    def __init__(self, loop: Loop) -> None:
        self._loop = loop
        self._lines: deque[tuple[float, str, str]] = deque(maxlen=_KEPT)
        self._digest = blake2b(digest_size=16)

    def note(self, who: object, what: str) -> None:
        """Somebody did something."""
        entry = (self._loop.now, str(who), what)
        self._lines.append(entry)
        self._digest.update(repr(entry).encode())

    @property
    def digest(self) -> str:
        """The same for two runs in which the same happened at the same times."""
        return self._digest.hexdigest()

    def tail(self, lines: int = 200) -> str:
        """The latest lines, as text."""
        latest = list(self._lines)[-lines:]
        return "\n".join(f"{at:10.4f} {who:<10} {what}" for at, who, what in latest)
