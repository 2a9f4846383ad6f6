"""A session of the naive server: its inbox, its streams, its door, and what is wrong with them.

Written from the protocol page, with lists for stores; it shares no decision with `gapless.server`.
"""

from __future__ import annotations

import asyncio
import secrets
from dataclasses import dataclass
from hashlib import sha256
from math import inf
from typing import Any, Final

import msgspec

from gapless.errors import MalformedError
from gapless.protocol import refusal
from gapless.protocol.block import encode_block, encode_prime
from gapless.protocol.cursor import EventId, Start, parse_cursor
from gapless.protocol.jsonrpc import Envelope, Kind, RequestId, error_response, one_line, peek, salvage
from gapless.protocol.refusal import Reason, Refusal
from tests.torture.naive_ladder import NaiveLadder
from tests.torture.naive_log import MOMENT, NaiveLog, Reader
from tests.torture.naive_switches import NaiveSwitches

__all__ = ["NaiveSession", "RefusedError"]

_SESSION_RETRY: Final = 100
_SUPERSEDED_RETRY: Final = 30_000


class RefusedError(Exception):
    """Carries a refusal to where it is answered."""

    def __init__(self, refusal: Refusal) -> None:
        super().__init__(refusal.message)
        self.refusal = refusal


@dataclass(slots=True)
class _Offer:
    """A negotiation that is pending, and the nonces that were shown it (U7)."""

    event: int
    nonce: str
    ticket: str
    shown: set[str]


class NaiveSession(NaiveLog):
    """One session. Whatever is not as it should be raises `RefusedError`, and has changed nothing."""

    def __init__(self, switches: NaiveSwitches, journal: list[str], *, by_stream: bool) -> None:
        super().__init__(switches)
        self.token = secrets.token_urlsafe(16)
        self.by_stream = by_stream
        self.ladder = NaiveLadder(self._emit, journal)
        self._open: dict[RequestId, int] = {}
        """Requests under way, and the streams of their answers."""
        self._streams = 1
        self._inbox: list[tuple[bytes, bool]] = []
        """Each message's digest, and whether it was run."""
        self._process: str | None = None
        self._retired: set[str] = set()
        self._offer: _Offer | None = None
        self._concluded: set[str] = set()
        self._bound: Reader | None = None
        self._generation = 0
        self._stuck = False

    @property
    def received(self) -> int:
        """The number of the client's last message."""
        return len(self._inbox)

    def refused(self, reason: Reason, message: str) -> RefusedError:
        """A refusal that says where the server is (§8)."""
        return RefusedError(Refusal(reason, message, self.committed, self.floor, self.received))

    # Server to client -----------------------------------------------------------------------------

    def _emit(self, message: dict[str, Any], related: RequestId | None) -> None:
        answer = "method" not in message
        stream = self._open.pop(message["id"], None) if answer else self._route(related)
        if self.over is not None or stream is None or stream in self.done:
            return
        if answer and self._switches.forgets_the_result and not self._is_read(stream):
            return
        self.append(stream, "message", msgspec.json.encode(message))
        if answer:
            self.finish(stream)

    def _route(self, related: RequestId | None) -> int:
        """M1."""
        if related is not None:
            return self._open.get(related, 0)
        return 0 if self._is_read(0) else next(iter(self._open.values()), 0)

    def _is_read(self, stream: int) -> bool:
        return any(reader.stream == stream for reader in self.readers)

    # Client to server -----------------------------------------------------------------------------

    def take(self, process: str | None, number: int | None, data: bytes) -> None:
        """One numbered message (L6)."""
        self.alive()
        if process is None or number is None:
            raise self.refused(Reason.MALFORMED, "a message names its client process and its number")
        digest, repeat = sha256(data).digest(), number <= self.received
        kept, ran = self._inbox[number - 1] if repeat else (digest, False)
        if process in self._retired or (kept != digest and (ran or data)):
            raise self.refused(Reason.MESSAGE_CONFLICT, f"message {number} was received otherwise")
        if number > self.received + 1:
            raise self.refused(Reason.MESSAGE_GAP, f"message {self.received + 1} is missing")
        if repeat:
            if self._switches.runs_twice and ran:
                self._run(data, peek(one_line(data)), 0)
            return
        if self._process is not None and self._process != process:
            self._retired.add(self._process)
        self._process = process
        self._inbox.append((digest, False))  # whatever becomes of it, its number is used
        if not data:
            return
        try:
            envelope = peek(one_line(data))
        except MalformedError as error:
            asked = salvage(data)
            if asked is not None and asked.id not in self._open:
                why = {"reason": Reason.MALFORMED.value}
                self.append(0, "message", error_response(asked.id, -32600, str(error), why))
            raise self.refused(Reason.MALFORMED, str(error)) from None
        if envelope.kind is Kind.REQUEST and envelope.id in self._open:
            raise self.refused(Reason.DUPLICATE_ID, f"request {envelope.id!r} is in flight")
        self._inbox[-1] = (digest, True)
        self._run(data, envelope, 0)

    def call(self, data: bytes, envelope: Envelope, *, primed: bool) -> Reader | None:
        """A message of the stream view; a request opens the stream that answers it (M1, M6)."""
        self.alive()
        if envelope.kind is not Kind.REQUEST:
            self._run(data, envelope, 0)
            return None
        if envelope.id in self._open and not self._switches.runs_twice:
            raise self.refused(Reason.DUPLICATE_ID, f"request {envelope.id!r} is in flight")
        stream, self._streams = self._streams, self._streams + 1
        self._run(data, envelope, stream)
        return self._serve(self.id(self.committed, stream), primed=primed)

    def _run(self, data: bytes, envelope: Envelope, stream: int) -> None:
        if envelope.kind is Kind.REQUEST and envelope.id is not None:
            self._open[envelope.id] = stream
        if envelope.method == "notifications/cancelled" and envelope.target is not None:
            self.finish(self._open.pop(envelope.target, 0))  # M8
        self.ladder.take(msgspec.json.decode(data))

    # Cursors --------------------------------------------------------------------------------------

    def parse(self, text: str) -> EventId:
        """A cursor as a client states it (C1)."""
        if self._switches.believes_echoes and text.isascii() and text.isdigit():
            seq = int(text)
            return self.id(seq, next((event.id.stream for event in self._events if event.id.seq == seq), 0))
        try:
            stated = parse_cursor(text)
        except MalformedError as error:
            raise self.refused(Reason.MALFORMED, str(error)) from None
        cursor = self.id(0) if isinstance(stated, Start) else stated
        if self.by_stream and cursor.stream >= self._streams:
            raise self.refused(Reason.MALFORMED, f"stream {cursor.stream} was never opened")
        return cursor

    def prove(self, cursor: EventId, *, upgrade: bool = False) -> None:
        """C5, in its order; a session that is over comes before (B4)."""
        self.alive()
        past = upgrade and self._switches.upgrades_past_eviction
        if cursor.seq < self.evicted.get(self._stream(cursor), 0) and not past:
            raise self.refused(Reason.CURSOR_EVICTED, f"what follows {cursor.seq} is evicted")
        if cursor.seq > self.committed:
            raise self.refused(Reason.CURSOR_AHEAD, f"the log ends at {self.committed}")
        if not self.owns(cursor):
            raise self.refused(Reason.CURSOR_FOREIGN, "the cursor is of another log")

    def ack(self, cursor: EventId) -> int:
        """The client has everything up to a proven cursor (C4, M4); the ack cursor."""
        stream = self._stream(cursor)
        self.acked[stream] = max(cursor.seq, self.acked.get(stream, 0))
        return self.acked[stream]

    def _stream(self, cursor: EventId) -> int:
        return cursor.stream if self.by_stream else 0

    # Event streams --------------------------------------------------------------------------------

    async def listen(self, text: str | None, *, primed: bool) -> Reader | bytes:
        """An event stream from a cursor, or from none; at the boundary perhaps one block and the end."""
        try:
            self._stated(text)
            await self._take_over()
            cursor = self._stated(text)
        except RefusedError as error:
            about_the_cursor = error.refusal.reason is Reason.MALFORMED or "cursor" in error.refusal.reason
            if self._switches.silent_cursor and about_the_cursor:
                return self._attach(Reader(self.committed, b"", stream=-1, idle=True))
            raise
        offer = self._offer
        if offer is not None and (text is None or cursor.seq >= offer.event):
            if self._switches.idle_at_the_boundary:
                return self._serve(cursor, idle=True)
            if text is not None or not self._switches.second_acceptance:
                last = self._burn()  # B1
                return encode_block("session-superseded", last) if text is None else self._serve(cursor)
            offer = self._offer_door(secrets.token_urlsafe(8))
        self.ack(cursor)
        stop = None if offer is None else offer.event  # B2
        return self._serve(cursor, primed=primed, resumed=text is not None, stop=stop)

    def _stated(self, text: str | None) -> EventId:
        self.alive()
        if text is None and self.by_stream:  # M3
            return self.id(max(self.acked.get(0, 0), self.evicted.get(0, 0)))
        cursor = self.parse("0" if text is None else text)
        if text is not None or self._offer is None:  # at the boundary no cursor is none (B1)
            self.prove(cursor)
        return cursor

    def _serve(
        self,
        cursor: EventId,
        *,
        primed: bool = True,
        resumed: bool = False,
        stop: int | None = None,
        idle: bool = False,
    ) -> Reader:
        stream = self._stream(cursor)
        if self.by_stream:
            opening = encode_prime(cursor, self._switches.retry_ms) if primed else b""
            for other in self.readers:
                if other.stream == stream:  # M3: the newer one wins
                    other.control.append(encode_prime(None, _SUPERSEDED_RETRY))
                    other.close = refusal.CLOSE_NORMAL
        else:
            received = encode_block("received", msgspec.json.encode({"received": self.received}))
            opening = encode_prime(cursor, _SESSION_RETRY) + received
        reader = Reader(cursor.seq, opening, stream, resumed=resumed and cursor.seq > 0, idle=idle)
        if stop is not None:
            self._stop(reader, stop)
        return self._attach(reader)

    def _stop(self, reader: Reader, event: int) -> None:
        reader.stop = event  # U10
        reader.control.append(encode_prime(None, int(self._switches.upgrade_window * 1000)))

    def _attach(self, reader: Reader) -> Reader:
        self.readers.add(reader)
        self.wake()
        return reader

    def detach(self, reader: Reader) -> None:
        """A connection is gone (B7)."""
        self.readers.discard(reader)
        if self._bound is reader and not self._stuck:
            self._bound = None
        reader.heard.set()

    # The door -------------------------------------------------------------------------------------

    async def upgrade(self, cursor: EventId, nonce: str) -> dict[str, Any]:
        """Negotiate in band: the acceptance (U7)."""
        self._upgradable(cursor, nonce)
        await self._take_over()
        self._upgradable(cursor, nonce)
        self.ack(cursor)
        offer = self._offer
        if offer is None or (self._switches.second_acceptance and nonce not in offer.shown):
            offer = self._offer_door(nonce)
            self.pin(cursor)
        elif nonce not in offer.shown and cursor.seq >= offer.event:
            self._burn()
            raise self.refused(Reason.SESSION_SUPERSEDED, "an upgrade is pending: this token is burned")
        offer.shown.add(nonce)
        return {"event": offer.event, "negotiation": offer.nonce, "ticket": offer.ticket, "url": self._url}

    def _upgradable(self, cursor: EventId, nonce: str) -> None:
        self.prove(cursor, upgrade=True)
        if nonce in self._concluded:
            raise self.refused(Reason.TICKET_SPENT, "this negotiation is concluded")

    def _offer_door(self, nonce: str) -> _Offer:
        ticket = secrets.token_urlsafe(16)
        self._offer = _Offer(self._accept(nonce, ticket), nonce, ticket, {nonce})
        return self._offer

    def _accept(self, nonce: str, ticket: str | None) -> int:
        """Append `U`; every event stream ends there (U10)."""
        data = msgspec.json.encode({"negotiation": nonce, "ticket": ticket, "url": self._url})
        event = self.append(0, "upgrade-accepted", data)
        for reader in self.readers:
            if not reader.socket and reader.stop is None:
                self._stop(reader, event)
        return event

    async def handshake(self, cursor: EventId, ticket: str | None) -> tuple[Reader, int | None]:
        """Bind a socket: the commit point (U1 to U4). Its reader, and the cursor of the 101."""
        switches, echo = self._switches, self.committed
        self._bindable(cursor, ticket)
        await self._take_over(handshake=True)
        if switches.stale_echo:
            await asyncio.sleep(MOMENT)
        self._bindable(cursor, ticket)
        self.ack(cursor)
        if self._offer is None:
            self._accept(secrets.token_urlsafe(8), None)
        else:
            self._concluded |= self._offer.shown
            self._offer = None
        self.pin(cursor)
        self._generation += 1
        if not switches.stale_echo:
            echo = self.committed
        body = {
            "cursor": echo,
            "from": str(cursor),
            "received": self.received,
            "generation": self._generation,
            "durability": "memory",
            "limits": switches.limits.advertised_limits(),
        }
        opening = encode_block("resume-cursor", msgspec.json.encode(body))
        reader = Reader(max(cursor.seq, self.floor), opening, socket=True, gate=self.committed)
        reader.deadline = self.now() + switches.ack_window
        if switches.forgets_the_gap or switches.no_echo:
            reader.position = self.committed
        if switches.forgets_the_gap or switches.no_echo or switches.frames_before_ack:
            reader.gate, reader.deadline = None, inf
        if switches.no_echo:
            reader.opening = b""
        self._bound = self._attach(reader)
        return reader, None if switches.no_echo else echo

    def _bindable(self, cursor: EventId, ticket: str | None) -> None:
        self.prove(cursor, upgrade=True)
        if ticket is not None and (self._offer is None or ticket != self._offer.ticket):
            raise self.refused(Reason.TICKET_SPENT, "this ticket was spent, or never issued")

    async def _take_over(self, *, handshake: bool = False) -> None:
        """B6: somebody else asks for the session; if the socket that holds it is dead, it is fenced."""
        while (bound := self._bound) is not None:
            self._stuck = self._stuck or (handshake and self._switches.bound_while_on_sse)
            lives = self._switches.bound_while_on_sse or await self._probe(bound)
            if self._bound is bound and lives:
                raise self.refused(Reason.WEBSOCKET_BOUND, "a live socket holds this session")
            if self._bound is bound:
                self._bound, bound.close = None, refusal.CLOSE_FENCED  # B8
                self.wake()

    async def _probe(self, bound: Reader) -> bool:
        bound.heard.clear()
        self.tell(bound, "probe", {"nonce": secrets.token_hex(4)})
        try:
            async with asyncio.timeout(self._switches.probe_timeout):
                return await bound.heard.wait()
        except TimeoutError:
            return False

    def heard(self, reader: Reader) -> bool:
        """Something arrived on a socket; whether it still holds the session (B8)."""
        reader.heard.set()
        return self._bound is reader

    def ack_on(self, reader: Reader, cursor: EventId) -> None:
        """`cursor-ack`: it may open the gate; inside the gap it restarts the window (U4)."""
        advances = cursor.seq > self.acked.get(0, 0)
        seq = self.ack(cursor)
        if reader.gate is not None and seq >= reader.gate:
            reader.gate, reader.deadline = None, inf
        elif reader.gate is not None and advances:
            reader.deadline = self.now() + self._switches.ack_window
        self.wake()

    def tell(self, reader: Reader, event: str, body: dict[str, Any]) -> None:
        """Send a control block on a socket."""
        reader.control.append(encode_block(event, msgspec.json.encode(body)))
        self.wake()

    @property
    def _url(self) -> str:
        return f"/mcp/session/{self.token}/events"

    # The end --------------------------------------------------------------------------------------

    def alive(self) -> None:
        """B4."""
        if self.over is not None:
            raise self.refused(self.over, f"the session is over: {self.over}")

    def _burn(self) -> bytes:
        return self.end(Reason.SESSION_SUPERSEDED, "non-resumable-boundary")

    def end(self, reason: Reason, told: str) -> bytes:
        """One step: what is open is settled, the end is told, and nothing comes after it (B1, B9, L7)."""
        text = f"the session ended ({told}); the outcome is unknown"
        for id, stream in self._open.items():
            self.append(stream, "message", error_response(id, -32000, text, {"reason": "outcome-unknown"}))
            self.finish(stream)
        self._open.clear()
        last = msgspec.json.encode({"reason": told, "retryable": False, "action": "open-new-session"})
        if not self.by_stream:
            self.append(0, "session-superseded", last)
        self.over, self._offer, self._bound = reason, None, None
        self.ladder.close()
        self.wake()
        return last
