"""What a client needs to go on after its process died: one small file, replaced atomically (C4, N3)."""

from __future__ import annotations

import os
import tempfile
from contextlib import suppress
from pathlib import Path
from typing import Any

import msgspec

from gapless.errors import UsageError

__all__ = ["Saved", "StateFile"]


class Saved(msgspec.Struct):
    """The file's content.

    Attributes:
        url: the server the session is at; a file is good for one.
        session: its token: whoever reads the file has the session, hence mode 0600.
        cursor: the last event the application processed.
        incarnation: how many processes have used this session before this one.
        limits, timers: what the server advertised.
        initialize, initialized: the recorded handshake, as it went over the wire.
        waiting: requests that wait for an answer: their ID on the wire, as JSON, and their message number.
        asked: server→client requests whose answers the server does not have, as they came.
    """

    url: str
    session: str
    cursor: str
    incarnation: int = 0
    limits: dict[str, Any] = {}
    timers: dict[str, Any] = {}
    initialize: dict[str, Any] | None = None
    initialized: dict[str, Any] | None = None
    waiting: dict[str, int] = {}
    asked: dict[str, dict[str, Any]] = {}
    version: int = 1


class StateFile:
    """A file of mode 0600 that always holds one whole state, the last one written or the one before."""

    def __init__(self, path: str | os.PathLike[str]) -> None:
        self.path = Path(path)

    def load(self, url: str) -> Saved | None:
        """The saved state; `None` if there is none.

        Raises:
            UsageError: the file is not one of ours, or of another server.
        """
        try:
            data = self.path.read_bytes()
        except FileNotFoundError:
            return None
        except OSError as error:
            raise UsageError(f"cannot read the state file {self.path}: {error.strerror}") from None
        try:
            saved = msgspec.json.decode(data, type=Saved)
        except (msgspec.DecodeError, UnicodeDecodeError) as error:
            hint = "delete it to start a new session"
            raise UsageError(f"{self.path} is no state file of ours: {error}", hint=hint) from None
        if saved.url != url:
            hint = "use one state file for each server"
            raise UsageError(f"{self.path} belongs to {saved.url}, not to {url}", hint=hint)
        return saved

    def save(self, saved: Saved) -> None:
        """Replace the file atomically.

        Raises:
            UsageError: it cannot be written.
        """
        data = msgspec.json.encode(saved)
        try:
            descriptor, name = tempfile.mkstemp(dir=self.path.parent, prefix=f".{self.path.name}.")
            try:
                with os.fdopen(descriptor, "wb") as file:  # mkstemp makes it 0600
                    file.write(data)
                    file.flush()
                    os.fsync(file.fileno())
                os.replace(name, self.path)
            except BaseException:
                os.unlink(name)
                raise
        except OSError as error:
            raise UsageError(f"cannot write the state file {self.path}: {error.strerror}") from None

    def discard(self) -> None:
        """The session is over: forget it (L7). A file that cannot be removed names a session that is none."""
        with suppress(OSError):
            self.path.unlink()
