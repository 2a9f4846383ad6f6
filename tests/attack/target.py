"""What an attacker knows of a server: sessions of its own, and cursors of its own and of others."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from random import Random
from typing import Any, Final

import msgspec

from gapless.protocol.block import BlockDecoder
from tests.attack.shapes import EVENTS, JSON, request
from tests.attack.wire import ask

__all__ = ["SESSION", "STREAM", "Seat", "Target"]

SESSION: Final = b"/mcp/session"
STREAM: Final = b"/mcp"

_INITIALIZE: Final = (
    b'{"jsonrpc":"2.0","id":"i","method":"initialize","params":{"protocolVersion":"2025-11-25",'
    b'"capabilities":{"elicitation":{}},"clientInfo":{"name":"attack","version":"0"}}}'
)
_INITIALIZED: Final = b'{"jsonrpc":"2.0","method":"notifications/initialized"}'
_FORGED: Final = (
    b"0", b"1", b"47", b"-1", b"", b" ", b"0.0", b"0.0.0", b"1.0.a193f6b6c59d534", b"1.0.A193F6B6C59D5344",
)  # fmt: skip
_FORGED_TOO: Final = (
    b"1.0.a193f6b6c59d53444", b"01.0.a193f6b6c59d5344", b"1.00.a193f6b6c59d5344", b"1.0.a193f6b6c59d5344 ",
    b"9223372036854775808.0.a193f6b6c59d5344", b"1" * 300 + b".0.a193f6b6c59d5344", b"1.-1.a193f6b6c59d5344",
    b"\xc2\xb2.0.a193f6b6c59d5344", b"1.0.a193f6b6c59d5344,2.0.a193f6b6c59d5344", b"1.9.a193f6b6c59d5344",
    b"1.0.0x93f6b6c59d5344", b"+1.0.a193f6b6c59d5344", b"1.0.a193f6b6c59d534g", b"0.0.0000000000000000",
    b"null", b"1.99999999999999999999.a193f6b6c59d5344", b"9223372036854775807.0.a193f6b6c59d5344",
    b"0.1.0011223344556677",
)  # fmt: skip


@dataclass(slots=True)
class Seat:
    """A session of the attacker's own.

    Attributes:
        token: its secret.
        streams: whether it is one of the stream view.
        cursors: event IDs that it was sent.
        number: of the next message that the server would take.
        uses: how often it is used before another takes its place.
    """

    token: bytes
    streams: bool
    cursors: list[bytes] = field(default_factory=list[bytes])
    number: int = 1
    uses: int = 0

    @property
    def path(self) -> bytes:
        """Its own path, in the session view."""
        return SESSION + b"/" + self.token

    def learn(self, cursor: bytes) -> None:
        """It was sent an event."""
        self.cursors = [*self.cursors[-7:], cursor]

    def cursor(self) -> bytes:
        """Its latest."""
        return self.cursors[-1] if self.cursors else b"0"


class Target:
    """A server, and the sessions that the attacker has there.

    Attributes:
        port: where it listens, on loopback.
        headers: what the requests have that are no bad inputs: a token, where one is asked for.
        strangers: cursors of sessions that are not the attacker's.
        opened: how many sessions were opened.
    """

    def __init__(self, port: int, *, seats: int, uses: int, token: str = "") -> None:
        self.port = port
        self.headers = [(b"Authorization", b"Bearer " + token.encode())] if token else []
        self.strangers: list[bytes] = []
        self.opened = 0
        self._most = seats
        self._uses = uses
        self._seats: dict[bool, list[Seat]] = {True: [], False: []}
        self._spent: list[Seat] = []

    def seat(self, random: Random, *, streams: bool) -> Seat:
        """One of the sessions; now and then one that is over, or of the other view."""
        pick = random.random()
        if pick < 0.02 and self._spent:
            return random.choice(self._spent)
        seats = self._seats[streams if pick < 0.97 else not streams]
        seat = random.choice(seats) if seats else Seat(b"nobody", streams)
        seat.uses += 1
        return seat

    def over(self, seat: Seat, reason: str) -> None:
        """An answer says that a session is over; of one that is nobody's it says nothing new."""
        if reason != "session-unknown":
            seat.uses = self._uses

    async def tend(self) -> None:
        """Put new sessions in the place of those that are over, or have been used enough."""
        for streams, seats in self._seats.items():
            for seat in [seat for seat in seats if seat.uses >= self._uses]:
                seats.remove(seat)
                self._spent = [*self._spent[-20:], seat]
            while len(seats) < self._most:
                seat = await (self._open_stream() if streams else self._open_session())
                if seat is None:
                    break  # the server is full: some expire
                self.opened += 1
                seats.append(seat)

    async def leave(self) -> None:
        """End every session that is known."""
        for seat in [*self._seats[True], *self._seats[False]]:
            await ask(self.port, self.ending(seat, self.headers))
        self._seats = {True: [], False: []}

    def ending(self, seat: Seat, headers: Sequence[tuple[bytes, bytes]] = ()) -> bytes:
        """What ends a session, if it has what is asked for."""
        if seat.streams:
            return request(b"DELETE", STREAM, [(b"Mcp-Session-Id", seat.token), *headers])
        return request(b"DELETE", seat.path, headers)

    async def _open_session(self) -> Seat | None:
        answer = await ask(self.port, request(b"POST", SESSION, self.headers, b""))
        if answer is None or answer.status != 201:
            return None
        told: dict[str, Any] = msgspec.json.decode(answer.body)
        seat = Seat(told["session"].encode(), False, [told["cursor"].encode()])
        for text in (_INITIALIZE, _INITIALIZED):
            headers = [
                (b"Content-Type", JSON),
                (b"Mcp-Client", b"attack"),
                (b"Mcp-Message-Number", b"%d" % seat.number),
                *self.headers,
            ]
            await ask(self.port, request(b"POST", seat.path + b"/messages", headers, text))
            seat.number += 1
        return seat

    async def _open_stream(self) -> Seat | None:
        headers = [(b"Content-Type", JSON), (b"Accept", JSON + b", " + EVENTS), *self.headers]
        answer = await ask(self.port, request(b"POST", STREAM, headers, _INITIALIZE))
        if answer is None or answer.status != 200 or b"mcp-session-id" not in answer.headers:
            return None
        seat = Seat(answer.headers[b"mcp-session-id"], True)
        for block in BlockDecoder(1 << 20).feed(bytes(answer.body)):
            if block.id:
                seat.cursors.append(block.id.encode())
        headers.append((b"Mcp-Session-Id", seat.token))
        await ask(self.port, request(b"POST", STREAM, headers, _INITIALIZED))
        return seat

    def cursor(self, random: Random, seat: Seat) -> bytes:
        """A cursor: the session's own, somebody else's, one that is ahead, or none at all."""
        match random.randrange(8):
            case 0 | 1:
                return random.choice(seat.cursors) if seat.cursors else b"0"
            case 2 if self.strangers:
                return random.choice(self.strangers)
            case 3:
                other = self.seat(random, streams=random.random() < 0.5)
                return other.cursor()
            case 4:
                own = seat.cursor()
                number, _, rest = own.partition(b".")
                ahead = int(number) + random.choice((1, 2, 1000, 2**62))
                return b"%d.%b" % (ahead, rest or b"0.0011223344556677")
            case 5:
                return seat.cursor()[:-1] + random.choice((b"0", b"f", b"G", b""))
            case 6:
                return random.choice(_FORGED)
            case _:
                return random.choice(_FORGED_TOO)
