"""The client's machine: cursor, door, retry (§3–§8); inputs in, effects out.

One connection carries events at a time. Whatever happens to it, what follows is decided here, by
the phase and §8's table, and every failure leads through one bounded backoff that only progress
resets. Nothing here does I/O, reads a clock or draws a random number.
"""

from __future__ import annotations

from typing import Any, Final, Literal, assert_never

from gapless.errors import (
    ConnectionGaveUpError,
    CursorDiscontinuityError,
    GaplessError,
    MalformedError,
    RefusedError,
    SessionEndedError,
    SessionMigrationGapError,
)
from gapless.protocol import refusal as refusals
from gapless.protocol.block import Block, encode_block
from gapless.protocol.cursor import EventId
from gapless.protocol.incoming import Event, Incoming, read_object
from gapless.protocol.jsonrpc import Kind, peek
from gapless.protocol.moves import (
    Arrived,
    CloseSocket,
    CloseStream,
    Delete,
    Delivered,
    Effect,
    Failed,
    Get,
    Input,
    Knock,
    Leave,
    Move,
    Negotiate,
    Offered,
    Open,
    Opened,
    Over,
    PostAck,
    Received,
    Refused,
    Send,
    Settle,
    SocketClosed,
    SocketOpened,
    Start,
    StreamEnded,
    StreamOpened,
    Submit,
    Tick,
)
from gapless.protocol.outgoing import Outgoing
from gapless.protocol.phases import ALLOWED, CARRYING, LIVE, Phase, Policy, Retry
from gapless.protocol.refusal import Action, Reason, Refusal
from gapless.protocol.sending import Sending, StopFollowingError, for_good

__all__ = ["ALLOWED", "Client", "Phase", "Policy", "Retry"]

# What every event asks for: to look up a member of an enumeration takes Python 3.11 as long as two calls.
_BRIDGING: Final = Phase.BRIDGING
_STREAMING: Final = Phase.STREAMING
_OVER: Final = Phase.OVER
_NOTIFICATION: Final = Kind.NOTIFICATION


class Client:
    """One client's state. All times are seconds of one monotonic clock that the caller reads."""

    def __init__(
        self,
        policy: Policy = "auto",
        *,
        steps: Literal[1, 2] = 1,
        process: str = "",
        retry: Retry | None = None,
        session: str | None = None,
        cursor: EventId | None = None,
        ahead: int = 256,
    ) -> None:
        self.policy: Policy = policy
        self.steps = steps
        self.retry = retry or Retry()
        self.phase = Phase.NEW
        self.session = session
        self.incoming = Incoming(cursor, ahead)
        self.sending = Sending(self.retry, process)
        self._limits: dict[str, Any] = {}
        self.keepalive = 15.0
        self.attempt = 0
        self.stream: int | None = None
        self.socket: int | None = None
        self.committed = 0
        """The server's position as last told, for display only (C2)."""
        self.error: GaplessError | None = None
        self._ahead = ahead
        self._failures = 0
        self._faults = 0
        self._fenced = False
        self._next = Phase.LISTENING
        self._wake: float | None = None
        self._heard = 0.0
        self._deaf = False
        """Whether the reader has stopped for the application: it is we who are silent then (C8)."""
        self._attached = 0.0
        self._retry_floor = 0.0
        self._acked = 0 if cursor is None else cursor.seq
        self._ack_at: float | None = None
        self._door_shut = policy == "never"
        self._door_failures = 0
        self._door_wake = 0.0
        self._negotiations = 0
        self._outstanding: str | None = None
        self._ticket: str | None = None
        self._ticket_failures = 0

    # What the caller asks -------------------------------------------------------------------------

    @property
    def transport(self) -> str:
        """What carries events now: `sse`, `websocket`, or `none`."""
        if self.phase in (Phase.BRIDGING, Phase.BOUND):
            return "websocket"
        return "none" if self.stream is None else "sse"

    @property
    def outgoing(self) -> Outgoing:
        """The messages on their way to the server, and the requests that wait for an answer."""
        return self.sending.outgoing

    @property
    def limits(self) -> dict[str, Any]:
        """The limits that the server advertised."""
        return self._limits

    @limits.setter
    def limits(self, limits: dict[str, Any]) -> None:
        self._limits = limits
        message = limits.get("message")
        self.sending.limit = message if isinstance(message, int) and message > 0 else None

    @property
    def full(self) -> bool:
        """Whether the reader should stop until the application has taken something."""
        return self.incoming.full

    @property
    def room(self) -> int:
        """How many log events may be put in at one go."""
        return self.incoming.room if self.incoming.primed else 1

    @property
    def reading(self) -> bool:
        """Whether blocks of the event stream may be read now (U10)."""
        return self.phase is not Phase.KNOCKING

    @property
    def deadline(self) -> float | None:
        """When `Tick` is due next; `None` if nothing is."""
        if self.phase not in LIVE:
            return None
        times = [t for t in (self._wake, self.sending.wake, self._ack_at) if t is not None]
        if self.phase in CARRYING and not self.full:
            times.append(self._heard + 2 * self.keepalive)
        return min(times, default=None)

    @property
    def cursor(self) -> EventId | None:
        """What the application has processed; `None` before the session is open."""
        return self.incoming.cursor

    def take(self) -> Event | None:
        """The next event; once the application accepted it, or if it is not `wanted`, put in `Delivered`.

        What had arrived before the end is still there to be taken after it, unless the application left.
        """
        return self.incoming.take()

    def handle(self, input: Input, now: float) -> list[Effect]:
        """Take one input; return what to do, in order.

        Raises:
            AssertionError: a transition that `ALLOWED` does not have (a bug).
        """
        before = self.phase
        if before is _OVER:
            return self._too_late(input)
        try:
            effects = self._dispatch(input, now)
        except StopFollowingError as stop:
            effects = self._end(stop.error, live=stop.live)
        assert self.phase is before or self._may(before), f"{before} -> {self.phase} on {input}"
        return effects

    def _may(self, before: Phase) -> bool:
        # One input may make two steps: an end of one connection and the start of the next.
        return self.phase in ALLOWED[before] or any(self.phase in ALLOWED[via] for via in ALLOWED[before])

    def _dispatch(self, input: Input, now: float) -> list[Effect]:
        match input:  # the two that come with every event first
            case Delivered():
                if self._deaf:
                    self._listen_again(now)
                return self._delivered(now)
            case Arrived():
                return self._arrived(input, now) if input.attempt in (self.stream, self.socket) else []
            case Start():
                return self._open(now) if self.session is None else self._listen(now)
            case Submit():
                return self.sending.submit(input) + self._flush()
            case Move():
                return self._move(now)
            case Tick():
                self._listen_again(now)
                return self._tick(now)
            case Leave():
                if input.error is None:
                    self.incoming.clear()
                return self._end(input.error)
            case StreamEnded():
                return self._stream_ended(now) if input.attempt == self.stream else []
            case SocketClosed():
                return self._socket_closed(input, now) if input.attempt == self.socket else []
            case Received():
                if input.attempt != self.sending.attempt:
                    return []
                self._note_news(self.sending.answered(input.received))
                return self._flush()
            case Opened() | StreamOpened() | Offered() | SocketOpened() | Refused() | Failed():
                if input.attempt == self.sending.attempt and isinstance(input, Refused | Failed):
                    return self.sending.refused(input, now)
                return self._answered(input, now) if input.attempt == self.attempt else []
            case _:
                assert_never(input)

    # Making connections ---------------------------------------------------------------------------

    def _new_attempt(self) -> int:
        self.attempt += 1
        return self.attempt

    def _open(self, now: float) -> list[Effect]:
        self.phase = Phase.OPENING
        return [Open(self._new_attempt())]

    def _listen(self, now: float) -> list[Effect]:
        self.phase = Phase.LISTENING
        return [Get(self._new_attempt(), self.incoming.state())]

    def _knock(self, now: float) -> list[Effect]:
        """A handshake: with the ticket of the acceptance that came last, if one did, whoever asked for it.

        Without, at or above it, it would burn the session (U7, B1).
        """
        self.phase = Phase.KNOCKING
        self._ticket = self._ticket or self._ticket_at_hand()
        return [Knock(self._new_attempt(), self.incoming.state(), self._ticket)]

    def _negotiate(self, now: float) -> list[Effect]:
        """Ask in band; one nonce is outstanding until 101, `ticket-spent` or the end (U9).

        Where the last event is an acceptance already, that is the door to go through.
        """
        self._ticket = self._ticket_at_hand()
        if self._ticket is not None:
            return self._knock(now)
        self.phase = Phase.NEGOTIATING
        if self._outstanding is None:
            self._negotiations += 1
            self._outstanding = f"{self.sending.process}{self._negotiations}"
        return [Negotiate(self._new_attempt(), self.incoming.state(), self._outstanding)]

    def _answered(
        self, input: Opened | StreamOpened | Offered | SocketOpened | Refused | Failed, now: float
    ) -> list[Effect]:
        match input:
            case Opened():
                return self._opened(input, now)
            case StreamOpened() if self.phase is Phase.LISTENING:
                self.phase = Phase.STREAMING
                self.stream = input.attempt
                self._attach(now)
                return self._flush()
            case Offered() if self.phase is Phase.NEGOTIATING:
                self._ticket = input.ticket
                return self._knock(now)
            case SocketOpened() if self.phase is Phase.KNOCKING:
                return self._socket_opened(input, now)
            case Refused():
                return self._refused(input, now)
            case Failed():
                return self._unanswered(input.message, now)
            case _:
                return []

    def _opened(self, input: Opened, now: float) -> list[Effect]:
        self.session, self.sending.told = input.session, 0
        self.incoming = Incoming(input.cursor, self._ahead)
        self._acked = input.cursor.seq
        self.limits = input.limits
        self.keepalive = float(input.timers.get("keepalive", self.keepalive))
        return self._listen(now)

    def _attach(self, now: float) -> None:
        self.incoming.attach()
        self._heard = self._attached = now
        self._deaf = self.full

    def _socket_opened(self, input: SocketOpened, now: float) -> list[Effect]:
        effects: list[Effect] = []
        if self.stream is not None:
            effects.append(CloseStream(self.stream))
        self.stream, self.socket = None, input.attempt
        self._attach(now)
        self.phase = Phase.BRIDGING
        self._forget_door()
        if input.echo is not None:
            try:
                self.incoming.check_echo(input.echo)
            except CursorDiscontinuityError as error:
                return effects + self._fault(error, now)
        return effects

    def _forget_door(self) -> None:
        """The negotiation is concluded: its nonce is outstanding no more (U9)."""
        self._outstanding = self._ticket = None
        self._ticket_failures = 0

    def _listen_again(self, now: float) -> None:
        """The application has taken something: from here on the server can be silent again (C8)."""
        if self._deaf and not self.full:
            self._deaf, self._heard = False, now

    # What arrives ---------------------------------------------------------------------------------

    def _arrived(self, input: Arrived, now: float) -> list[Effect]:
        self._heard = now
        block = input.block
        if block is None:
            self._lived(now)
            return []
        try:
            if self.incoming.primed:
                return self._control(block, now) if block.id is None else self._events((block, *input.more))
            if self.socket is not None:
                body = self.incoming.bridge(block)
                self.committed = max(self.committed, int(body["cursor"]))
                return self._statement(body) + self._close_gap()
            if block.id is None:
                return self._control(block, now)
            self.incoming.prime(block)
            if block.retry is not None:
                self._retry_floor = min(block.retry / 1000, 60.0)
            return []
        except MalformedError as error:
            return self._fault(CursorDiscontinuityError(f"a block that makes no sense: {error}"), now)
        except (CursorDiscontinuityError, SessionMigrationGapError) as error:
            return self._fault(error, now)

    def _events(self, run: tuple[Block, ...]) -> list[Effect]:
        try:
            self.incoming.events(run, self.phase is _BRIDGING)
        finally:
            assert self.incoming.anchor is not None
            self.committed = max(self.committed, self.incoming.anchor.seq)
        self._deaf = self.full
        return []

    def _control(self, block: Block, now: float) -> list[Effect]:
        # A `retry:` here is the one before `U`, which holds back an EventSource; we move at once (U10).
        match block.event:
            case "received":
                body = read_object(block.data)
                # The block after priming opens the connection. A POST made since has its own answer; one
                # made before may hang in a connection that died with the last one.
                if self.stream is not None:
                    self.sending.abandon(self.stream)
                if body.get("resend") or (self.stream is not None and self.outgoing.posting is None):
                    return self._statement(body)
                self._note_news(self.sending.note(body.get("received"), body.get("process")))
                return []
            case "refused":
                return self.sending.told_refused(read_object(block.data))
            case "probe":
                if self.socket is None:
                    return []
                return [Send(self.socket, encode_block("probe-ack", block.data or b"{}"))]  # B6
            case "keepalive":
                self._lived(now)
                return []
            case "session-superseded":
                return self._superseded(read_object(block.data))
            case _:
                return []

    def _delivered(self, now: float) -> list[Effect]:
        """Only now does the cursor move: the application has accepted the event."""
        event = self.incoming.delivered()
        if event is None:
            return []
        self._progress()
        if event.event == "session-superseded":
            return self._superseded(read_object(event.data))
        if self.phase is _BRIDGING:
            return self._close_gap() or self._ack(now)
        effects = self._ack(now)
        if event.event == "upgrade-accepted":  # of which the application takes nothing (B7)
            return effects + self._accepted(event, now)
        return effects + self._try_door(now) if self.phase is _STREAMING else effects

    def _accepted(self, event: Event, now: float) -> list[Effect]:
        """An acceptance of ours is the door, if the POST's answer is late. The stream's end leads to it,
        too; anywhere else this is history (U9)."""
        body = read_object(event.data)
        if self.phase is not Phase.NEGOTIATING or body.get("negotiation") != self._outstanding:
            return []
        self._ticket = _text(body.get("ticket"))
        return self._knock(now)

    def wanted(self, event: Event) -> bool:
        """Whether the application should see this event.

        None of ours, no answer that it already has, and no question that nobody would hear the answer of.
        """
        if event.event != "message":
            return False
        try:
            envelope = peek(event.data)
        except MalformedError:
            return True
        if envelope.kind is _NOTIFICATION or envelope.id is None:
            return True
        if envelope.kind is Kind.RESPONSE:
            return self.sending.wants(envelope.id)
        return self.phase is not _OVER

    # Acks -----------------------------------------------------------------------------------------

    def _close_gap(self) -> list[Effect]:
        """U3: once everything up to `C` is processed, say so; then the socket is ours."""
        gap, cursor = self.incoming.gap, self.cursor
        if gap is None or cursor is None or not self.incoming.primed or cursor.seq < gap:
            return []
        self.phase, self.incoming.gap = Phase.BOUND, None
        self._door_failures = 0
        return [self._send_ack()]

    def _ack(self, now: float) -> list[Effect]:
        """U5: at least one per 64 events or second of progress; on SSE a quarter as often."""
        assert self.incoming.cursor is not None
        progress = self.incoming.cursor.seq - self._acked
        if progress <= 0:
            return []
        on_socket = self.socket is not None
        if progress >= (64 if on_socket else 256):
            return self._ack_now()
        if self._ack_at is None:
            self._ack_at = now + (1.0 if on_socket else 4.0)
        return []

    def _ack_now(self) -> list[Effect]:
        if self.socket is not None and self.incoming.primed:
            return [self._send_ack()]
        self._ack_at = None
        if self.stream is None or self.cursor is None:
            return []
        self._acked = self.cursor.seq
        return [PostAck(self.cursor)]

    def _send_ack(self) -> Send:
        assert self.socket is not None and self.cursor is not None
        self._acked, self._ack_at = self.cursor.seq, None
        frame = encode_block("cursor-ack", b'{"cursor":"%s"}' % str(self.cursor).encode())
        return Send(self.socket, frame, states=True)

    # Sending --------------------------------------------------------------------------------------

    def _flush(self) -> list[Effect]:
        if self.phase is Phase.OVER or (self.socket is not None and not self.incoming.primed):
            return []
        return self.sending.flush(self.socket, self.attempt)

    def _statement(self, body: dict[str, Any]) -> list[Effect]:
        """A statement of `received` that makes us resend from there (L6)."""
        self._note_news(self.sending.state(body.get("received"), body.get("process")))
        return self._flush()

    def _note_news(self, news: bool) -> None:
        if news:
            self._progress()

    # The door -------------------------------------------------------------------------------------

    def _try_door(self, now: float) -> list[Effect]:
        """B7: only while a stream runs, when the application has just taken an event, with backoff."""
        if self.phase is not Phase.STREAMING or self._door_shut or now < self._door_wake:
            return []
        return self._move(now)

    def _move(self, now: float) -> list[Effect]:
        if self.phase is not Phase.STREAMING or not self.incoming.primed:
            return []
        return self._knock(now) if self.steps == 1 else self._negotiate(now)

    def _shut_door(self, now: float) -> list[Effect]:
        """U6: not at this URL. In one step the stream goes on; in two, `U` is durable: a new session."""
        self._door_shut = True
        if self.policy == "require":
            text = "the server, or something before it, takes no WebSocket upgrades"
            return self._end(RefusedError(text, code=Reason.UPGRADE_UNAVAILABLE, hint='use upgrade="auto"'))
        if self._outstanding is not None or self._ticket is not None:
            text = "an upgrade was accepted, but no handshake gets through"
            return self._end(
                SessionEndedError(
                    text, code=Reason.UPGRADE_UNAVAILABLE, hint='open a new session with upgrade="never"'
                )
            )
        return self._carry_on(now)

    def _carry_on(self, now: float, delay: float | None = None) -> list[Effect]:
        """After a handshake or negotiation that came to nothing: on with the stream, if there is one."""
        self._door_failed(now)
        self._door_wake = max(self._door_wake, now + (delay or 0.0))
        if self.stream is not None:
            self.phase = Phase.STREAMING
            self._heard = now
            return []
        return self._rest(Phase.LISTENING, None, now)

    def _door_failed(self, now: float) -> None:
        """It is left alone for a while, longer each time (B7)."""
        self._door_failures += 1
        self._door_wake = now + self.retry.door_delay(self._door_failures)

    # What goes wrong ------------------------------------------------------------------------------

    def _unanswered(self, message: str, now: float) -> list[Effect]:
        """No answer, or one that is nobody's: a proxy's page, a reset, a timeout."""
        match self.phase:
            case Phase.OPENING:
                return self._rest(Phase.OPENING, None, now, message)
            case Phase.NEGOTIATING:
                return self._rest(Phase.NEGOTIATING, None, now, message)  # the same nonce again (U7)
            case Phase.KNOCKING if self._ticket is not None:
                return self._rest(Phase.KNOCKING, None, now, message)  # B3: repeating it is no resume
            case Phase.KNOCKING:
                return self._carry_on(now)
            case _:
                return self._rest(Phase.LISTENING, None, now, message)

    def _refused(self, input: Refused, now: float) -> list[Effect]:
        """§8: each refusal has one next action."""
        refusal = input.refusal
        if refusal is not None and refusal.reason is Reason.NOT_FOUND:
            refusal = None  # whoever says so is a server of ours, but not at this URL
        if refusal is None:
            if input.status == 426:
                return self._shut_door(now)
            if (
                self.phase is Phase.OPENING
                and 400 <= input.status < 500
                and input.status not in (408, 425, 429)
            ):
                return self._end(_opens_none(input.status))
            if self.phase is Phase.KNOCKING and self._ticket is not None:
                self._ticket_failures += 1
                if self._ticket_failures >= 2:  # U6: something on the way answers handshakes by itself
                    return self._shut_door(now)
            return self._unanswered(f"answered {input.status}", now)
        self.committed = max(self.committed, refusal.committed or 0)
        evicted = refusal.reason is Reason.CURSOR_EVICTED
        if evicted and self._still_covered(refusal):
            return self._rest(self._retry_of(self.phase), None, now, refusal.message)
        if evicted and self.stream is not None:
            return self._carry_on(now)  # drain the stream that is open
        match refusal.row.action:
            case Action.RETRY:
                if refusal.reason is Reason.WEBSOCKET_BOUND and self._fenced:
                    raise for_good(refusal)  # fenced once already: somebody else lives there
                at_door = self.phase in (Phase.NEGOTIATING, Phase.KNOCKING) and self._ticket is None
                if at_door and self.stream is not None and self.policy != "require":
                    return self._carry_on(now, input.retry_after)  # the stream lives: no reason to give it up
                failed = RefusedError(refusal.message, code=refusal.reason)
                return self._rest(self._retry_of(self.phase), input.retry_after, now, refusal.message, failed)
            case Action.RESUME:
                self._forget_door()
                return self._carry_on(now)
            case Action.CLOSE_DOOR:
                return self._shut_door(now)
            case Action.NEW_SESSION | Action.FAIL | Action.RESEND | Action.REAUTHENTICATE:
                raise for_good(refusal)

    def _still_covered(self, refusal: Refusal) -> bool:
        """A refusal may be of a cursor that has moved on since: it says up to where is evicted."""
        cursor = self.cursor
        return cursor is not None and refusal.floor is not None and cursor.seq >= refusal.floor

    def _retry_of(self, phase: Phase) -> Phase:
        return phase if phase in (Phase.OPENING, Phase.KNOCKING, Phase.NEGOTIATING) else Phase.LISTENING

    def _stream_ended(self, now: float) -> list[Effect]:
        self.stream = None
        if self.phase in (Phase.NEGOTIATING, Phase.KNOCKING, Phase.RESTING):
            return []  # an answer or a timer decides
        last = self.incoming.last
        if last is not None and last.event == "session-superseded":
            return self._superseded(read_object(last.data))
        if last is not None and last.event == "upgrade-accepted" and self.policy != "never":
            ticket = self._ticket_at_hand()
            # Without a ticket the door has been passed: if that was our own handshake, whose answer
            # was lost, the stream is the way on, and the server finds the dead socket out (B6).
            if ticket is not None or (not self._door_shut and not self._door_failures):
                self._ticket = ticket
                return self._knock(now)  # U9
        return self._rest(Phase.LISTENING, None, now, "the event stream ended")

    def _ticket_at_hand(self) -> str | None:
        """The ticket of the acceptance that is the last event so far, if it is one."""
        last = self.incoming.last
        if last is None or last.event != "upgrade-accepted":
            return None
        return _text(read_object(last.data).get("ticket"))

    def _socket_closed(self, input: SocketClosed, now: float) -> list[Effect]:
        self.socket = None
        self._door_failed(now)
        self.outgoing.resend()
        match input.code:
            case refusals.CLOSE_OVER:
                return self._over(input.reason or Reason.SESSION_ENDED)
            case refusals.CLOSE_FENCED:
                self._fenced = True
            case refusals.CLOSE_MALFORMED | refusals.CLOSE_UNSUPPORTED_DATA:
                return self._end(
                    RefusedError(f"the server closed the socket with {input.code}", code="malformed")
                )
            case _:
                pass
        return self._rest(Phase.LISTENING, None, now, f"the socket closed with {input.code}")

    def _fault(self, error: GaplessError, now: float) -> list[Effect]:
        """C7: drop the connection, resume from the last good cursor; twice without progress, raise."""
        self._faults += 1
        if self._faults >= 2:
            return self._end(error)
        return self._lose(now) + self._rest(Phase.LISTENING, None, now, str(error))

    def _lose(self, now: float) -> list[Effect]:
        """Give up on what carries events; as with any socket that goes, the door waits (B7)."""
        if self.socket is not None:
            self._door_failed(now)
            self.outgoing.resend()
        return self._drop()

    def _drop(self) -> list[Effect]:
        effects: list[Effect] = []
        if self.stream is not None:
            effects.append(CloseStream(self.stream))
        if self.socket is not None:
            effects.append(CloseSocket(self.socket))
        self.stream = self.socket = None
        return effects

    def _rest(
        self,
        then: Phase,
        delay: float | None,
        now: float,
        message: str = "",
        error: GaplessError | None = None,
    ) -> list[Effect]:
        """Back off before the next move; give up, visibly, after so many failures without progress."""
        self._failures += 1
        if self._failures > self.retry.attempts:
            gave_up = ConnectionGaveUpError(f"no progress in {self.retry.attempts} attempts; last: {message}")
            # A session that somebody else holds is not ours to delete.
            elsewhere = self._fenced or (error is not None and error.code == Reason.WEBSOCKET_BOUND)
            return self._end(error or gave_up, live=not elsewhere)
        self.phase, self._next = Phase.RESTING, then
        backoff = 0.0 if self._failures == 1 else self.retry.delay(self._failures - 1)
        self._wake = now + max(backoff, self._retry_floor, delay or 0.0)
        return []

    def _lived(self, now: float) -> None:
        """A connection that has lived for a keep-alive is no failure, however little it carried."""
        if now - self._attached >= self.keepalive * 0.9:
            self._progress()

    def _progress(self) -> None:
        self._failures = self._faults = 0
        if self._fenced and (self.stream is not None or self.socket is not None):
            self._fenced = False

    def _tick(self, now: float) -> list[Effect]:
        effects: list[Effect] = []
        if self._wake is not None and now >= self._wake:
            self._wake = None
            if self.phase is Phase.RESTING:
                effects += self._resume(now)
        if self.sending.wake is not None and now >= self.sending.wake:
            self.sending.wake = None
            effects += self._flush()
        if self._ack_at is not None and now >= self._ack_at:
            effects += self._ack_now()
        if self.phase in CARRYING and not self.full and now >= self._heard + 2 * self.keepalive:  # C8
            streaming = self.phase is Phase.STREAMING
            effects += self._lose(now)
            # A stream that is dropped has ended, too: where it did decides where to go (U9).
            if streaming:
                effects += self._stream_ended(now)
            else:
                effects += self._rest(Phase.LISTENING, None, now, "nothing heard")
        return effects

    def _resume(self, now: float) -> list[Effect]:
        match self._next:
            case Phase.OPENING:
                return self._open(now)
            case Phase.KNOCKING:
                return self._knock(now)
            case Phase.NEGOTIATING:
                return self._negotiate(now)
            case _:
                return self._listen(now)

    # The end --------------------------------------------------------------------------------------

    def _superseded(self, body: dict[str, Any]) -> list[Effect]:
        return self._over(_text(body.get("reason")) or Reason.SESSION_SUPERSEDED)

    def _over(self, reason: str) -> list[Effect]:
        """The server says that the session is over (B4, U4)."""
        return self._end(
            SessionEndedError(f"the server ended the session: {reason}", code=reason), live=False
        )

    def _too_late(self, input: Input) -> list[Effect]:
        """What was there before the end is taken yet; a session opened after it is not left behind (L7)."""
        if isinstance(input, Delivered):
            self.incoming.delivered()
        if not isinstance(input, Opened) or self.session is not None:
            return []
        self.session = input.session
        return [Delete()]

    def _end(self, error: GaplessError | None, *, live: bool = True) -> list[Effect]:
        """L7: settle everything that has no answer, forget the cursor, DELETE where the session may live."""
        effects = self._drop()
        text = "the client left" if error is None else str(error)
        sent = self.sending.told is not None
        text += "; the outcome is unknown" if sent else "; this was not sent"
        reason, cause = "outcome-unknown" if sent else "not-sent", "closed" if error is None else error.code
        answered = self.incoming.answers()
        for id in self.outgoing.waiting:
            if id not in answered:
                effects.append(Settle(id, -32000, text, {"reason": reason, "cause": cause}))
        self.outgoing.waiting.clear()
        if live and self.session is not None:
            effects.append(Delete())
        self.phase, self.error, self._wake = Phase.OVER, error, None
        return [*effects, Over(error)]

    def copy(self) -> Client:
        """An independent copy, for exploration."""
        other = object.__new__(Client)
        other.__dict__.update(self.__dict__)
        other.sending, other.incoming = self.sending.copy(), self.incoming.copy()
        return other


def _opens_none(status: int) -> RefusedError:
    """The end of a client whose server opens no session, and does not say why in this protocol's words."""
    text = f"the server answered {status} to POST /session"
    if status in (401, 403):
        return RefusedError(text, code=Reason.UNAUTHENTICATED, hint="does it want credentials?")
    text += ": it does not speak this protocol"
    return RefusedError(text, code="not-gapless", hint="is this the URL of a Gapless server?")


def _text(value: object) -> str | None:
    return value if isinstance(value, str) else None
