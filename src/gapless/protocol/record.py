"""A session's record: what of its state the log keeps beside the two logs, as bytes.

Whatever can be derived from the logs is not in here; what a restarted server must know to answer
the next request as this one would have is.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Final

import msgspec

from gapless.errors import StorageError
from gapless.protocol.carried import Waiting
from gapless.protocol.cursor import EventId, Link
from gapless.protocol.inbox import OpenRequest
from gapless.protocol.jsonrpc import RequestId
from gapless.protocol.outbox import Run
from gapless.protocol.refusal import Reason
from gapless.protocol.seam import SessionState
from gapless.protocol.session import Session, View
from gapless.protocol.settings import Limits

__all__ = ["Record", "Retained", "read_record", "restore", "write_record"]


class _Open(msgspec.Struct, array_like=True):
    id: RequestId
    number: int
    stream: int
    method: str
    token: RequestId | None


class _Kept(msgspec.Struct, array_like=True):
    """What is known of a stream that may go on, and of which events are evicted (M4)."""

    stream: int
    evicted: int
    link: bytes
    primes: Mapping[int, bytes]


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
    kept: tuple[_Kept, ...] = ()
    questions: tuple[int, ...] = ()
    pin: tuple[int, int] | None = None
    incarnation: int = 1
    told: dict[str, bytes] = {}
    lists: tuple[str, ...] = ()
    orders: dict[str, int] = {}
    ended_at: float | None = None
    """Unix time."""


_encoder: Final = msgspec.msgpack.Encoder()
_decoder: Final = msgspec.msgpack.Decoder(Record)


def write_record(session: Session, principal: str, ended_at: float | None) -> bytes:
    """The record of a session. `ended_at` is Unix time, in seconds; the machine knows no calendar."""
    door, inbox, outbox, carried = session.door, session.inbox, session.outbox, session.carried
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
            retired=inbox.retired,
            acks=outbox.acks,
            open=tuple(_Open(r.id, r.number, r.stream, r.method, r.token) for r in inbox.open.values()),
            asked=tuple(inbox.asked.items()),
            streams=session.streams.next,
            kept=_kept(session),
            questions=tuple(sorted(session.streams.questions)),
            pin=None if outbox.pin is None else (outbox.pin.after, outbox.pin.upto),
            incarnation=carried.incarnation,
            told=carried.told,
            lists=carried.lists,
            orders=carried.orders,
            ended_at=ended_at,
        )
    )


def read_record(data: bytes) -> Record:
    """Read a record.

    Raises:
        StorageError: it is damaged.
    """
    try:
        return _decoder.decode(data)
    except msgspec.DecodeError as error:
        raise StorageError(f"a session's record is damaged: {error}") from error


def _kept(session: Session) -> tuple[_Kept, ...]:
    if session.view is View.SESSION:
        return ()
    streams, evicted = session.streams, session.outbox.evicted
    return tuple(
        _Kept(stream, *evicted.get(stream, (0, b"")), streams.primes(stream))
        for stream in sorted({0, *streams.running})
        if stream == 0 or stream in evicted or streams.primes(stream)
    )


@dataclass(frozen=True, slots=True)
class Retained:
    """What a log holds of a session beside its record.

    Attributes:
        runs: what is retained of the outbox, `at` in seconds of the machine's clock.
        waiting: inbox messages that no backend was handed.
    """

    committed: int
    link: Link
    floor: int
    floor_link: Link
    received: int
    dispatched: int
    runs: tuple[Run, ...] = ()
    waiting: tuple[Waiting, ...] = ()


def restore(record: Record, log: Retained, limits: Limits, durability: str, now: float) -> Session:
    """The machine of a session as the log knows it. A binding has no live process behind it any more (B6)."""
    session = Session(record.view, log.link, limits, durability, now)
    outbox = session.outbox
    outbox.resume(log.committed, log.link, log.floor, log.floor_link, dict(record.acks), log.runs)
    if record.pin is not None:
        outbox.pin_gap(*record.pin, now + limits.upgrade_window)
    session.resume_taken(log.committed, log.dispatched)
    inbox = session.inbox
    inbox.received, inbox.process, inbox.retired = log.received, record.process, record.retired
    inbox.confirm(log.received, record.process)
    inbox.open = {r.id: OpenRequest(r.id, r.number, r.stream, r.method, r.token) for r in record.open}
    inbox.asked = dict(record.asked)
    running = {r.stream for r in record.open if r.stream}
    session.streams.resume(record.streams, running, log.runs, record.questions)
    if record.view is View.STREAM:
        _keep(session, record)
    door = session.door
    bound = record.state is SessionState.WEBSOCKET_BOUND
    door.state = SessionState.SSE_ACTIVE if bound else record.state
    door.event = None if bound else record.event
    door.negotiation, door.ticket = record.negotiation, record.ticket
    door.shown, door.concluded = frozenset(record.shown), frozenset(record.concluded)
    door.generation = record.generation
    carried = session.carried
    carried.incarnation, carried.told, carried.lists = record.incarnation, dict(record.told), record.lists
    carried.orders = dict(record.orders)
    carried.waiting.extend(log.waiting)
    session.reason = record.reason
    return session


def _keep(session: Session, record: Record) -> None:
    outbox = session.outbox
    if outbox.floor:
        outbox.evicted[0] = (outbox.floor, outbox.floor_link)  # unless it is known better
    for kept in record.kept:
        if kept.evicted:
            outbox.evicted[kept.stream] = (kept.evicted, Link(kept.link))
        elif kept.stream == 0:
            outbox.evicted.pop(0, None)
        for seq, link in kept.primes.items():
            session.streams.prime(kept.stream, EventId(seq, kept.stream, Link(link)))
