"""Event-stream blocks (W1–W4): one encoder, one incremental decoder, for SSE and WebSocket alike."""

from __future__ import annotations

import re
from binascii import hexlify
from collections.abc import Iterable
from functools import lru_cache
from itertools import count
from typing import Final

import msgspec

from gapless.errors import MalformedError, TooLargeError
from gapless.protocol.cursor import EventId, Link

__all__ = [
    "BLOCK_OVERHEAD",
    "COMMENT",
    "Block",
    "BlockDecoder",
    "encode_block",
    "encode_event",
    "encode_events",
    "encode_prime",
]

COMMENT: Final = b":\n\n"
"""The keep-alive of an event stream (C8): a comment, no event, no ID."""

BLOCK_OVERHEAD: Final = 1024
"""Bytes that a block's field names, ID and type may add to its JSON text (W5)."""

MESSAGE: Final = "message"


class Block(msgspec.Struct, frozen=True):
    """One decoded block. `data` is the data lines joined by LF; `None` where there was no data line."""

    event: str = MESSAGE
    id: str | None = None
    data: bytes | None = None
    retry: int | None = None


def encode_event(event_id: EventId, event: str, data: bytes) -> bytes:
    """A log event in wire form; `event:` is omitted for `message` (W1). `data` is one line."""
    return encode_events(event_id.seq, event_id.stream, event, (event_id.link,), (data,))[0]


def encode_events(
    seq: int, stream: int, event: str, links: Iterable[Link], run: Iterable[bytes]
) -> list[bytes]:
    """A run of log events from number `seq` on, each in wire form."""
    form = _form(stream, event)
    return [form % (at, hexlify(link), data) for at, link, data in zip(count(seq), links, run, strict=False)]


@lru_cache(256)
def _form(stream: int, event: str) -> bytes:
    """What all events of a type and stream have in common; number, link and data are to be filled in."""
    kind = b"" if event == MESSAGE else b"event: %b\n" % event.encode().replace(b"%", b"%%")
    return b"id: %%d.%d.%%b\n%bdata: %%b\n\n" % (stream, kind)


def encode_block(event: str, data: bytes, id: str | None = None) -> bytes:
    """A block that is no log event: control (W3), or a client's (W2)."""
    head = b"" if id is None else b"id: %s\n" % id.encode()
    if event != MESSAGE:
        head += b"event: %s\n" % event.encode()
    return b"%sdata: %s\n\n" % (head, data)


def encode_prime(cursor: EventId | None, retry_ms: int) -> bytes:
    """The block that opens a stream (C6), or, without a cursor, the `retry:` that precedes an end."""
    head = b"" if cursor is None else b"id: %s\n" % str(cursor).encode()
    tail = b"" if cursor is None else b"data: \n"
    return b"%sretry: %d\n%s\n" % (head, retry_ms, tail)


_LINE_END = re.compile(rb"\r\n|\n|\r")
_EVENT = re.compile(rb"id: ([^\n]+)\n(?:event: ([^\n]+)\n)?data: ([^\n]*)\n\n")
"""A block as `encode_event` writes it, among bytes without NUL and CR: read at a stroke, for it is what
nearly all that comes is made of. (To look for one byte is much quicker than to look for one of three.)"""
_BOM: Final = b"\xef\xbb\xbf"


class BlockDecoder:
    """Decodes blocks from bytes split anywhere (W4).

    Accepts LF, CR and CRLF (a CRLF split across two feeds too), one leading BOM, several
    data lines; splits on nothing but CR and LF; ignores IDs that hold NUL, unknown fields
    and comments; drops an unterminated tail.

    Args:
        limit: the most bytes one block may take; above it `TooLargeError`.
    """

    __slots__ = (
        "_after_cr",
        "_buffer",
        "_data",
        "_event",
        "_id",
        "_limit",
        "_retry",
        "_seen",
        "_size",
        "_started",
    )

    def __init__(self, limit: int) -> None:
        self._limit = limit
        self._buffer = bytearray()
        self._started = False
        self._after_cr = False
        self._reset()

    def _reset(self) -> None:
        self._event = MESSAGE
        self._id: str | None = None
        self._data: list[bytes] = []
        self._retry: int | None = None
        self._seen = False
        self._size = 0

    def feed(self, chunk: bytes) -> list[Block]:
        """Take bytes, return the blocks they complete.

        Raises:
            TooLargeError: a block above the limit; the decoder is then spent.
            MalformedError: a block whose text is not UTF-8.
        """
        if not self._started:
            chunk = bytes(self._buffer) + chunk
            self._buffer.clear()
            if len(chunk) < len(_BOM) and _BOM.startswith(chunk):
                self._buffer += chunk
                return []
            self._started = True
            chunk = chunk.removeprefix(_BOM)
        if self._after_cr and chunk:
            self._after_cr = False
            chunk = chunk.removeprefix(b"\n")
        blocks: list[Block] = []
        start = 0
        plain = b"\r" not in chunk and b"\0" not in chunk
        while True:
            if plain and not self._size and not self._buffer:
                start = self._events(chunk, start, blocks)
            # Only what is new is searched, however long the line that it belongs to has grown.
            match = _LINE_END.search(chunk, start)
            if match is None:
                break
            line = chunk[start : match.start()]
            start = match.end()
            if self._buffer:
                line = bytes(self._buffer) + line
                self._buffer.clear()
            self._size += len(line) + 1
            if self._size > self._limit:
                raise TooLargeError(f"a block is larger than the limit of {self._limit} bytes")
            if line:
                self._field(line)
            else:
                if self._seen:
                    blocks.append(self._block())
                self._reset()
        if start and start == len(chunk) and chunk.endswith(b"\r"):
            self._after_cr = True
        self._buffer += chunk[start:]
        if self._size + len(self._buffer) > self._limit:
            raise TooLargeError(f"a block is larger than the limit of {self._limit} bytes")
        return blocks

    @property
    def pending(self) -> bool:
        """Whether bytes of an unfinished block are held (an unterminated tail, if the stream ends now)."""
        return bool(self._buffer) or self._seen

    def _events(self, chunk: bytes, start: int, blocks: list[Block]) -> int:
        """Decode events from `start` on; where the first begins that is something else, or not whole."""
        while match := _EVENT.match(chunk, start):
            if match.end() - start > self._limit:
                raise TooLargeError(f"a block is larger than the limit of {self._limit} bytes")
            id, event, data = match.groups()
            blocks.append(Block(MESSAGE if event is None else _text(event), _text(id), data))
            start = match.end()
        return start

    def _block(self) -> Block:
        data = b"\n".join(self._data) if self._data else None
        return Block(self._event, self._id, data, self._retry)

    def _field(self, line: bytes) -> None:
        name, colon, value = line.partition(b":")
        if colon and not name:
            return
        if value.startswith(b" "):
            value = value[1:]
        if name == b"data":
            self._data.append(value)
        elif name == b"id":
            if b"\0" not in value:
                self._id = _text(value)
        elif name == b"event":
            self._event = _text(value) or MESSAGE
        elif name == b"retry":
            if value.isdigit() and len(value) < 16:
                self._retry = int(value)
        else:
            return
        self._seen = True


def _text(value: bytes) -> str:
    try:
        return value.decode()
    except UnicodeDecodeError:
        raise MalformedError("an ID or event type is not UTF-8") from None
