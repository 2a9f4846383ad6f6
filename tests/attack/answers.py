"""The answers on one connection, taken apart as they come: what is none shows, wherever it is."""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, Final, cast

import msgspec

__all__ = ["Answer", "Answers"]

_LINE: Final = re.compile(rb"HTTP/1\.[01] ([1-5]\d\d) [^\r\n]*")
_SIZE: Final = re.compile(rb"[0-9a-fA-F]{1,8}")
_UNREAD: Final = (400, 408, 414, 431)
_KEPT: Final = 64 * 1024
"""Bytes of an event stream that are kept."""


@dataclass(slots=True)
class Answer:
    """One answer.

    Attributes:
        status: its status.
        headers: by lower-case name.
        body: what has come of its body; of an event stream the first 64 KiB.
        whole: whether it has ended.
    """

    status: int
    headers: dict[bytes, bytes]
    body: bytearray = field(default_factory=bytearray)
    whole: bool = False

    @property
    def kind(self) -> bytes:
        """The media type of its body."""
        return self.headers.get(b"content-type", b"").partition(b";")[0].strip().lower()

    @property
    def streams(self) -> bool:
        """Whether it is an event stream."""
        return self.kind == b"text/event-stream"

    @property
    def closes(self) -> bool:
        """Whether it says that it is the last one of its connection."""
        return b"close" in self.headers.get(b"connection", b"").lower()

    def refusal(self) -> dict[str, Any]:
        """The `data` of the refusal that its body is; empty if it is none."""
        if self.kind != b"application/json":
            return {}
        found: Any = None
        try:
            found = msgspec.json.decode(self.body)
        except (msgspec.DecodeError, UnicodeDecodeError):
            return {}
        for name in ("error", "data"):
            found = cast("dict[str, Any]", found).get(name) if isinstance(found, dict) else None
        return cast("dict[str, Any]", found) if isinstance(found, dict) else {}


class Answers:
    """Takes an answer after another out of the bytes that come.

    Attributes:
        whole: the answers that have ended.
        open: the one that has not.
        wrong: what came that is no part of an answer, if that happened; nothing is read after that.
        switched: whether the connection has become a WebSocket; `rest` has what came since.
    """

    def __init__(self, methods: Sequence[bytes]) -> None:
        self.whole: list[Answer] = []
        self.open: Answer | None = None
        self.wrong = b""
        self.switched = False
        self.rest = b""
        self._methods = methods
        self._left: int | None = None
        """Bytes of the body, or of the chunk, that are to come; `None`: until the connection ends."""
        self._chunked = False
        self._unsure = False

    @property
    def streaming(self) -> bool:
        """Whether an event stream is running."""
        return self.open is not None and self.open.streams

    def feed(self, data: bytes) -> None:
        """Take what has come."""
        self.rest += data
        while self.rest and not self.wrong and not self.switched and self._step():
            pass

    def end(self) -> None:
        """The connection has ended."""
        if self.open is not None and (self._left is None or self._unsure) and not self._chunked:
            self._ended()

    def _step(self) -> bool:
        """Whether there was enough of it for a step."""
        if self.open is None:
            return self._head()
        if self._chunked and not self._left:
            return self._chunk()
        count = len(self.rest) if self._left is None else min(self._left, len(self.rest))
        self._keep(self.rest[:count])
        self.rest = self.rest[count:]
        if self._left is not None:
            self._left -= count
            if not self._left and not self._chunked:
                self._ended()
        return True

    def _keep(self, data: bytes) -> None:
        assert self.open is not None
        if not self.open.streams or len(self.open.body) < _KEPT:
            self.open.body += data

    def _head(self) -> bool:
        head, blank, rest = self.rest.partition(b"\r\n\r\n")
        if not blank:
            if b"HTTP/1.1 "[: len(head)] != head[:9] or len(head) > _KEPT:
                self.wrong = head[:200]
            return False
        line, *lines = head.split(b"\r\n")
        start = _LINE.fullmatch(line)
        if start is None:
            self.wrong = head[:200]
            return False
        self.rest = rest
        status = int(start[1])
        if status == 101:
            self.switched = True
        if status == 100:
            return True
        headers: dict[bytes, bytes] = {}
        for one in lines:
            name, _, value = one.partition(b":")
            headers[name.lower()] = value.strip()
        self.open = Answer(status, headers)
        index = len(self.whole)
        method = self._methods[index] if index < len(self._methods) else b""
        self._chunked, self._left = False, None
        # Whoever refuses what it cannot read does not know that it is a HEAD, and may well add a body.
        self._unsure = method == b"HEAD" and status in _UNREAD and self.open.closes
        if (method == b"HEAD" and not self._unsure) or status in (101, 204, 304):
            self._ended()
        elif headers.get(b"transfer-encoding", b"").lower() == b"chunked":
            self._chunked, self._left = True, 0
        elif b"content-length" in headers:
            self._left = int(headers[b"content-length"])
            if not self._left:
                self._ended()
        return True

    def _chunk(self) -> bool:
        """The head of a chunk, with the end of the one before."""
        if self.rest.startswith(b"\r\n"):
            self.rest = self.rest[2:]
        size, end, rest = self.rest.partition(b"\r\n")
        if not end:
            return False
        if _SIZE.fullmatch(size) is None:
            self.wrong = self.rest[:200]
            return False
        self._left = int(size, 16)
        if self._left:
            self.rest = rest
            return True
        if len(rest) < 2:
            return False
        self.rest = rest[2:]
        self._ended()
        return True

    def _ended(self) -> None:
        assert self.open is not None
        self.open.whole = True
        self.whole.append(self.open)
        self.open = None
