"""Bodies of refusals, as the client reads them: one of ours, or nobody's, and then the next move (§8)."""

from __future__ import annotations

from gapless.client.http import refused
from gapless.protocol.client import Client, Phase
from gapless.protocol.moves import Failed, Move, StreamEnded
from gapless.protocol.refusal import Reason, Refusal, read_refusal
from tests.client.machine import Hand, event_data

__all__ = ["SEEDS", "target"]

SEEDS = (
    *(bytes([n]) + Refusal(reason, reason.value, 9, 5, 0).body() for n, reason in enumerate(Reason)),
    b"\x01<html><body>502 Bad Gateway</body></html>",
    b"\x02",
    b'\x02{"error":{"message":"\xc3","data":{"reason":"limit"}}}',
    b"\x02" + b'{"error":' * 2000,
    b'\x03{"jsonrpc":"2.0","id":null,"error":{"code":-32000,"message":7,"data":{"reason":"limit"}}}',
    b'\x04{"error":{"data":{"reason":["limit"],"floor":true,"received":1e400}}}',
    b'\x05{"error":{"message":"\\ud83d\\ude80","data":{"reason":"message-gap","received":-1,"floor":99}}}',
    b'\x06{"error":{"data":{"reason":"cursor-evicted","floor":1,"resume-cursor":123456789012345678901234567890}}}',
)

_STATUSES = (400, 404, 409, 413, 426, 429, 500, 502, 503)


def target(data: bytes) -> None:
    """One byte says which request it answers, and with which status; the rest is the body."""
    how, body = (data[0], data[1:]) if data else (0, b"")
    refusal = read_refusal(body)
    if refusal is not None:
        assert read_refusal(refusal.body()) == refusal
    status = _STATUSES[how // 4 % len(_STATUSES)] if refusal is None else refusal.row.status
    hand = _asking(how % 4)
    attempt = hand.client.attempt if how % 4 < 3 else hand.client.sending.attempt
    assert attempt is not None
    hand.put(refused(attempt, status, body, "2" if how & 64 else None))
    if hand.client.phase is not Phase.OVER:
        hand.put(Failed(hand.client.attempt, "reset"))
        assert hand.client.deadline is not None, "it waits for nothing"


def _asking(how: int) -> Hand:
    """A client that waits: for an event stream, for its negotiation, for its handshake, or for a POST."""
    hand = Hand(Client("auto", steps=2 if how == 1 else 1))
    hand.open()
    hand.submit({"id": 1, "method": "tools/call"})
    hand.arrive(hand.emit(event_data(1)))
    hand.client._door_wake = 1e9
    hand.take()
    match how:
        case 0:
            hand.put(StreamEnded(hand.client.stream or 0))
            hand.tick()
        case 1 | 2:
            hand.put(Move())
        case _:
            pass
    return hand
