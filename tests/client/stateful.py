"""The server that the client's stateful test speaks to: a list of events, a list of messages, integers.

It answers as §5 and §6 say, and checks what it is told: no message twice with other bytes, no hole on a
socket that lives, no cursor that it has not sent.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import msgspec

from gapless.protocol.block import Block, BlockDecoder
from gapless.protocol.client import Client
from gapless.protocol.cursor import EventId
from gapless.protocol.jsonrpc import Envelope, Kind, RequestId, peek
from gapless.protocol.moves import (
    Get,
    Input,
    Knock,
    Negotiate,
    Offered,
    Open,
    Opened,
    Post,
    Received,
    Refused,
    SocketOpened,
    StreamOpened,
)
from gapless.protocol.outgoing import Kept
from gapless.protocol.refusal import Reason, Refusal
from tests.client.machine import Hand

__all__ = ["Far", "Request", "Wire"]

Request = Open | Get | Knock | Negotiate | Post


@dataclass
class Wire:
    """A connection as the server has it: a position, and what it may still write.

    `alive` is over when the server knows that it is gone, `heard` when nothing gets through any more.
    """

    attempt: int
    socket: bool
    at: int
    first: list[Block] = field(default_factory=list[Block])
    stop: int | None = None
    gate: int | None = None
    alive: bool = True
    heard: bool = True
    stated: int = 0


class Far:
    """One session, seen from the server."""

    def __init__(self, events: int, received: int) -> None:
        self.log = Hand(Client())
        self.blocks: list[Block] = []
        self.floor = 0
        self.messages = [b"from an earlier process"] * received
        self.process = "earlier" if received else None
        self.open: dict[RequestId, None] = {}
        self.wires: dict[int, Wire] = {}
        self.pending: int | None = None
        self.ticket = ""
        self.shown: set[str] = set()
        self.concluded: set[str] = set()
        self.over: Reason | None = None
        self.hollow: set[bytes] = set()
        """Messages that were refused: their numbers are used, and placeholders may come in their place."""
        self.ill_tempered = False
        """Whether it refuses the next message that comes on a socket."""
        for n in range(events):
            self.emit(b'{"jsonrpc":"2.0","method":"notifications/n","params":{"n":%d}}' % -n)

    # What it says ---------------------------------------------------------------------------------

    @property
    def head(self) -> int:
        return len(self.blocks)

    def emit(self, data: bytes, event: str = "message") -> None:
        """The next event; of a session that is over there is none."""
        if self.over is None:
            self.blocks.append(self.log.emit(data, event))

    def respond(self, id: RequestId, text: str) -> None:
        """An open request gets its result."""
        if self.over is None:
            del self.open[id]
            self.emit(msgspec.json.encode({"jsonrpc": "2.0", "id": id, "result": {"text": text}}))

    def end(self, reason: Reason, told: str) -> None:
        """Everything that is open is settled, and the session says why it ends (B1, B9, L7)."""
        if self.over is not None:
            return
        for id in self.open:
            error = {"code": -32000, "message": told, "data": {"reason": "outcome-unknown"}}
            self.emit(msgspec.json.encode({"jsonrpc": "2.0", "id": id, "error": error}))
        self.open.clear()
        self.emit(msgspec.json.encode({"reason": told, "retryable": False}), "session-superseded")
        self.over = reason

    # What it is asked -----------------------------------------------------------------------------

    def answer(self, request: Request, *, takes_over: bool = True, echo: bool = True) -> Input:
        """The answer to a request, and what comes of it."""
        attempt = request.attempt
        if isinstance(request, Open):
            timers = {"keepalive": 15.0, "upgrade_window": 30.0}
            return Opened(attempt, "token", self.log.id(0), {"message": 400}, timers)
        if self.over is not None:
            return self.refuse(attempt, self.over)
        if isinstance(request, Post):
            return self.take_all(request)
        unproven = self.unproven(request.cursor)
        if unproven is not None:
            return self.refuse(attempt, unproven)
        if self.spent(request):
            return self.refuse(attempt, Reason.TICKET_SPENT)
        socket = next((w for w in self.wires.values() if w.socket and w.alive), None)
        if socket is not None:
            if not takes_over and socket.heard:
                return self.refuse(attempt, Reason.WEBSOCKET_BOUND)
            socket.alive = False
        match request:
            case Get():
                return self.listen(request)
            case Negotiate():
                return self.negotiate(request)
            case Knock():
                return self.bind(request, echo=echo)

    def refuse(self, attempt: int, reason: Reason) -> Refused:
        """A refusal that says where the server is."""
        refusal = Refusal(reason, reason.value, self.head, self.floor, len(self.messages))
        return Refused(attempt, refusal.row.status, refusal, 0.5 if refusal.row.status == 503 else None)

    def unproven(self, cursor: EventId) -> Reason | None:
        """C5."""
        if cursor.seq < self.floor:
            return Reason.CURSOR_EVICTED
        assert cursor == self.log.id(cursor.seq), "C3: a cursor that was never sent"
        return None

    def spent(self, request: Request) -> bool:
        match request:
            case Negotiate(nonce=nonce):
                return nonce in self.concluded
            case Knock(ticket=str(ticket)):
                return self.pending is None or ticket != self.ticket
            case _:
                return False

    def listen(self, request: Get) -> Input:
        """An event stream; at the boundary it is the session's last (B1), below it ends there (B2)."""
        stop = self.pending
        if self.pending is not None and request.cursor.seq >= self.pending:
            self.end(Reason.SESSION_SUPERSEDED, "non-resumable-boundary")
            stop = self.head
        first = [
            Block(id=str(request.cursor), data=b"", retry=100),
            self.received(),
        ]
        if self.pending is not None:
            first.append(Block(retry=30_000))
        wire = Wire(request.attempt, False, request.cursor.seq, first, stop)
        self.wires[request.attempt] = wire
        return StreamOpened(request.attempt)

    def negotiate(self, request: Negotiate) -> Input:
        """An offer, or the one that is pending again (U7)."""
        if self.pending is None:
            self.ticket = f"ticket {request.nonce}"
            self.shown = set()
            self.accept(request.nonce, self.ticket)
            self.pending = self.head
        elif request.nonce not in self.shown and request.cursor.seq >= self.pending:
            self.end(Reason.SESSION_SUPERSEDED, "non-resumable-boundary")
            return self.refuse(request.attempt, Reason.SESSION_SUPERSEDED)
        self.shown.add(request.nonce)
        return Offered(request.attempt, self.ticket)

    def accept(self, nonce: str, ticket: str | None) -> None:
        """`U` is the next event, and every event stream ends there (U10)."""
        data = msgspec.json.encode({"negotiation": nonce, "ticket": ticket, "url": "/mcp"})
        self.emit(data, "upgrade-accepted")
        for wire in self.wires.values():
            if not wire.socket and wire.stop is None:
                wire.stop = self.head
                wire.first.append(Block(retry=30_000))

    def bind(self, request: Knock, *, echo: bool) -> Input:
        """The commit point; then the echo, in the header if that gets through (U2)."""
        if self.pending is None:
            self.accept("own", None)
        self.pending = None
        self.concluded |= self.shown
        self.shown = set()
        body = {"cursor": self.head, "from": str(request.cursor), **self.statement()}
        first = [Block("resume-cursor", data=msgspec.json.encode(body))]
        wire = Wire(request.attempt, True, request.cursor.seq, first, gate=self.head)
        wire.stated = request.cursor.seq
        self.wires[request.attempt] = wire
        return SocketOpened(request.attempt, self.head if echo else None)

    def statement(self) -> dict[str, Any]:
        """What was received, and from which process (L6)."""
        return {"received": len(self.messages)} | ({} if self.process is None else {"process": self.process})

    def received(self) -> Block:
        return Block("received", data=msgspec.json.encode(self.statement()))

    # Messages -------------------------------------------------------------------------------------

    def take_all(self, request: Post) -> Input:
        """A POST of one message, or of several: up to the first that is refused (L6)."""
        for kept in request.messages:
            if not self.take(kept.number, kept.data):
                return self.refuse(request.attempt, Reason.MESSAGE_GAP)
        return Received(request.attempt, len(self.messages))

    def take(self, number: int, data: bytes) -> bool:
        """One message; whether it left no hole."""
        if number <= len(self.messages):
            had = self.messages[number - 1]
            assert data in (had, b"") or had == b"", f"L6: message {number} has other bytes than before"
            return True
        if number > len(self.messages) + 1:
            return False
        self.messages.append(data)
        self.process = "n"
        if data:
            self.note(peek(data))
        return True

    def note(self, envelope: Envelope) -> None:
        """What a message opens or settles."""
        if envelope.kind is Kind.REQUEST and envelope.id is not None:
            assert envelope.id not in self.open
            self.open[envelope.id] = None
        elif envelope.method == "notifications/cancelled" and envelope.target is not None:
            self.open.pop(envelope.target, None)

    def refuse_message(self, kept: Kept) -> bool:
        """A message that is new is malformed: its number is used, its request is answered (L6)."""
        if self.over is not None or kept.number != len(self.messages) + 1 or not kept.data:
            return False
        self.messages.append(b"")
        self.process = "n"
        self.hollow.add(kept.data)
        envelope = peek(kept.data)
        if envelope.kind is Kind.REQUEST:
            error = {"code": -32600, "message": "malformed", "data": {"reason": "malformed"}}
            self.emit(msgspec.json.encode({"jsonrpc": "2.0", "id": envelope.id, "error": error}))
        return True

    def take_frame(self, wire: Wire, frame: bytes) -> None:
        """What came in a frame, if anything still comes through."""
        if not (wire.alive and wire.heard) or self.over is not None:
            return
        for block in BlockDecoder(1 << 20).feed(frame):
            if block.event == "message":
                self.take_framed(wire, Kept(int(block.id or ""), block.data or b"", None))
            elif block.event == "cursor-ack":
                cursor = msgspec.json.decode(block.data or b"")["cursor"]
                seq = int(cursor.partition(".")[0])
                assert cursor == str(self.log.id(seq))
                if wire.gate is not None and seq >= wire.gate:
                    wire.gate = None

    def take_framed(self, wire: Wire, kept: Kept) -> None:
        """A message on a socket; if the server is ill-tempered, it is told off in a block."""
        if self.ill_tempered and self.refuse_message(kept):
            self.ill_tempered = False
            error = Refusal(Reason.MALFORMED, "malformed", self.head, self.floor, len(self.messages)).error()
            body = {"n": kept.number, "reason": "malformed", "error": error}
            wire.first.append(Block("refused", data=msgspec.json.encode(body)))
        assert self.take(kept.number, kept.data), "L6: a hole, on a socket that lives"
        wire.first.append(self.received())

    # What it writes -------------------------------------------------------------------------------

    def upto(self, wire: Wire) -> int:
        """The last event that may be written on this connection."""
        return min(b for b in (self.head, wire.gate, wire.stop) if b is not None)

    def due(self, wire: Wire) -> Block | int | None:
        """What this connection gets next: a block, its end (a close code), or nothing."""
        if wire.first:
            return wire.first[0]
        if not wire.alive:
            return 4410 if wire.socket else 1000
        if wire.at < self.floor:
            return 4409
        if wire.at < self.upto(wire):
            return self.blocks[wire.at]
        if wire.stop is not None and wire.at >= wire.stop:
            return 1000
        return 4404 if self.over is not None else None

    def wrote(self, wire: Wire) -> None:
        """What was due is written."""
        if wire.first:
            del wire.first[0]
        else:
            wire.at += 1
