"""Answers to the client's requests: what a server, or something before it, may put into a 200 (§5)."""

from __future__ import annotations

import json

import httpx2

from gapless.client.http import Endpoints, Http
from gapless.protocol.client import Client, Phase
from gapless.protocol.moves import Input, Negotiate, Open, Post, Start
from tests.client.machine import LINK0, Hand, event_data
from tests.fuzz.serving import run

__all__ = ["SEEDS", "target"]

_OPENED = {
    "session": "token",
    "events": "/mcp/session/token/events",
    "cursor": f"0.0.{LINK0.hex()}",
    "received": 0,
    "durability": "fsync",
    "limits": {"message": 4194304, "retain_events": 100000, "retain_bytes": 67108864},
    "timers": {"keepalive": 15.0, "ack_window": 10.0, "session_expiry": 1800},
}

SEEDS = (
    b"\x00" + json.dumps(_OPENED).encode(),
    b"\x00" + json.dumps(_OPENED | {"limits": [], "timers": {"keepalive": "soon"}}).encode(),
    b"\x00" + json.dumps(_OPENED | {"limits": {"message": -1}, "timers": None}).encode(),
    b"\x00" + json.dumps({"session": 7, "cursor": "0"}).encode(),
    b'\x01{"received": 1}',
    b'\x01{"received": "1"}',
    b'\x01{"received": 1e400}',
    b"\x01<html>",
    b'\x02{"event": 1, "negotiation": "n1", "ticket": "t", "url": "/mcp/session/token/events"}',
    b'\x02{"ticket": {}}',
    b"\x02\xff",
)


def target(data: bytes) -> None:
    """One byte says which request it answers; the rest is the body of its success."""
    run(_answer(data[0] % 3 if data else 0, data[1:]))


async def _answer(how: int, body: bytes) -> None:
    status = (201, 202, 200)[how]
    transport = httpx2.MockTransport(lambda _: httpx2.Response(status, content=body))
    async with httpx2.AsyncClient(transport=transport) as client:
        hand = Hand(Client("auto", steps=2))
        http = Http(client, Endpoints("http://localhost/mcp"), "p")
        hand.put(await _request(hand, http, how))
    if hand.client.phase is Phase.RESTING:
        assert hand.client.deadline is not None, "it waits for nothing"
    assert hand.client.phase is not Phase.OPENING, "an answer that makes no sense is none"


async def _request(hand: Hand, http: Http, how: int) -> Input:
    """What a client in need of this answer is told."""
    if how == 0:
        (effect,) = hand.put(Start())
        assert isinstance(effect, Open)
        return await http.open(effect.attempt)
    hand.open()
    hand.submit({"id": 1, "method": "tools/call"})
    if how == 1:
        post: Post = hand.last(Post)
        return await http.post(post.attempt, "token", post.messages)
    hand.arrive(hand.emit(event_data(1)))
    hand.take()
    asked: Negotiate = hand.last(Negotiate)
    return await http.negotiate(asked.attempt, "token", asked.cursor, asked.nonce)
