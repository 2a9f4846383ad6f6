"""Bytes of an event stream, split anywhere: the decoder reads them, or says what is wrong (W4, W5)."""

from __future__ import annotations

from gapless.errors import MalformedError, TooLargeError
from gapless.protocol.block import COMMENT, Block, BlockDecoder, encode_block, encode_event, encode_prime
from gapless.protocol.cursor import EventId, Link

__all__ = ["SEEDS", "target"]

_ID = EventId(47, 0, Link(bytes.fromhex("a193f6b6c59d5344")))
_STREAM = b"".join(
    [
        encode_prime(_ID, 100),
        encode_block("received", b'{"received":3}'),
        encode_event(_ID, "message", '{"jsonrpc":"2.0","method":"é\u2028"}'.encode()),
        encode_event(_ID, "upgrade-accepted", b'{"negotiation":"n1","ticket":null,"url":"/"}'),
        COMMENT,
        encode_prime(None, 30_000),
    ]
)

SEEDS = (
    b"\x00\x05\xff" + _STREAM,
    b"\x40\x01\xff" + _STREAM.replace(b"\n", b"\r\n"),
    b"\x07\x02\xff" + _STREAM.replace(b"\n", b"\r"),
    b"\x03\x03\x20\xef\xbb\xbfdata: a\ndata\ndata: b\r\n\r\ndata: unterminated",
    b"\x01\x01\x10id: 1\0\nid\nevent: \nretry: 15\nretry: x\n: comment\nnovelty: 1\n\n",
)


def _read(chunks: list[bytes], limit: int) -> list[Block] | type[Exception]:
    decoder = BlockDecoder(limit)
    try:
        return [block for chunk in chunks for block in decoder.feed(chunk)]
    except (MalformedError, TooLargeError) as error:
        return type(error)


def target(data: bytes) -> None:
    """Two bytes say where to split, one how much a block may take; the rest is the stream."""
    at, step, limit = (*data[:3], 0, 0, 0)[:3]
    text = data[3:]
    whole = _read([text], limit * 4)
    assert _read([text[:at], text[at:]], limit * 4) == whole
    assert _read([text[n : n + 1 + step] for n in range(0, len(text), 1 + step)], limit * 4) == whole
