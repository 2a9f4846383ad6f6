"""The client's side of the outbox: the cursor, and the check that every event follows it (C6, C7)."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable
from contextlib import suppress
from typing import Any, Final, cast

import msgspec

from gapless.errors import CursorDiscontinuityError, MalformedError, SessionMigrationGapError
from gapless.protocol.block import Block
from gapless.protocol.cursor import EventId, id_after, parse_event_id
from gapless.protocol.jsonrpc import Kind, RequestId, peek
from gapless.protocol.seam import echo_fault

__all__ = ["Event", "Incoming", "read_object"]

_OURS: Final = ("upgrade-accepted", "session-superseded")
"""The events of this protocol's own."""


class Event(msgspec.Struct, frozen=True):
    """A log event on its way to the application."""

    id: EventId
    event: str
    data: bytes


def read_object(data: bytes | None) -> dict[str, Any]:
    """The JSON object that a control block or the protocol's own event holds.

    Raises:
        MalformedError: it holds none.
    """
    try:
        found: Any = msgspec.json.decode(data or b"{}")
    except (msgspec.DecodeError, RecursionError) as error:
        raise MalformedError(f"a control block that is not JSON: {error}") from None
    if not isinstance(found, dict):
        raise MalformedError("a control block that holds no object")
    return cast("dict[str, Any]", found)


class Incoming:
    """What has arrived, and what of it the application has processed.

    `cursor` is the last event processed, and the only position ever stated (C4). `stated` is the
    cursor that the connection in use was asked for with, `anchor` the last event that arrived on
    it. What has arrived beyond `cursor`, on whatever connection, lies in a queue, bounded by the
    reader, which stops at `full`.
    """

    __slots__ = ("_ahead", "_in_hand", "_queue", "anchor", "cursor", "gap", "last", "primed", "stated")

    def __init__(self, cursor: EventId | None, ahead: int) -> None:
        self.cursor = cursor
        self.stated = cursor
        self.anchor = cursor
        self.primed = False
        self.gap: int | None = None
        """`C`: nothing above it may arrive before its ack (U4); `None` where there is no gap."""
        self.last: Event | None = None
        """The last event of the connection in use."""
        self._ahead = ahead
        self._queue: deque[Event] = deque()
        self._in_hand: Event | None = None

    @property
    def room(self) -> int:
        """How many events may be read ahead of the application now."""
        return self._ahead - len(self._queue)

    @property
    def full(self) -> bool:
        """Whether the reader should stop until the application has taken something."""
        return self.room <= 0

    def state(self) -> EventId:
        """The cursor to state with the next request: what is processed, nothing else."""
        assert self.cursor is not None
        self.stated = self.cursor
        return self.cursor

    def attach(self) -> None:
        """A connection begins at the stated cursor. What was read ahead comes again, and is taken once."""
        self.anchor, self.primed, self.last, self.gap = self.stated, False, None, None

    def take(self) -> Event | None:
        """The next event for the application; `None` while there is none or one is in its hands."""
        if self._in_hand is not None or not self._queue:
            return None
        self._in_hand = self._queue.popleft()
        return self._in_hand

    def delivered(self) -> Event | None:
        """The application accepted the event in its hands: only now does the cursor move."""
        event, self._in_hand = self._in_hand, None
        if event is not None:
            self.cursor = event.id
        return event

    def answers(self) -> set[RequestId]:
        """The requests whose answers the application has not taken yet."""
        found = set[RequestId]()
        for event in self._queue:
            with suppress(MalformedError):
                envelope = peek(event.data)
                if envelope.kind is Kind.RESPONSE and envelope.id is not None:
                    found.add(envelope.id)
        return found

    def clear(self) -> None:
        """Forget what the application has not taken."""
        self._queue.clear()

    def prime(self, block: Block) -> None:
        """The first block of an event stream says where it starts (C6).

        Raises:
            CursorDiscontinuityError: somewhere else than where we asked.
        """
        if block.id is None or block.data or parse_event_id(block.id) != self.anchor:
            raise CursorDiscontinuityError(f"the stream starts at {block.id}, not at {self.anchor}")
        self.primed = True

    def bridge(self, block: Block) -> dict[str, Any]:
        """The first block of a socket says what it carried across (U2); its body.

        Raises:
            CursorDiscontinuityError: no echo, one behind our cursor, or not of our handshake.
        """
        assert self.anchor is not None
        if block.event != "resume-cursor":
            raise CursorDiscontinuityError("the socket's first block is no resume-cursor")
        body = read_object(block.data)
        self.check_echo(body.get("cursor"))
        if body.get("from") != str(self.anchor):
            raise CursorDiscontinuityError("the echo is not of our handshake")
        self.primed = True
        return body

    def check_echo(self, echo: Any) -> None:
        """Check an echoed position against our cursor, and against what was echoed before (U2).

        Raises:
            CursorDiscontinuityError: it is missing, lies behind, or differs.
        """
        assert self.anchor is not None
        number = echo if isinstance(echo, int) and not isinstance(echo, bool) else None
        fault = echo_fault(self.anchor.seq, number)
        if fault is not None or self.gap not in (None, number):
            raise CursorDiscontinuityError(f"the echoed cursor {echo} does not follow {self.anchor}")
        self.gap = number

    def events(self, run: Iterable[Block], bridging: bool) -> None:
        """Take log events: contiguous, linked (C7), and not above the gap before its ack (U4).

        Those before one that raises are taken.

        Raises:
            SessionMigrationGapError: a socket's first event does not follow our cursor (U3).
            CursorDiscontinuityError: anything else that does not follow.
            MalformedError: an event of this protocol's own that makes no sense.
        """
        assert self.anchor is not None and self.cursor is not None
        id = self.anchor
        known = (
            self._queue[-1].id if self._queue else self.cursor if self._in_hand is None else self._in_hand.id
        )
        for block in run:
            event, data = block.event, block.data or b""
            if event in _OURS:
                read_object(data)  # if it makes no sense, then before anybody has processed it
            # Nearly every event is of its predecessor's stream: then there is one ID that it can have.
            id = id_after(id, id.stream, event, data)
            if block.id != str(id):
                id = self._of_another_stream(block, data, bridging)
            if bridging and self.gap is not None and id.seq > self.gap:
                raise CursorDiscontinuityError(f"event {id.seq} arrived before the ack of {self.gap}")
            self.anchor = id
            self.last = Event(id, event, data)
            if id.seq > known.seq:
                self._queue.append(self.last)
            elif id.seq == known.seq and id != known:
                raise CursorDiscontinuityError(f"event {id.seq} is another than the one that came before")

    def _of_another_stream(self, block: Block, data: bytes, bridging: bool) -> EventId:
        """The ID of an event that is not of the stream of the one before it; what is wrong with it, if so."""
        assert self.anchor is not None and block.id is not None
        id = parse_event_id(block.id)
        if id.seq != self.anchor.seq + 1:
            text = f"event {id.seq} arrived where {self.anchor.seq + 1} follows"
            if bridging and self.last is None:
                raise SessionMigrationGapError(text)
            raise CursorDiscontinuityError(text)
        if id != id_after(self.anchor, id.stream, block.event, data):
            raise CursorDiscontinuityError(f"event {id.seq} is not what follows {self.anchor}")
        return id

    def copy(self) -> Incoming:
        """An independent copy."""
        other = Incoming(self.cursor, self._ahead)
        for name in Incoming.__slots__:
            setattr(other, name, getattr(self, name))
        other._queue = deque(self._queue)
        return other
