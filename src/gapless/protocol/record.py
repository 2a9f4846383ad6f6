"""A session's record: what of its state the log keeps beside the two logs, as bytes.

Whatever can be derived from the logs is not in here; what a restarted server must know to answer
the next request as this one would have is.
"""

from __future__ import annotations

from typing import Final

import msgspec

from gapless.protocol.cursor import Link
from gapless.protocol.inbox import OpenRequest
from gapless.protocol.jsonrpc import RequestId
from gapless.protocol.refusal import Reason
from gapless.protocol.seam import SessionState
from gapless.protocol.session import Session, View
from gapless.protocol.settings import Limits

__all__ = ["Record", "read_record", "restore", "write_record"]


class _Open(msgspec.Struct, array_like=True):
    id: RequestId
    number: int
    stream: int
    method: str
    token: RequestId | None


class Record(msgspec.Struct, frozen=True):
    """The stored form. New fields need defaults, so that older records can be read."""

    view: View
    principal: str
    state: SessionState
    reason: Reason | None = None
    event: int | None = None
    negotiation: str = ""
    ticket: str | None = None
    shown: tuple[str, ...] = ()
    concluded: tuple[str, ...] = ()
    generation: int = 0
    process: str | None = None
    retired: tuple[str, ...] = ()
    acks: dict[int, int] = {}
    open: tuple[_Open, ...] = ()
    asked: tuple[tuple[RequestId, int], ...] = ()
    streams: int = 1
    ended_at: float | None = None
    """Unix time."""


_encoder: Final = msgspec.msgpack.Encoder()
_decoder: Final = msgspec.msgpack.Decoder(Record)


def write_record(session: Session, principal: str, ended_at: float | None) -> bytes:
    """The record of a session. `ended_at` is Unix time, in seconds; the machine knows no calendar."""
    door, inbox = session.door, session.inbox
    return _encoder.encode(
        Record(
            view=session.view,
            principal=principal,
            state=door.state,
            reason=session.reason,
            event=door.event,
            negotiation=door.negotiation,
            ticket=door.ticket,
            shown=tuple(sorted(door.shown)),
            concluded=tuple(sorted(door.concluded)),
            generation=door.generation,
            process=inbox.process,
            retired=tuple(sorted(inbox.retired)),
            acks=session.outbox.acks,
            open=tuple(_Open(r.id, r.number, r.stream, r.method, r.token) for r in inbox.open.values()),
            asked=tuple(inbox.asked.items()),
            streams=session.streams.next,
            ended_at=ended_at,
        )
    )


def read_record(data: bytes) -> Record:
    """Read a record.

    Raises:
        msgspec.DecodeError: not one of ours.
    """
    return _decoder.decode(data)


def restore(
    record: Record,
    *,
    committed: int,
    link: Link,
    floor: int,
    floor_link: Link,
    received: int,
    limits: Limits,
    durability: str,
    now: float,
) -> Session:
    """The machine of a session as the log knows it. A binding has no live process behind it any more (B6)."""
    session = Session(record.view, link, limits, durability, now)
    session.outbox.resume(committed, link, floor, floor_link, dict(record.acks), now)
    session.resume_taken(committed)
    inbox = session.inbox
    inbox.received, inbox.process, inbox.retired = received, record.process, frozenset(record.retired)
    inbox.confirm(received, record.process)
    inbox.open = {r.id: OpenRequest(r.id, r.number, r.stream, r.method, r.token) for r in record.open}
    inbox.asked = dict(record.asked)
    session.streams.resume(record.streams, (r.stream for r in record.open if r.stream))
    door = session.door
    bound = record.state is SessionState.WEBSOCKET_BOUND
    door.state = SessionState.SSE_ACTIVE if bound else record.state
    door.event = None if bound else record.event
    door.negotiation, door.ticket = record.negotiation, record.ticket
    door.shown, door.concluded = frozenset(record.shown), frozenset(record.concluded)
    door.generation = record.generation
    session.reason = record.reason
    return session
