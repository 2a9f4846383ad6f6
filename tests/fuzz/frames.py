"""Frames from a client, as a bound socket takes them: messages, acks, and what is neither (W2, W5)."""

from __future__ import annotations

from gapless.protocol.block import BlockDecoder, encode_block
from tests.fuzz.serving import Served, run, serve

__all__ = ["SEEDS", "target"]

_CALL = b'{"jsonrpc":"2.0","id":1,"method":"tools/call","params":{"name":"t"}}'
_NOTE = '{"jsonrpc":"2.0","method":"notifications/é\u2028"}'.encode()
_ACK = encode_block("cursor-ack", b'{"cursor":"$C"}')

SEEDS = (
    b"\x1e".join([_ACK, encode_block("message", _CALL, "1"), encode_block("message", _NOTE, "2")]),
    encode_block("message", _CALL, "1") + encode_block("message", _NOTE, "2") + _ACK,
    b"\x1e".join([encode_block("message", _CALL, "2"), encode_block("message", _CALL, "1"), _ACK]),
    b"\x1e".join([encode_block("message", _CALL, "1"), encode_block("message", _NOTE, "1")]),
    b"\x1e".join([encode_block("message", b"", "1"), encode_block("probe-ack", b'{"nonce":"x"}')]),
    b"\x1e".join(
        [encode_block("message", b'[{"jsonrpc":"2.0"}]', "1"), encode_block("message", b"NaN", "2")]
    ),
    encode_block("message", b'{"jsonrpc":"2.0","id":7,"method":"m","params":{"x":NaN,"y":"\\ud800"}}', "1"),
    encode_block("message", _CALL.replace(b'"t"', b'"' + b"x" * 600 + b'"'), "1"),
    encode_block("message", _CALL, "x") + encode_block("message", _CALL),
    encode_block("cursor-ack", b'{"cursor":"0"}') + encode_block("cursor-ack", b'{"cursor":7}'),
    encode_block("cursor-ack", b'{"cursor":"99.0.a193f6b6c59d5344"}'),
    encode_block("cursor-ack", b'{"cursor":' + b"[" * 1200),
    encode_block("message", b"x" * 2000, "1"),
    b"data: unterminated",
    b"id: 1\r\ndata: {\rdata: }\r\n\r\n",
    b"\xff\xfe",
)

_CLOSES = {None, 1003, 1009, 1013, 4400, 4409}
"""Nothing, or one of the codes of §8 that a frame can earn."""


def target(data: bytes) -> None:
    """Frames, with 0x1e between them; one that is not UTF-8 is binary. `$C` is a cursor of the session's."""
    run(_speak(data.split(b"\x1e")[:16]))


async def _speak(parts: list[bytes]) -> None:
    async with serve() as served:
        cursor = await _somewhere(served) if any(b"$C" in part for part in parts) else ""
        frames = [_frame(part.replace(b"$C", cursor.encode())) for part in parts]
        written, code = await served.speak(frames)
        assert code in _CLOSES, code
        for text in written:
            decoder = BlockDecoder(1 << 20)
            assert decoder.feed(text.encode()), "W1: a frame holds whole blocks"
            assert not decoder.pending
        _, code = await served.speak([])
        assert code is None, "it cost nothing but that connection"


async def _somewhere(served: Served) -> str:
    """The ID of an event that is there."""
    written, _ = await served.speak([])
    ids = [block.id for text in written for block in BlockDecoder(1 << 20).feed(text.encode())]
    return next(id for id in reversed(ids) if id is not None)


def _frame(data: bytes) -> str | bytes:
    try:
        return data.decode()
    except UnicodeDecodeError:
        return data
