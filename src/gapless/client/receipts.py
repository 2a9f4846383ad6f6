"""Receipts: what the application took, and what its connection went through, a line each.

From such a file and the server's log `gapless audit` shows that nothing was lost, repeated or
reordered (§11.1), or between which two turns of the connection it was. It is text, made with mode
0600, and only ever appended to::

    # gapless receipts 1
    2026-01-02T10:00:01.204Z 3f9a1c2204d5e6f7 session opened 0.0.302afdd2d459082f
    2026-01-02T10:00:01.210Z 3f9a1c2204d5e6f7 sse opened 0.0.302afdd2d459082f
    2026-01-02T10:00:01.255Z 3f9a1c2204d5e6f7 1.0.e206387c142c6049
    2026-01-02T10:00:01.256Z 3f9a1c2204d5e6f7 handshake sent 1.0.e206387c142c6049

The fields are the time, in UTC; the session, as the first 16 digits of its token's SHA-256 (the log
knows it by the whole of that); and the ID of an event that the application has accepted, or a
`Turn` and what belongs to it. A token is never in it.
"""

from __future__ import annotations

import asyncio
import os
import re
import stat
import time
from collections.abc import Iterator
from dataclasses import dataclass
from enum import StrEnum
from hashlib import sha256
from typing import BinaryIO, Final

from gapless.errors import MalformedError, UsageError
from gapless.protocol.cursor import EventId, parse_event_id
from gapless.protocol.phases import Phase

__all__ = ["HEADER", "Line", "Receipts", "Turn", "read_receipts", "turn"]

HEADER: Final = b"# gapless receipts 1\n"
"""The first line of a file."""

_BINARY: Final[int] = getattr(os, "O_BINARY", 0)  # on Windows lines would end in CRLF without it
_FLUSH: Final = 1.0
"""Seconds that a line may wait to be written."""
_FULL: Final = 64 * 1024
"""Bytes of lines that may wait."""
_LONGEST: Final = 512
"""Bytes of a line that is read."""
_LINE: Final = re.compile(r"(\d{4}-\d\d-\d\dT\d\d:\d\d:\d\d\.\d{3}Z) ([0-9a-f]{16}) (.+)", re.ASCII)
_TURN: Final = re.compile(r"([a-z]+ [a-z]+)(?: (.*))?", re.ASCII)


class Turn(StrEnum):
    """What happened to a connection."""

    OPENED = "session opened"
    """By this process. With its first cursor."""
    CONTINUED = "session continued"
    """From the state file of a process that died, with the cursor saved there."""
    SSE_OPENED = "sse opened"
    """An event stream, from this cursor."""
    SSE_FAILED = "sse failed"
    """No event stream was to be had. With the status and the reason, if the server gave one."""
    SSE_DROPPED = "sse dropped"
    UPGRADE_ASKED = "upgrade asked"
    """In band, in two steps. With the cursor stated."""
    HANDSHAKE = "handshake sent"
    """With the cursor stated."""
    UPGRADE_FAILED = "upgrade failed"
    """As `SSE_FAILED`."""
    WEBSOCKET_OPENED = "websocket opened"
    """From this cursor."""
    WEBSOCKET_DROPPED = "websocket dropped"
    """With the close code, 1006 if nobody said goodbye."""
    OVER = "session over"
    """With the error's code, `left` if the application left."""


def turn(before: Phase, after: Phase) -> Turn | None:
    """What a step of the client's machine did to the connection; `None` if nothing worth a line."""
    match before, after:
        case _, Phase.OVER:
            return Turn.OVER
        case Phase.OPENING, Phase.LISTENING:
            return Turn.OPENED
        case Phase.NEW, Phase.LISTENING:
            return Turn.CONTINUED
        case Phase.LISTENING, Phase.STREAMING:
            return Turn.SSE_OPENED
        case Phase.LISTENING, Phase.RESTING:
            return Turn.SSE_FAILED
        case Phase.STREAMING, Phase.RESTING | Phase.LISTENING:
            return Turn.SSE_DROPPED
        case _, Phase.NEGOTIATING:
            return Turn.UPGRADE_ASKED
        case _, Phase.KNOCKING:
            return Turn.HANDSHAKE
        case Phase.KNOCKING, Phase.BRIDGING:
            return Turn.WEBSOCKET_OPENED
        case ((Phase.KNOCKING | Phase.NEGOTIATING), (Phase.STREAMING | Phase.RESTING)):
            return Turn.UPGRADE_FAILED
        case ((Phase.BRIDGING | Phase.BOUND), Phase.RESTING):
            return Turn.WEBSOCKET_DROPPED
        case _:
            return None


class Receipts:
    """A receipts file, open for appending, from within a running event loop.

    What is written waits for at most a second, and is handed to the system in whole lines. It
    survives the death of the process from then on, not that of the machine.

    Raises:
        UsageError: the file cannot be opened, or is another kind of file.
    """

    def __init__(self, path: str | os.PathLike[str]) -> None:
        self._path = os.fspath(path)
        self._buffer = bytearray()
        self._timer: asyncio.TimerHandle | None = None
        self._token: str = ""
        self._session = b""
        self._second: int = 0
        self._date = b""
        try:
            self._file = os.open(path, os.O_RDWR | os.O_APPEND | os.O_CREAT | _BINARY, 0o600)
        except OSError as error:
            raise self._unwritable(error) from None
        try:
            self._look()
        except BaseException:
            os.close(self._file)
            raise

    def _look(self) -> None:
        """Begin a new file; of an old one make sure that it is ours, and that its last line has an end."""
        about = os.fstat(self._file)
        if not stat.S_ISREG(about.st_mode):
            raise UsageError(f"{self._path} is no file to keep receipts in")
        if about.st_size == 0:
            self._buffer += HEADER
            return
        if os.read(self._file, len(HEADER)) != HEADER:
            raise UsageError(f"{self._path} is no receipts file", hint="name a file of its own for receipts")
        os.lseek(self._file, -1, os.SEEK_END)
        if os.read(self._file, 1) != b"\n":
            self._buffer += b"\n"  # its writer died within a line

    def processed(self, id: EventId) -> None:
        """The application has accepted an event.

        Raises:
            UsageError: the file could not be written for so long that too much waits.
        """
        self._add(b"%d.%d.%s" % (id.seq, id.stream, id.link.hex().encode()))
        if len(self._buffer) >= _FULL:
            self.flush()

    def turned(self, token: str, turn: Turn, detail: str) -> None:
        """The connection of the session that `token` names has taken a turn."""
        if token != self._token:
            self._token = token
            self._session = sha256(token.encode(errors="surrogateescape")).hexdigest()[:16].encode()
        self._add(f"{turn} {detail}".rstrip().encode("ascii"))

    def flush(self) -> None:
        """Hand everything to the system.

        Raises:
            UsageError: it takes it not; what is left will be tried again.
        """
        try:
            while self._buffer:
                del self._buffer[: os.write(self._file, self._buffer)]
        except OSError as error:
            raise self._unwritable(error) from None

    def close(self) -> None:
        """Write what waits, and close the file.

        Raises:
            UsageError: it could not be written.
        """
        if self._timer is not None:
            self._timer.cancel()  # the file's number may soon be another file's
        try:
            self.flush()
        finally:
            os.close(self._file)

    def _add(self, text: bytes) -> None:
        now = time.time()
        second = int(now)
        if second != self._second:
            self._second = second
            self._date = time.strftime("%Y-%m-%dT%H:%M:%S", time.gmtime(second)).encode()
        self._buffer += b"%s.%03dZ %s %s\n" % (self._date, (now - second) * 1000, self._session, text)
        if self._timer is None:
            self._timer = asyncio.get_running_loop().call_later(_FLUSH, self._due)

    def _due(self) -> None:
        self._timer = None
        try:
            self.flush()
        except UsageError:
            # Tried again each second; `processed` raises once too much waits.
            self._timer = asyncio.get_running_loop().call_later(_FLUSH, self._due)

    def _unwritable(self, error: OSError) -> UsageError:
        return UsageError(f"cannot write the receipts {self._path}: {error.strerror}")


@dataclass(frozen=True, slots=True)
class Line:
    """One line of a file. `what` is an event that was processed, a turn, or `None`: unreadable."""

    number: int
    at: str
    session: str
    what: EventId | Turn | None
    detail: str


def read_receipts(file: BinaryIO, size: int) -> Iterator[Line]:
    """The lines in the first `size` bytes of a file, one at a time.

    Raises:
        UsageError: it is no receipts file.
    """
    if file.readline(_LONGEST) != HEADER:
        raise UsageError(f"{getattr(file, 'name', 'this')} is no receipts file")
    number, left = 1, size - len(HEADER)
    while left > 0 and (raw := file.readline(min(left, _LONGEST))):
        number, left = number + 1, left - len(raw)
        unfinished = left == 0 and not raw.endswith(b"\n")  # it is being written
        if raw != HEADER and not unfinished:  # two processes may have begun the file at once
            yield _line(number, raw)


def _line(number: int, raw: bytes) -> Line:
    text = raw.decode("ascii", "replace")
    found = _LINE.fullmatch(text.removesuffix("\n")) if text.endswith("\n") else None
    if found is None:
        return Line(number, "", "", None, text)
    at, session, rest = found.groups()
    try:
        return Line(number, at, session, parse_event_id(rest), "")
    except MalformedError:
        pass
    turned = _TURN.fullmatch(rest)
    if turned is None or turned[1] not in set(Turn):
        return Line(number, at, session, None, text)
    return Line(number, at, session, Turn(turned[1]), turned[2] or "")
