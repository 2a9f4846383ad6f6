"""Blocks from a server, as the client takes them: it follows, or drops the connection (C7, U2, U3)."""

from __future__ import annotations

from gapless.errors import MalformedError, TooLargeError
from gapless.protocol.block import BlockDecoder, encode_block, encode_event, encode_prime
from gapless.protocol.client import Client, Phase
from gapless.protocol.cursor import EventId
from gapless.protocol.moves import Move, SocketOpened, StreamEnded, StreamOpened
from gapless.protocol.phases import CARRYING
from tests.client.machine import Hand, event_data

__all__ = ["SEEDS", "target"]


def _wire(count: int, last: str = "message", data: bytes | None = None) -> bytes:
    """Events that follow the start, in wire form."""
    hand, out = Hand(Client()), b""
    for n in range(1, count + 1):
        kind, text = ("message", event_data(n)) if n < count else (last, data or event_data(n))
        hand.emit(text, kind)
        out += encode_event(hand.id(n), kind, text)
    return out


_START: EventId = Hand(Client()).id(0)
_PRIME = encode_prime(_START, 100) + encode_block("received", b'{"received":0}')
_ECHO = encode_block("resume-cursor", b'{"cursor":2,"from":"%s","received":0}' % str(_START).encode())
_OFFER = b'{"negotiation":"n","ticket":"t","url":"/mcp"}'
_RESULT = b'{"jsonrpc":"2.0","id":1,"result":{}}'
_REFUSED = b'{"n":1,"reason":"too-large","error":{"code":-32000,"message":"","data":{"reason":"too-large"}}}'

SEEDS = (
    b"\x00" + _PRIME + _wire(3),
    b"\x00" + _wire(1) + _PRIME,
    b"\x00" + _PRIME + _wire(2, "message", _RESULT) + b":\n\n" + encode_block("keepalive", b"{}"),
    b"\x01" + _PRIME + _wire(2, "upgrade-accepted", _OFFER),
    b"\x01" + _PRIME + _wire(2, "upgrade-accepted", b"no JSON"),
    b"\x01" + _PRIME + _wire(2, "session-superseded", b'{"reason":"session-expired"}'),
    b"\x00" + _PRIME + _wire(2, "session-superseded", b"[]"),
    b"\x02" + _ECHO + _wire(3) + encode_block("probe", b'{"nonce":"p"}'),
    b"\x02" + _ECHO + _wire(1) + encode_block("received", b'{"received":1,"resend":true}'),
    b"\x02" + _ECHO + encode_block("refused", _REFUSED),
    b"\x02" + _ECHO.replace(b":2", b':"2"') + _wire(1),
    b"\x02" + _ECHO.replace(b":2", b":true") + _wire(1),
    b"\x02" + _ECHO.replace(b":2", b":1e9") + _wire(1),
    b"\x03" + _ECHO + _wire(2).replace(b"data", b"event: \xc3\xbc\ndata") + encode_prime(None, 30_000),
    b"\x00" + encode_block("session-superseded", b'{"reason":7}'),
)


def target(data: bytes) -> None:
    """One byte says what the connection is and whether it ends; the rest is what comes on it."""
    how = data[0] if data else 0
    hand = Hand(Client("auto", steps=2 if how & 1 else 1))
    hand.open()
    hand.submit({"id": 1, "method": "tools/call"})
    hand.put(Move()) if how & 2 else hand.put(StreamEnded(hand.client.stream or 0))
    attempt = hand.client.attempt
    if hand.client.phase is Phase.KNOCKING:
        hand.put(SocketOpened(attempt, 2))
    elif hand.client.phase is Phase.RESTING:
        hand.tick()
        hand.put(StreamOpened(hand.client.attempt))
    try:
        blocks = BlockDecoder(4096).feed(data[1:])
    except (MalformedError, TooLargeError):
        return  # the reader's business: it drops the connection
    processed = 0
    for block in blocks:
        if hand.client.socket is None and hand.client.stream is None:
            break
        hand.arrive(block)
        while hand.take() is not None:
            processed += 1
    if hand.client.stream is not None:
        hand.put(StreamEnded(hand.client.stream))
    cursor = hand.client.cursor
    assert cursor is not None
    assert cursor.seq == processed
    if hand.client.phase in CARRYING or hand.client.phase is Phase.RESTING:
        assert hand.client.deadline is not None, "it waits for nothing"
