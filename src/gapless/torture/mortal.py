"""A server that may be killed, and what it leaves on the disk."""

from __future__ import annotations

from collections import Counter
from contextlib import AbstractContextManager
from pathlib import Path
from typing import Protocol

from gapless.torture.audit.auditor import Source

__all__ = ["Journal", "Mortal"]


class Mortal(Protocol):
    """A server on one log and at one address, whose process may be killed and started again.

    Attributes:
        folder: its log and its journal are in it, and whoever judges it may put more there.
        url: of its MCP endpoint.
        journal: the file in which its ladder notes every climb that it begins.
    """

    folder: Path
    url: str
    journal: Path

    async def start(self) -> None:
        """Start a process. It does not listen yet."""
        ...

    async def listens(self) -> None:
        """Wait until it listens.

        Raises:
            TargetError: it has ended, or does not listen after half a minute.
        """
        ...

    async def kill(self) -> None:
        """SIGKILL, and wait until it is gone. No error if it is already."""
        ...

    def log(self) -> AbstractContextManager[Source]:
        """Its log as it is now; the process may be there meanwhile."""
        ...


class Journal:
    """How often each climb was begun, by what is on the disk."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._read = 0
        self._runs: Counter[str] = Counter()

    def runs(self) -> Counter[str] | None:
        """Every climb that was begun; `None` if the server keeps its journal elsewhere."""
        try:
            with self._path.open("rb") as file:
                file.seek(self._read)
                data = file.read()
        except FileNotFoundError:
            return None
        data = data[: data.rfind(b"\n") + 1]  # the last line may be being written
        self._read += len(data)
        self._runs.update(data.decode(errors="replace").splitlines())
        return self._runs
