"""MCP over stdio: bytes cut into lines, and whom a line that cannot be used is about (W5)."""

from __future__ import annotations

import re
from collections.abc import Iterator
from typing import Final

from gapless.errors import MalformedError
from gapless.protocol.jsonrpc import Envelope, peek

__all__ = ["Lines", "addressed"]

_PEEK: Final = 4096


class Lines:
    """Cuts bytes into lines. Of one above `limit` bytes, it keeps the first and last 4 KiB only."""

    def __init__(self, limit: int) -> None:
        self.limit = limit
        self.size = 0
        self._kept = bytearray()

    @property
    def rest(self) -> bytes:
        """What is kept of the unfinished line, of `size` bytes so far."""
        return bytes(self._kept)

    def feed(self, data: bytes) -> Iterator[tuple[bytes, int]]:
        """Take the next bytes; each line they end, without its LF or CRLF, with its true size."""
        *ends, rest = data.split(b"\n")
        for end in ends:
            if not self.size and len(end) <= self.limit:  # a whole line, as nearly all are
                whole = end.removesuffix(b"\r")
                yield whole, len(whole)
                continue
            self._add(end)
            cr = self._kept.endswith(b"\r")
            yield bytes(self._kept[:-1] if cr else self._kept), self.size - cr
            self._kept.clear()
            self.size = 0
        self._add(rest)

    def _add(self, part: bytes) -> None:
        self._kept += part
        self.size += len(part)
        if self.size > self.limit + 1:  # the limit is on the text, which a CR may follow
            del self._kept[_PEEK:-_PEEK]


_MEMBER: Final = rb'"(jsonrpc|id)"\s*:\s*("(?:[^"\\]|\\.)*"|-?\d+)'
_member: Final = re.compile(_MEMBER)
_head: Final = re.compile(rb'\s*\{\s*((?:%b\s*,\s*)*)"(\w+)"\s*:' % _MEMBER)
_tail: Final = re.compile(rb"((?:,\s*%b\s*)+)\}\s*\Z" % _MEMBER)
_PAYLOADS: Final = {
    **dict.fromkeys((b"result", b"error"), b'"result":0'),
    **dict.fromkeys((b"method", b"params"), b'"method":""'),
}


def addressed(line: bytes) -> Envelope | None:
    """The kind and ID of a request or response that `peek` refuses or the limit cut; else `None`.

    Read off the members before the payload (Python and most other SDKs) and after it
    (TypeScript's): these are the outermost object's for certain, which an `"id":` found just
    anywhere is not.
    """
    head = _head.match(line)
    if head is None:
        return None
    members = dict(_member.findall(head[1]))
    if tail := _tail.search(line, max(0, len(line) - _PEEK)):
        members.update(_member.findall(tail[1]))
    payload = _PAYLOADS.get(head[4])
    if payload is None or b"id" not in members or members.get(b"jsonrpc") != b'"2.0"':
        return None
    try:
        return peek(b'{"jsonrpc":"2.0","id":%b,%b}' % (members[b"id"], payload))
    except MalformedError:  # an ID that no request of ours has
        return None
