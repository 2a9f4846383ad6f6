"""HTTP/1.1 on a link: where messages begin and end, and the two lanes that know it."""

from __future__ import annotations

import asyncio
import re
import sys
from collections import deque
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from functools import partial
from http import HTTPStatus
from http.client import responses as PHRASES
from typing import Final, Literal

from gapless.torture.link import Direction, End, Hooks, Lane

__all__ = ["Head", "Messages", "Part", "Requests", "Responses", "encode_answer"]

_MOST_HEAD: Final = 64 * 1024
"""Bytes of a head; what has more is opaque."""

_GATHERED: Final = 8 * 1024 * 1024
"""Bytes of a request that is repeated, or of a response that is buffered, at most."""

_HOP_BY_HOP: Final = frozenset({"connection", "upgrade", "keep-alive", "proxy-connection", "te"})

_START: Final = {
    "request": re.compile(rb"(?P<method>[A-Z]{1,24}) (?P<target>\S+) HTTP/1\.[01]\r\n"),
    "response": re.compile(rb"HTTP/1\.[01] (?P<status>[1-9]\d\d)(?: [^\r\n]*)?\r\n"),
}
_SO_FAR: Final = {
    "request": re.compile(rb"[A-Z]{1,24}(?: (?:\S+(?: [HTP/1.0]{0,8}\r?)?)?)?"),
    "response": re.compile(rb"H|HT|HTT|HTTP|HTTP/|HTTP/1|HTTP/1\.|HTTP/1\.[01](?: [^\r\n]*\r?)?"),
}


@dataclass(frozen=True, slots=True)
class Head:
    """The head of a message, down to its blank line.

    Attributes:
        headers: by lower-case name; those that came several times are joined by commas.
        method: of a request, as `target` is.
        status: of a response.
    """

    raw: bytes
    headers: Mapping[str, str]
    method: str = ""
    target: str = ""
    status: int = 0

    @classmethod
    def parse(cls, raw: bytes, start: re.Match[bytes]) -> Head:
        """Read the header lines. Those that are none are passed over."""
        headers: dict[str, str] = {}
        for line in raw.split(b"\r\n")[1:]:
            name, colon, value = line.decode("latin-1").partition(":")
            if colon:
                key = name.lower()
                text = value.strip()
                headers[key] = f"{headers[key]}, {text}" if key in headers else text
        words = {name: value.decode("latin-1") for name, value in start.groupdict().items()}
        return cls(
            raw, headers, words.get("method", ""), words.get("target", ""), int(words.get("status", 0))
        )

    @property
    def interim(self) -> bool:
        """Whether it is a response (100, 103) that another one follows."""
        return 100 <= self.status < 200 and self.status != HTTPStatus.SWITCHING_PROTOCOLS

    @property
    def connection(self) -> frozenset[str]:
        """The names that its `Connection` header lists."""
        return frozenset(word.strip() for word in self.headers.get("connection", "").lower().split(","))

    def without(self, names: frozenset[str]) -> bytes:
        """The head without these header lines, named in lower case."""
        first, *lines = self.raw.split(b"\r\n")
        kept = [line for line in lines if line.partition(b":")[0].decode("latin-1").lower() not in names]
        return b"\r\n".join([first, *kept])


@dataclass(frozen=True, slots=True)
class Part:
    """Some of the bytes, in order.

    Attributes:
        head: the head that these bytes end, if they end one.
        last: whether they end a message. An interim response (100, 103) is none.
    """

    data: bytes
    head: Head | None = None
    last: bool = False


class Messages:
    """Splits one direction of a connection into messages.

    Once something comes that is no HTTP/1.1 message, or has a head of more than 64 KiB, all is opaque.

    Args:
        kind: which direction it is.
        whole: keep the bytes of a head until it is complete, so that it is one `Part`. May be set
            later; it then counts from the next head on.
    """

    def __init__(self, kind: Literal["request", "response"], *, whole: bool) -> None:
        self._kind = kind
        self.whole = whole
        self.opaque = False
        """Set when what follows is no HTTP."""
        self.asked: deque[str] = deque()
        """For responses: the methods of the requests that they answer."""
        self._head = b""
        self._kept = whole
        self._body: _Counted | _Chunked | None = None

    def feed(self, data: bytes) -> Iterator[Part]:
        """The parts that these bytes make. May be left, and `opaque` set, between two of them."""
        while data:
            if self.opaque:
                yield Part(self.rest() + data)
                return
            try:
                part, data = (
                    self._head_part(data) if self._body is None else self._body_part(self._body, data)
                )
            except ValueError:
                self.opaque = True
                continue
            if part.data:
                yield part

    def rest(self) -> bytes:
        """Give up what is kept of an incomplete head."""
        kept, self._head = (self._head if self._kept else b""), b""
        return kept

    def _head_part(self, data: bytes) -> tuple[Part, bytes]:
        before = len(self._head)
        if not before:
            self._kept = self.whole
        text = self._head + data
        start = _START[self._kind].match(text)
        if start is None and not _SO_FAR[self._kind].fullmatch(text):
            raise ValueError("no message begins like this")
        end = text.find(b"\r\n\r\n", max(0, before - 3)) + 4
        if start is None or end < 4:
            if len(text) > _MOST_HEAD:
                raise ValueError("the head is too long")
            self._head = text
            return Part(b"" if self._kept else data), b""
        head = Head.parse(text[:end], start)
        body, final = self._framing(head)
        self._body = body
        self._head = b""
        return Part(text[0 if self._kept else before : end], head, final and body is None), text[end:]

    def _body_part(self, body: _Counted | _Chunked, data: bytes) -> tuple[Part, bytes]:
        count, last = body.take(data)
        if last:
            self._body = None
        return Part(data[:count], last=last), data[count:]

    def _framing(self, head: Head) -> tuple[_Counted | _Chunked | None, bool]:
        """How the body is delimited, if there is any, and whether this is more than an interim response."""
        response = self._kind == "response"
        if response:
            if head.interim:
                return None, False
            method = self.asked.popleft() if self.asked else ""
            if head.status == HTTPStatus.SWITCHING_PROTOCOLS:
                self.opaque = True
                return None, True
            if method == "HEAD" or head.status in (HTTPStatus.NO_CONTENT, HTTPStatus.NOT_MODIFIED):
                return None, True
        if "chunked" in head.headers.get("transfer-encoding", "").lower():
            return _Chunked(), True
        length = int(head.headers.get("content-length", sys.maxsize if response else 0))
        return (_Counted(length) if length > 0 else None), True


class _Counted:
    """A body of so many bytes."""

    def __init__(self, left: int) -> None:
        self._left = left

    def take(self, data: bytes) -> tuple[int, bool]:
        """How many of these bytes belong to it, and whether they end it."""
        count = min(self._left, len(data))
        self._left -= count
        return count, not self._left


class _Chunked:
    """A chunked body, trailers included."""

    def __init__(self) -> None:
        self._left = 0
        self._line = b""
        self._trailing = False

    def take(self, data: bytes) -> tuple[int, bool]:
        """As `_Counted.take`.

        Raises:
            ValueError: this is no chunk.
        """
        at = 0
        while at < len(data):
            if self._left:
                count = min(self._left, len(data) - at)
                self._left -= count
                at += count
                continue
            end = data.find(b"\n", at)
            if end < 0:
                self._line += data[at:]
                if len(self._line) > _MOST_HEAD:
                    raise ValueError("the line is too long")
                break
            line, self._line, at = (self._line + data[at:end]).strip(), b"", end + 1
            if self._trailing and not line:
                return at, True
            if not self._trailing:
                size = int(line.partition(b";")[0], 16)
                if size < 0:
                    raise ValueError("that is no size")
                self._trailing = not size
                self._left = size + 2 if size else 0
        return len(data), False


def encode_answer(status: int, content_type: str, body: bytes, headers: Mapping[str, str]) -> bytes:
    """A whole response, after which the connection ends."""
    fields = {"content-type": content_type, "content-length": str(len(body)), "connection": "close"}
    fields.update((name.lower(), value) for name, value in headers.items())
    lines = [f"HTTP/1.1 {status} {PHRASES.get(status, '')}", *(f"{name}: {fields[name]}" for name in fields)]
    return "\r\n".join(lines).encode("latin-1") + b"\r\n\r\n" + body


class Requests(Lane):
    """The lane to the server. It knows where requests begin and end.

    Attributes:
        strips: header lines to take out of the next request, by lower-case name.
        strips_upgrade: take those out of the next handshake that make it one.
        answer: what to answer the next request with, instead of forwarding it.
        repeats: whether to send the next request once more.

    Args:
        asked: called with the head of every request, before anything of it is forwarded.
        again: called with method and bytes of a request that was forwarded and is to be repeated.
    """

    responses: Responses

    def __init__(
        self,
        reader: asyncio.StreamReader,
        writer: asyncio.StreamWriter,
        hooks: Hooks,
        asked: Callable[[Head], None],
        again: Callable[[str, bytes], None],
    ) -> None:
        super().__init__(Direction.TO_SERVER, reader, writer, hooks)
        self._asked = asked
        self._again = again
        self.messages = Messages("request", whole=True)
        self.strips: set[str] = set()
        self.strips_upgrade = False
        self.answer: bytes | None = None
        self.repeats = False
        self._method = ""
        self._copy: bytearray | None = None

    async def _forward(self, data: bytes) -> None:
        out = b""
        for part in self.messages.feed(data):
            piece = part.data
            if part.head is not None:
                # What is done about a request is not done to the one before.
                await self._send(out)
                out = b""
                if not self._dropped:
                    self._ask(part.head)
                if self._dropped:
                    return
                piece = self._rewritten(part.head)
            out += piece
            if self._copy is not None:
                self._copy += piece
                if len(self._copy) > _GATHERED:
                    self._copy = None
                elif part.last:
                    await self._send(out)
                    out = b""
                    self._repeat(bytes(self._copy))
                    self._copy = None
        await self._send(out)

    def _ask(self, head: Head) -> None:
        self._strike(partial(self._asked, head))
        self._method = head.method
        self.responses.messages.asked.append(head.method)
        if self.answer is not None:
            self.responses.say(self.answer)
            self._drop()
        if self.repeats:
            self.repeats = False
            self._copy = bytearray()

    def _rewritten(self, head: Head) -> bytes:
        names = frozenset(self.strips)
        self.strips.clear()
        if self.strips_upgrade and "upgrade" in head.headers:
            self.strips_upgrade = False
            names |= _HOP_BY_HOP | head.connection
        return head.without(names) if names else head.raw

    def _repeat(self, request: bytes) -> None:
        if not self.swallowing and not self._dropped:
            self._again(self._method, request)

    def _rest(self) -> bytes:
        return self.messages.rest()


class Responses(Lane):
    """The lane to the client. It knows where responses begin and end.

    Attributes:
        strips: header lines to take out of the next response, by lower-case name.
        buffering: keep what comes until the response has ended.
    """

    requests: Requests

    def __init__(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter, hooks: Hooks) -> None:
        super().__init__(Direction.TO_CLIENT, reader, writer, hooks)
        self.messages = Messages("response", whole=False)
        self.buffering = False
        self._buffer = bytearray()
        self._strips: frozenset[str] = frozenset()

    def couple(self, requests: Requests) -> None:
        """Make these the two lanes of one link."""
        self.requests, requests.responses = requests, self
        self.opposite, requests.opposite = requests, self

    def strip(self, names: frozenset[str]) -> None:
        """Take header lines, named in lower case, out of the next response."""
        self._strips |= names
        self.messages.whole = True

    def say(self, answer: bytes) -> None:
        """Send this, and then an end."""
        self._put(answer)
        self._put(End.FIN)

    async def _forward(self, data: bytes) -> None:
        out = b""
        for part in self.messages.feed(data):
            piece = part.data
            if part.head is not None:
                if part.head.status == HTTPStatus.SWITCHING_PROTOCOLS:
                    self.requests.messages.opaque = True
                if self._strips and not part.head.interim and len(piece) == len(part.head.raw):
                    piece = part.head.without(self._strips)
                    self._strips, self.messages.whole = frozenset(), False
            if self.buffering:
                self._buffer += piece
                piece = b""
                if part.last or len(self._buffer) > _GATHERED:
                    self.buffering = False
                    piece = self._emptied()
            out += piece
        await self._send(out)

    def _emptied(self) -> bytes:
        whole = bytes(self._buffer)
        self._buffer.clear()
        return whole

    def _rest(self) -> bytes:
        return self._emptied() + self.messages.rest()

    async def _finish(self, end: End) -> None:
        # A proxy that buffers passes on what it has, however that ended.
        await super()._finish(End.FIN if self.buffering else end)
