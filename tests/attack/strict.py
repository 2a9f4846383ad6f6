"""How many requests there are in the bytes of one connection, as the strictest reader has it (RFC 9112).

A server may refuse more than this reader does. It may never answer more: whoever sits in front of it,
and counts as this reader does, would give somebody else the answer that is too many.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Final

__all__ = ["Rest", "Sent", "read_requests"]

_TOKEN: Final = rb"[!#$%&'*+.^_`|~0-9A-Za-z-]+"
_LINE: Final = re.compile(rb"(" + _TOKEN + rb") +[\x21-\x7e]+ +(?:HTTP|RTSP)/1\.([01])")
"""Several spaces are one to some readers (RFC 9112 §3), and relatives of HTTP are HTTP: no end moves."""
_FIELD: Final = re.compile(rb"(" + _TOKEN + rb"):[ \t]*([^\x00-\x08\x0a-\x1f\x7f]*?)[ \t]*")
_LENGTH: Final = re.compile(rb"[0-9]{1,20}")
_SIZE: Final = re.compile(rb"([0-9a-fA-F]{1,15})[ \t]*(;[^\x00-\x08\x0a-\x1f\x7f]*)?")


class Rest:
    """What follows the last request that is whole."""

    NOTHING: Final = "nothing"
    MORE: Final = "the beginning of a request, or something that is none"
    CLOSED: Final = "what nobody reads: the request before asked for the end of the connection"
    OTHER: Final = "another protocol"


@dataclass(frozen=True, slots=True)
class Sent:
    """What was sent on one connection.

    Attributes:
        methods: of the requests that are whole, in order.
        rest: what follows them, one of `Rest`.
        heads: how many requests have a head that is whole; one more than `methods`, or as many.
        following: the method of the request whose head is whole and whose body is not; else empty.
    """

    methods: list[bytes]
    rest: str
    following: bytes = b""

    @property
    def heads(self) -> int:
        """How many requests have a head that is whole."""
        return len(self.methods) + bool(self.following)


class _Broken(Exception):
    pass


def read_requests(data: bytes) -> Sent:
    """Read everything that was sent on a connection."""
    methods: list[bytes] = []
    following = b""
    try:
        for method, rest in _requests(data):
            if method is None:
                return Sent(methods, rest, following)
            following = b""
            if rest == Rest.MORE:
                following = method
                continue
            methods.append(method)
            if rest != Rest.NOTHING:
                return Sent(methods, rest)
    except _Broken:
        return Sent(methods, Rest.MORE, following)
    return Sent(methods, Rest.NOTHING)


def _requests(data: bytes) -> Iterator[tuple[bytes | None, str]]:
    """Each request, as soon as its head is whole (`MORE`), and as it ends; `None` if one is broken off."""
    at, size = 0, len(data)
    while True:
        while data.startswith((b"\r", b"\n"), at):  # between requests nothing is moved by it
            at += 1
        if at >= size:
            return
        end = data.find(b"\r\n\r\n", at)
        if end < 0:
            yield None, Rest.MORE
            return
        line, *fields = data[at:end].split(b"\r\n")
        at = end + 4
        start = _LINE.fullmatch(line)
        if start is None:
            raise _Broken
        method, old = start[1], start[2] == b"0"
        length, codings, words, upgrade = 0, b"", b"", b""
        counted = False
        for field in fields:
            found = _FIELD.fullmatch(field)
            if found is None:
                raise _Broken
            name, value = found[1].lower(), found[2]
            if name == b"content-length":
                if counted or _LENGTH.fullmatch(value) is None:
                    raise _Broken
                length, counted = int(value), True
            elif name == b"transfer-encoding":
                codings += b"," + value.lower()
            elif name == b"connection":
                words += b"," + value.lower()
            elif name == b"upgrade":
                upgrade = value.lower()
        coded = bool(codings)
        if coded:
            named = [coding.strip(b" \t") for coding in codings.split(b",")]
            if counted or old or named.count(b"chunked") != 1 or named[-1] != b"chunked":
                raise _Broken
        yield method, Rest.MORE
        if coded:
            at = _chunked(data, at)
        elif length:
            at = at + length if at + length <= size else -1
        if at < 0:
            yield None, Rest.MORE
            return
        asked = {word.strip() for word in words.split(b",")}
        if method == b"CONNECT" or (upgrade == b"websocket" and b"upgrade" in asked):
            yield method, Rest.OTHER
        elif b"close" in asked or (old and b"keep-alive" not in asked):
            yield method, Rest.CLOSED
        else:
            yield method, Rest.NOTHING


def _chunked(data: bytes, at: int) -> int:
    """Where a chunked body ends; -1 if it does not."""
    while True:
        end = data.find(b"\r\n", at)
        if end < 0:
            return -1
        size = _SIZE.fullmatch(data, at, end)
        if size is None:
            raise _Broken
        at = end + 2
        count = int(size[1], 16)
        if not count:
            break
        if at + count + 2 > len(data):
            return -1
        if data[at + count : at + count + 2] != b"\r\n":
            raise _Broken
        at += count + 2
    while True:
        end = data.find(b"\r\n", at)
        if end < 0:
            return -1
        if end == at:
            return end + 2
        if _FIELD.fullmatch(data, at, end) is None:
            raise _Broken
        at = end + 2
