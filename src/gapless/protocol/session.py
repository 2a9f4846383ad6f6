"""The server's machine: one session, inputs in, effects out, in the order they must happen.

A session is an outbox, an inbox and a door. `handle` takes one input and changes state at once;
what it appended is handed to the log by `take`, and the effects it returned may be carried out
when that is durable (`confirm`): append before deliver, always (L2). `poll` says what a connection
may write next. Nothing here does I/O, reads a clock or draws a random number.
"""

from __future__ import annotations

from enum import StrEnum
from typing import Final, assert_never

import msgspec

from gapless.protocol.block import encode_block
from gapless.protocol.carried import HANDSHAKES, SUBSCRIBE, Carried, Waiting
from gapless.protocol.cursor import START, EventId, Link, Position
from gapless.protocol.delivery import ConnectionId, Delivery, Medium, Step, Untold, poll
from gapless.protocol.door import Asked, Do, Door, Pending
from gapless.protocol.inbox import Inbox, OpenRequest
from gapless.protocol.inbox import Verdict as Judgement
from gapless.protocol.inputs import (
    Accepted,
    Acked,
    Cursor,
    Dropped,
    Effect,
    Emitted,
    End,
    Ending,
    Handed,
    Handshake,
    Input,
    Listen,
    Lost,
    Message,
    Offered,
    Probing,
    Problem,
    Refused,
    Revive,
    Serving,
    Stated,
    Upgrade,
    Verdict,
)
from gapless.protocol.jsonrpc import Envelope, Kind, RequestId, error_response, outcome_unknown
from gapless.protocol.outbox import Grain, Outbox, Segment
from gapless.protocol.recovery import hand_over, lost, revive, sift
from gapless.protocol.refusal import CLOSE_FENCED, CLOSE_NORMAL, Reason, Refusal
from gapless.protocol.seam import Cover, SessionState, cover
from gapless.protocol.settings import Limits
from gapless.protocol.streams import Streams

__all__ = ["Commit", "Session", "View"]

_SUPERSEDED_RETRY: Final = 30.0
"""Seconds that a connection superseded by a newer one of the same stream is told to stay away (M3)."""


class View(StrEnum):
    """How a session's outbox is seen; fixed when it is opened (§1)."""

    SESSION = "session"
    STREAM = "stream"


class Commit(msgspec.Struct, frozen=True):
    """Everything that changed since the last one, for the log to make durable in one step."""

    expect: int
    segment: Segment
    entries: tuple[Message, ...]
    received: int
    process: str | None
    dispatched: int | None
    floor: tuple[int, Link] | None
    record: bool


class Session:
    """One session's state. All times are seconds of one monotonic clock that the caller reads."""

    def __init__(self, view: View, link: Link, limits: Limits, durability: str, now: float) -> None:
        self.view = view
        self.limits = limits
        self.durability = durability
        self.outbox = Outbox(link, Grain.of(limits))
        self.inbox = Inbox()
        self.door = Door()
        self.streams = Streams()
        self.carried = Carried()
        self.dispatched = 0
        """The highest message that may have been handed to a backend (N1)."""
        self.reason: Reason | None = None
        self.connections: dict[ConnectionId, Delivery] = {}
        self.idle_since = now
        self._taken = 0
        self._entries: list[Message] = []
        self._marked = 0
        self._changed = False

    # The log's side -------------------------------------------------------------------------------

    @property
    def dirty(self) -> bool:
        """Whether there is anything that the log does not have yet."""
        return bool(
            self._taken != self.outbox.head
            or self._entries
            or self._changed
            or self._marked != self.dispatched
            or self.outbox.floor_moved
        )

    def take(self) -> Commit:
        """Hand over everything that changed. One commit may be under way at a time."""
        commit = Commit(
            expect=self._taken,
            segment=self.outbox.take(),
            entries=tuple(self._entries),
            received=self.inbox.received,
            process=self.inbox.process,
            dispatched=self.dispatched if self._marked != self.dispatched else None,
            floor=self.outbox.take_floor(),
            record=self._changed,
        )
        self._taken = self.outbox.head
        self._entries.clear()
        self._marked, self._changed = self.dispatched, False
        return commit

    def resume_taken(self, committed: int, dispatched: int) -> None:
        """The log holds everything up to `committed` already: a restored session."""
        self._taken = committed
        self.dispatched = self._marked = dispatched

    def confirm(self, commit: Commit) -> None:
        """The log made `commit` durable: it may be told now."""
        self.outbox.confirm(commit.segment.last)
        self.inbox.confirm(commit.received, commit.process)

    # Inputs ---------------------------------------------------------------------------------------

    def handle(self, input: Input, now: float) -> list[Effect]:
        """Take one input; return what to do once everything so far is durable.

        Raises:
            KeyError: an input that is illegal in this state (a bug); nothing changed.
        """
        match input:
            case Emitted():
                return self._emitted(input, now)
            case Handed():
                return self._handed(input)
            case Lost():
                return lost(self, input, now)
            case Revive():
                return revive(self, input, now)
            case Message():
                return self._message(input, now)
            case Listen():
                return self._listen(input, now)
            case Upgrade():
                return self._upgrade(input, now)
            case Handshake():
                return self._handshake(input, now)
            case Acked():
                return self._acked(input, now)
            case Dropped():
                return self._dropped(input, now)
            case End():
                return self._end(input, now)
            case _:
                assert_never(input)

    def evict(self, now: float) -> None:
        """Apply retention (L4)."""
        floor = self.outbox.floor
        if self.outbox.evict(self.limits, now) > floor and self.view is View.STREAM:
            self._changed = True  # which streams it struck is in the record (M4)
        self.streams.forget(self.outbox)

    def expired(self, now: float) -> bool:
        """Whether nobody has been here for `session_expiry`, and nothing runs (§8)."""
        if self.connections or self.inbox.working or self.door.state is SessionState.TERMINATED:
            return False
        return now - self.idle_since >= self.limits.session_expiry

    def refusal(self, reason: Reason, message: str, *, own: bool = False) -> Refused:
        """A refusal that states where the server is, in bare integers (C2)."""
        committed, floor, received = self.outbox.committed, self.outbox.floor, self.inbox.durable
        return Refused(Refusal(reason, message, committed, floor, received, own))

    def ended(self) -> Refused | None:
        """The refusal of a session that is over, on every endpoint (B4)."""
        if self.reason is None:
            return None
        return self.refusal(self.reason, f"the session is over: {self.reason}")

    def append(self, stream: int, event: str, data: bytes, now: float) -> int:
        """Append one event to a stream; its number."""
        return self._append(stream, event, (data,), now)

    def _append(self, stream: int, event: str, run: tuple[bytes, ...], now: float) -> int:
        seq = self.outbox.append(stream, event, run, now)
        self.streams.note(stream, seq)
        return seq

    def speak(
        self,
        data: bytes,
        envelope: Envelope,
        related: RequestId | None,
        now: float,
        more: tuple[bytes, ...] = (),
    ) -> None:
        """Append a message that is no response, and others as it, to the stream it belongs to (M1)."""
        stream = 0
        if self.view is View.STREAM:
            listening = any(c.stream == 0 for c in self.connections.values())
            stream = self.streams.route(self.inbox, envelope, related, listening)
        seq = self._append(stream, "message", (data, *more), now)
        if envelope.kind is Kind.REQUEST or envelope.target is not None:
            self.inbox.note_backend(envelope, seq)
            self.streams.ask(stream, envelope, seq)
            self._changed = True  # who goes on with the session has to withdraw what is asked (N3)

    # Backend → client -----------------------------------------------------------------------------

    def _emitted(self, input: Emitted, now: float) -> list[Effect]:
        if self.door.state is SessionState.TERMINATED:
            return []
        sifted = sift(self, input, now)
        if not isinstance(sifted, Emitted):
            return sifted
        data, envelope = sifted.data, sifted.envelope
        if envelope.kind is Kind.RESPONSE:
            # A result nobody waits for (settled, cancelled, of a dead incarnation) enters no log (L7, M8).
            request = self.inbox.settle(envelope.id)
            if request is None:
                return []
            if request.method in HANDSHAKES:
                self.carried.tell(request.method, request.number, data)
            self.carried.answered = True
            self.append(request.stream, "message", data, now)
            self.streams.finish(request.stream)
            self.idle_since = now  # its client has the whole expiry to fetch it
            self._changed = True
            return []
        self.speak(data, envelope, sifted.related, now, sifted.more)
        return []

    def _handed(self, input: Handed) -> list[Effect]:
        if input.incarnation == self.carried.incarnation:
            self.carried.handing = False
        return hand_over(self)

    # Client → backend -----------------------------------------------------------------------------

    def _message(self, input: Message, now: float) -> list[Effect]:
        connection = None
        if input.connection is not None:
            connection = self._speaking(input.connection)
            if connection is None:
                return []
        over = self.ended()
        if over is not None:
            return [over]
        self.idle_since = now
        if self.view is View.STREAM:
            return self._take_message(input, None, now)
        refused = self._judge(input, connection, now)
        if refused is not None:
            if isinstance(refused, Refused):
                self._refuse_on(connection, input, refused)
            return [refused]
        return self._take_message(input, connection, now)

    def _speaking(self, id: ConnectionId) -> Delivery | None:
        """The socket of this number, unless it is fenced or gone: what it still sends is void (B8)."""
        connection = self.connections.get(id)
        if connection is None or connection.close is not None:
            return None
        return connection if connection.generation == self.door.generation else None

    def _judge(self, input: Message, connection: Delivery | None, now: float) -> Effect | None:
        """Process, number, digest, in that order (§8); `None` where the message is new."""
        if input.process is None or input.number is None:
            return self.refusal(Reason.MALFORMED, "a message names its client process and its number (L6)")
        known = input.known
        same = known is not None and (known.digest == input.digest or (known.empty and not input.data))
        match self.inbox.judge(input.process, input.number, same):
            case Judgement.ACCEPT:
                return None
            case Judgement.REPEAT:
                if connection is not None:
                    connection.restate = True
                return Accepted(self.inbox.received)
            case Judgement.GAP:
                if connection is None:
                    text = f"message {input.number} leaves a hole: resend from {self.inbox.received + 1}"
                    return self.refusal(Reason.MESSAGE_GAP, text)
                at = connection.resent
                if at is None or at[0] != self.inbox.received or now - at[1] >= 1.0:
                    connection.resend, connection.resent = True, (self.inbox.received, now)
                return Accepted(self.inbox.received)
            case Judgement.CONFLICT:
                text = f"message {input.number} was received with other bytes, or another process took over"
                return self.refusal(Reason.MESSAGE_CONFLICT, text)

    def _take_message(self, input: Message, connection: Delivery | None, now: float) -> list[Effect]:
        envelope, problem = input.envelope, input.problem
        if (
            problem is None
            and envelope is not None
            and envelope.kind is Kind.REQUEST
            and envelope.id in self.inbox.open
        ):
            text = f"a request with ID {envelope.id!r} is in flight"
            if self.view is View.STREAM:
                return [self.refusal(Reason.DUPLICATE_ID, text)]  # M6: refused on its own POST
            # Its number is used, nothing runs; an error event would settle the first of the two.
            number = self._record(input, b"")
            refused = self.refusal(Reason.DUPLICATE_ID, text)
            self._refuse_on(connection, input, refused, number)
            return [refused]
        if problem is None and envelope is not None:
            problem = self._too_much(envelope)
        if problem is not None:
            return self._take_problem(problem, input, connection, now)
        number = self._record(input, input.data)
        if envelope is None:
            return [Accepted(number)]  # a placeholder: recorded, runs nothing (L6)
        cancelled = self.inbox.note_client(envelope)
        if cancelled is not None:
            self.streams.finish(cancelled.stream)
        effects: list[Effect] = []
        if envelope.kind is Kind.REQUEST and self.view is View.STREAM:
            assert input.answer_on is not None
            stream = self.streams.open()
            self.inbox.open_request(envelope, number, stream)
            effects.append(self._serve_stream(input.answer_on, stream, self._here(stream), now, input.primed))
        else:
            if envelope.kind is Kind.REQUEST:
                self.inbox.open_request(envelope, number, 0)
            effects.append(Accepted(number))
        self.carried.waiting.append(Waiting(number, input.data, envelope))
        return hand_over(self) + effects

    def _too_much(self, envelope: Envelope) -> Problem | None:
        if envelope.kind is not Kind.REQUEST:
            return None
        most = self.limits.max_requests
        if len(self.inbox.open) >= most:
            return Problem(Reason.LIMIT, f"{most} requests of this session are in flight", envelope)
        most = self.limits.max_subscriptions
        if envelope.method == SUBSCRIBE and self.carried.subscriptions >= most:
            return Problem(Reason.LIMIT, f"this session has {most} subscriptions", envelope)
        return None

    def _take_problem(
        self, problem: Problem, input: Message, connection: Delivery | None, now: float
    ) -> list[Effect]:
        """A message refused under a valid number uses the number; its error is an event (L6)."""
        over = problem.reason is Reason.LIMIT
        refused = self.refusal(problem.reason, problem.message, own=over)
        if self.view is View.SESSION:
            self._record(input, b"")
            request = problem.request
            if request is not None and request.id not in self.inbox.open:
                code = -32000 if over else -32600
                error = error_response(request.id, code, problem.message, {"reason": problem.reason.value})
                self.append(0, "message", error, now)
            self._refuse_on(connection, input, refused, self.inbox.received)
        return [refused]

    def _record(self, input: Message, data: bytes) -> int:
        number = self.inbox.accept(input.process)
        self._entries.append(Message(data, input.digest, None, number=number))
        self._changed = True
        return number

    def _refuse_on(
        self, connection: Delivery | None, input: Message, refused: Refused, after: int = 0
    ) -> None:
        """On a socket: tell it there, once what it says is durable up to message `after` (L6)."""
        if connection is not None:
            connection.refused.append(Untold(input.number, after, refused.refusal))

    # Event streams --------------------------------------------------------------------------------

    def _listen(self, input: Listen, now: float) -> list[Effect]:
        over = self.ended()
        if over is not None:
            return [over]
        if self.view is View.STREAM:
            return self._listen_stream(input, now)
        cursor = input.cursor
        if cursor is None and self.door.state is not SessionState.UPGRADE_ACCEPTED_PENDING:
            cursor = Cursor(START, None)  # none means the start, except at the boundary (B1)
        if cursor is not None:
            unproven = self._prove(cursor)
            if unproven is not None:
                return [unproven]
        do = self.door.listen(None if cursor is None else cursor.stated.seq)
        match self._ask(do, input.verdict, now):
            case Do.SERVE:
                return [self._serve(input.connection, cursor, None, now)]
            case Do.DRAIN:
                return [self._serve(input.connection, cursor, self.door.event, now)]
            case Do.BURN:
                return self._burn(input, now)
            case Do.PROBE:
                return self._probe()
            case Do.REFUSE_BOUND:
                return [self._bound()]
            case other:
                raise AssertionError(other)

    def _burn(self, input: Listen, now: float) -> list[Effect]:
        """B1: the one-way door. Settle, supersede, and serve what is left after the cursor."""
        data = self.terminate(Reason.SESSION_SUPERSEDED, "non-resumable-boundary", "", now)
        if input.cursor is None:
            return [Ending(encode_block("session-superseded", data))]
        return [self._serve(input.connection, input.cursor, self.outbox.head, now)]

    def _serve(
        self, connection: ConnectionId, cursor: Cursor | None, stop: int | None, now: float
    ) -> Serving:
        stated = START if cursor is None else cursor.stated
        opening = self._event_id(stated)
        self._ack(0, stated.seq)
        delivery = Delivery(connection, Medium.EVENTS, stated.seq, opening, written_at=now)
        if stop is not None:
            delivery.stop, delivery.retry = stop, self.limits.upgrade_window
        return self._connect(delivery)

    def _listen_stream(self, input: Listen, now: float) -> list[Effect]:
        cursor = input.cursor
        if cursor is None:
            # M3: after the highest cursor stated for stream 0; what is evicted by then is skipped.
            seq = self.standalone_position
            here = EventId(seq, 0, input.held or self.outbox.floor_link)
            skip = frozenset(self.streams.answered(self.inbox))
            return [self._serve_stream(input.connection, 0, here, now, input.primed, skip)]
        stream = cursor.stated.stream
        if not self.streams.opened(stream):
            return [self.refusal(Reason.MALFORMED, f"stream {stream} was never opened")]
        unproven = self._prove_on_stream(cursor)
        if unproven is not None:
            return [unproven]
        self._ack(stream, cursor.stated.seq)
        here = self._event_id(cursor.stated)
        return [self._serve_stream(input.connection, stream, here, now, input.primed)]

    @property
    def standalone_position(self) -> int:
        """Where `GET /mcp` without a cursor continues (M3)."""
        return max(self.outbox.acks.get(0, 0), self.outbox.floor)

    def _serve_stream(
        self,
        connection: ConnectionId,
        stream: int,
        here: EventId,
        now: float,
        primed: bool,
        skip: frozenset[int] = frozenset(),
    ) -> Serving:
        for other in self.connections.values():
            if other.stream == stream:
                other.retry, other.close = _SUPERSEDED_RETRY, CLOSE_NORMAL  # M3: the newer one wins
        if primed:
            self.streams.prime(stream, here)
            self._changed = True
        delivery = Delivery(
            connection,
            Medium.EVENTS,
            max(here.seq, self.outbox.floor),
            here,
            stream=stream,
            skip=skip,
            primed=primed,
            written_at=now,
        )
        return self._connect(delivery)

    def _here(self, stream: int) -> EventId:
        return EventId(self.outbox.head, stream, self.outbox.link)

    # The door -------------------------------------------------------------------------------------

    def _upgrade(self, input: Upgrade, now: float) -> list[Effect]:
        over = self.ended()
        if over is not None:
            return [over]
        self.idle_since = now
        refused = self._prove(input.cursor)
        if refused is not None:
            return [refused]
        cursor = input.cursor.stated.seq
        self._ack(0, cursor)  # C4: before it is judged
        match self._ask(self.door.upgrade(input.nonce, cursor), input.verdict, now):
            case Do.OFFER:
                event = self._open_door(cursor, input.nonce, input.ticket, input.url, now)
                self.door.offer(event, input.nonce, input.ticket)
            case Do.OFFER_AGAIN:
                self._pin_also(cursor, now)
                self.door.show(input.nonce)
                self._changed = True
            case Do.BURN:
                self.terminate(Reason.SESSION_SUPERSEDED, "non-resumable-boundary", "", now)
                return [
                    self.refusal(Reason.SESSION_SUPERSEDED, "an upgrade is pending: this token is burned")
                ]
            case Do.PROBE:
                return self._probe()
            case Do.REFUSE_BOUND:
                return [self._bound()]
            case Do.REFUSE_SPENT:
                return [self.refusal(Reason.TICKET_SPENT, "this negotiation is concluded")]
            case other:
                raise AssertionError(other)
        assert self.door.event is not None
        return [Offered(self.door.event, self.door.negotiation, self.door.ticket, input.url)]

    def _handshake(self, input: Handshake, now: float) -> list[Effect]:
        refused = self.ended() or self._prove(input.cursor)
        if refused is not None:
            return [refused]
        cursor, pending = input.cursor.stated.seq, self.door.pending
        self._ack(0, cursor)  # C4
        match self._ask(self.door.handshake(input.ticket), input.verdict, now):
            case Do.OPEN_AND_BIND:
                event = self._open_door(cursor, input.nonce, None, input.url, now)
                return [self._bind(input, event, pending, now)]
            case Do.BIND:
                return [self._bind(input, None, pending, now)]
            case Do.PROBE:
                return self._probe()
            case Do.REFUSE_BOUND:
                return [self._bound()]
            case Do.REFUSE_SPENT:
                return [self.refusal(Reason.TICKET_SPENT, "this ticket was spent, or never issued")]
            case other:
                raise AssertionError(other)

    def _open_door(self, cursor: int, nonce: str, ticket: str | None, url: str, now: float) -> int:
        """The commit point's first half: append `U`, pin `(c, U]`."""
        data = msgspec.json.encode({"negotiation": nonce, "ticket": ticket, "url": url})
        event = self.append(0, "upgrade-accepted", data, now)
        self.outbox.pin_gap(cursor, event, now + self.limits.upgrade_window)
        for connection in self.connections.values():
            if connection.medium is Medium.EVENTS and connection.stop is None:
                connection.stop, connection.retry = event, self.limits.upgrade_window  # U10
        self._changed = True
        return event

    def _pin_also(self, cursor: int, now: float) -> None:
        """Whoever else is shown `U` has the upgrade window for their gap, too (L4, U7)."""
        pin, event = self.outbox.pin, self.door.event
        assert event is not None
        after = cursor if pin is None else min(cursor, pin.after)
        self.outbox.pin_gap(after, event, now + self.limits.upgrade_window)

    def _bind(self, input: Handshake, event: int | None, pending: Pending | None, now: float) -> Serving:
        """The commit point: `C` is what the log holds with this step (U2), the gate until its ack (U4)."""
        cursor, committed = input.cursor.stated, self.outbox.head
        self.outbox.pin_gap(cursor.seq, committed, now + self.limits.upgrade_window)
        delivery = Delivery(
            input.connection,
            Medium.SOCKET,
            cursor.seq,
            self._event_id(cursor),
            gate=committed,
            gate_floor=cursor.seq,
            ack_deadline=now + self.limits.ack_window,
            generation=self.door.bind(event),
            written_at=now,
        )
        self._changed = True
        self._connect(delivery)
        return Serving(delivery, committed, pending)

    def _ask(self, asked: Asked, verdict: Verdict | None, now: float) -> Do:
        """Look the question up; where the answer depends on a bound socket, on the probe's verdict (B6)."""
        if self.door.state is SessionState.WEBSOCKET_BOUND and verdict is not None:
            current = verdict.generation == self.door.generation
            if current and verdict.alive and asked in (Asked.LISTEN, Asked.UPGRADE, Asked.HANDSHAKE):
                return self.door.take(Asked.SOCKET_LIVES)
            if current and not verdict.alive:
                self._release(Asked.SOCKET_SILENT, CLOSE_FENCED, now)
        return self.door.take(asked)

    def _release(self, asked: Asked, code: int, now: float) -> None:
        """The binding ends: the state is SSE_ACTIVE and the old socket is closed, not waited for (B7, B8)."""
        self.door.take(asked)
        self.door.unbind()
        self._changed = True
        for connection in self.connections.values():
            if connection.medium is Medium.SOCKET:
                connection.close = connection.close or code
        self.idle_since = now

    def _probe(self) -> list[Effect]:
        bound = [c for c in self.connections.values() if c.generation == self.door.generation]
        return [Probing(bound[0])]

    def _bound(self) -> Refused:
        return self.refusal(Reason.WEBSOCKET_BOUND, "a live WebSocket holds this session")

    # Cursors --------------------------------------------------------------------------------------

    def _prove(self, cursor: Cursor) -> Refused | None:
        """C5, in its order: below the floor, above committed, another link."""
        stated = cursor.stated
        match cover(stated.seq, self.outbox.floor, self.outbox.committed):
            case Cover.EVICTED:
                text = f"events up to {self.outbox.floor} are evicted; the cursor is at {stated.seq}"
                return self.refusal(Reason.CURSOR_EVICTED, text)
            case Cover.AHEAD:
                text = f"the cursor is at {stated.seq}, the log at {self.outbox.committed}"
                return self.refusal(Reason.CURSOR_AHEAD, text)
            case Cover.COVERED:
                return self._match_link(cursor, cursor.held)

    def _prove_on_stream(self, cursor: Cursor) -> Refused | None:
        """C5 for one stream: only an evicted event *of that stream* matters (M4)."""
        stated = cursor.stated
        if stated.seq >= self.outbox.floor:
            return self._prove(cursor)
        last, link = self.outbox.evicted.get(stated.stream, (0, None))
        kept = self.streams.primed(stated.stream, stated.seq)
        if kept is None and stated.seq == last:
            kept = link
        if stated.seq < last or (kept is None and stated is not START):
            return self._prove(cursor)
        return self._match_link(cursor, kept)

    def _match_link(self, cursor: Cursor, held: Link | None) -> Refused | None:
        stated = cursor.stated
        if isinstance(stated, EventId) and stated.link != held:
            text = f"event {stated.seq} of this session has another link: the cursor is of another log"
            return self.refusal(Reason.CURSOR_FOREIGN, text)
        return None

    def _event_id(self, stated: Position) -> EventId:
        if isinstance(stated, EventId):
            return stated
        return EventId(self.outbox.floor, 0, self.outbox.floor_link)  # the bare 0

    def _ack(self, stream: int, seq: int) -> None:
        self.outbox.ack(stream, seq)

    def _acked(self, input: Acked, now: float) -> list[Effect]:
        connection = None
        if input.connection is not None:
            connection = self._speaking(input.connection)
            if connection is None:
                return []
        over = self.ended()
        if over is not None:
            return [over]
        self.idle_since = now
        unproven = self._prove(input.cursor)
        if unproven is not None:
            # Below the floor it is late, not wrong: what the socket still has to write decides (L3).
            if connection is not None and unproven.refusal.reason is not Reason.CURSOR_EVICTED:
                connection.close = unproven.refusal.row.close
            return [unproven]
        seq = input.cursor.stated.seq
        self._ack(0, seq)
        if connection is None:
            self._changed = True  # it is answered with, so it is durable first
        elif connection.gate is not None:
            if seq >= connection.gate:
                connection.gate = None
            elif seq > connection.gate_floor:
                connection.gate_floor = seq
                connection.ack_deadline = now + self.limits.ack_window  # U4: progress restarts the window
        return [Stated(self.outbox.acks.get(0, 0))]

    # Connections ----------------------------------------------------------------------------------

    def _connect(self, delivery: Delivery) -> Serving:
        self.connections[delivery.connection] = delivery
        return Serving(delivery, self.outbox.head)

    def _dropped(self, input: Dropped, now: float) -> list[Effect]:
        delivery = self.connections.pop(input.connection, None)
        if delivery is None:
            return []
        self.idle_since = now
        holds = delivery.medium is Medium.SOCKET and delivery.generation == self.door.generation
        if not holds or self.door.state is not SessionState.WEBSOCKET_BOUND:
            return []
        if input.pending is None:
            self._release(Asked.SOCKET_GONE, CLOSE_FENCED, now)
        else:
            self.door.take(Asked.SOCKET_UNTOLD)
            self.door.reopen(input.pending)
            self._changed = True
        return []

    def _end(self, input: End, now: float) -> list[Effect]:
        over = self.ended()
        if over is not None:
            return [over]
        self.terminate(input.reason, input.reason.value, input.message, now)
        return []

    def terminate(self, reason: Reason, told: str, message: str, now: float) -> bytes:
        """One step: all that is open settled, the terminal event appended, no more accepted (B1, B9, L7)."""
        if self.door.state is not SessionState.TERMINATED:
            self.door.take(Asked.END)
        for request in list(self.inbox.open.values()):
            self.settle_unknown(request, message or f"the session ended ({told})", now)
        self.carried.waiting.clear()
        data = msgspec.json.encode({"reason": told, "retryable": False, "action": "open-new-session"})
        if self.view is View.SESSION:
            self.append(0, "session-superseded", data, now)
        self.reason, self._changed = reason, True
        return data

    def settle_unknown(self, request: OpenRequest, why: str, now: float) -> None:
        """Settle an open request that nobody will answer (L7)."""
        error = outcome_unknown(request.id, why)
        self.inbox.settle(request.id)
        self.append(request.stream, "message", error, now)
        self.streams.finish(request.stream)

    def note_dispatched(self, number: int) -> None:
        """Messages up to this one may be handed over from the next commit on (N1)."""
        self.dispatched = number
        self._changed = True

    def touch(self) -> None:
        """The record has changed."""
        self._changed = True

    # Delivery -------------------------------------------------------------------------------------

    def poll(self, delivery: Delivery, now: float) -> Step:
        """What this connection may write now: the one place that lets an event out."""
        return poll(self, delivery, now)

    def advance(self, delivery: Delivery, position: int, now: float) -> None:
        """The connection has written everything up to `position`."""
        delivery.position = max(delivery.position, position)
        delivery.written_at = now

    def copy(self) -> Session:
        """An independent copy, for exploration."""
        other = Session(self.view, self.outbox.link, self.limits, self.durability, self.idle_since)
        other.outbox, other.inbox = self.outbox.copy(), self.inbox.copy()
        other.door, other.streams = self.door.copy(), self.streams.copy()
        other.carried, other.dispatched = self.carried.copy(), self.dispatched
        other.reason = self.reason
        other.connections = {id: delivery.copy() for id, delivery in self.connections.items()}
        other._taken, other._entries = self._taken, list(self._entries)
        other._marked, other._changed = self._marked, self._changed
        return other
