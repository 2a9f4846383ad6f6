"""A connection: a position in the outbox, and what it may write next (§1, U3, U4, U10).

A `Delivery` owns no queue and no history. `poll` looks at it and at the session and says: write
this, finish, or wait. That answer is the only way an event gets to a wire, live or replayed, on
SSE or WebSocket, in either view.
"""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from enum import Enum
from typing import TYPE_CHECKING, NewType

import msgspec

from gapless.protocol.block import COMMENT, encode_block, encode_prime
from gapless.protocol.cursor import EventId
from gapless.protocol.refusal import (
    CLOSE_ACK_WINDOW,
    CLOSE_EVICTED,
    CLOSE_GOING_AWAY,
    CLOSE_NORMAL,
    CLOSE_OVER,
    Refusal,
)

if TYPE_CHECKING:
    from gapless.protocol.session import Session

__all__ = ["ConnectionId", "Deliver", "Delivery", "Finish", "Medium", "Step", "Untold", "Wait", "poll"]

ConnectionId = NewType("ConnectionId", int)


_SESSION_RETRY = 100
"""Milliseconds of the `retry:` in the session view, whose clients back off by themselves."""


class Medium(Enum):
    """What a connection speaks."""

    EVENTS = "events"
    SOCKET = "socket"


class Untold(msgspec.Struct, frozen=True):
    """A refusal that a socket has yet to be told: of message `number`, once the inbox has `after`."""

    number: int | None
    after: int
    refusal: Refusal


@dataclass(slots=True)
class Delivery:
    """One connection's state; a number where others keep a queue.

    Attributes:
        position: everything up to here has been written.
        opening: the event ID to open with: what the client stated, or where its stream starts.
        stream: the one stream to deliver (stream view), `None` for all.
        stop: the last event to deliver; then the stream ends (B2, U10).
        gate: `C`: nothing above it is written until its ack (U4); `None` once that came.
        gate_floor: the highest ack inside the gap; `ack_deadline`: when the next one is due.
        skip: events that are not repeated (M3).
        generation: of the binding, for sockets (B8).
        stated: the `received` last stated; `restate` asks for it again, `resend` with `"resend": true`.
        probe: a nonce to send before anything else (B6).
        refused: refusals to tell once they are durable, as many as the reader lets gather.
        retry: a `retry:` in seconds to send next.
        close: end at once, with this close code on a socket.
        written_at: when something was last written.
        heard_at: when the client last showed life on it: when it opened it, or sent a frame.
    """

    connection: ConnectionId
    medium: Medium
    position: int
    opening: EventId
    stream: int | None = None
    stop: int | None = None
    gate: int | None = None
    gate_floor: int = 0
    ack_deadline: float = 0.0
    generation: int = 0
    skip: frozenset[int] = frozenset()
    primed: bool = True
    opened: bool = False
    stated: int = 0
    restate: bool = False
    resend: bool = False
    resent: tuple[int, float] | None = None
    probe: str | None = None
    refused: list[Untold] = field(default_factory=list["Untold"])
    retry: float | None = None
    close: int | None = None
    written_at: float = 0.0
    heard_at: float = 0.0

    def copy(self) -> Delivery:
        """An independent copy."""
        return replace(self, refused=list(self.refused))


class Deliver(msgspec.Struct, frozen=True):
    """Write `control`, then the blocks of `(after, upto]`, less what the delivery's filter holds back."""

    control: bytes
    after: int
    upto: int


class Finish(msgspec.Struct, frozen=True):
    """Write `control`, then end; a socket with close code `code`."""

    control: bytes
    code: int


class Wait(msgspec.Struct, frozen=True):
    """Nothing to write until something changes, or until the clock says `until`."""

    until: float


Step = Deliver | Finish | Wait


def poll(session: Session, delivery: Delivery, now: float) -> Step:
    """What this connection may write now."""
    if delivery.close is not None:
        return Finish(_retry(delivery), delivery.close)
    if delivery.gate is not None and now >= delivery.ack_deadline:
        return Finish(b"", CLOSE_ACK_WINDOW)  # U4
    if delivery.position < session.outbox.floor and _missed(session, delivery):
        return Finish(b"", CLOSE_EVICTED)  # L3: closed, never moved
    opening = not delivery.opened
    if opening:
        delivery.heard_at = now
    control = _control(session, delivery)
    if opening and delivery.medium is Medium.SOCKET:
        return Deliver(control, delivery.position, delivery.position)  # U2: a frame of its own, and first
    upto = _limit(session, delivery)
    if delivery.position < upto:
        return Deliver(control, delivery.position, upto)
    code = _over(session, delivery)
    if code is not None:
        return Finish(control, code)
    if not opening and _forsaken(session, delivery, now):
        return Finish(b"", CLOSE_GOING_AWAY)  # C8, after what there is to deliver, however long that took
    if control:
        return Deliver(control, delivery.position, delivery.position)
    silent = delivery.written_at + session.limits.keepalive
    if now >= silent:
        return Deliver(_beat(session, delivery, now), delivery.position, delivery.position)  # C8
    return Wait(silent if delivery.gate is None else min(silent, delivery.ack_deadline))


def _forsaken(session: Session, delivery: Delivery, now: float) -> bool:
    """Whether the client may be gone without a word: then this is not to keep its session any longer (C8)."""
    if session.inbox.working or (delivery.stream and not delivery.primed):
        return False  # the session stays in any case; or the client could not resume
    patience = session.limits.session_expiry
    if delivery.medium is Medium.SOCKET:
        patience += 2 * session.limits.keepalive  # by then it was asked
    return now >= delivery.heard_at + patience


def _beat(session: Session, delivery: Delivery, now: float) -> bytes:
    """A sign of life; on a socket that has been silent for long, one that asks for another (B6)."""
    if delivery.medium is Medium.EVENTS:
        return COMMENT
    if now >= delivery.heard_at + session.limits.session_expiry:
        return encode_block("probe", b'{"nonce":"still-there"}')
    return encode_block("keepalive", b"{}")


def _limit(session: Session, delivery: Delivery) -> int:
    """The highest event this connection may write: committed (L2), and within its bounds."""
    upto = session.outbox.committed
    if delivery.gate is not None:
        upto = min(upto, delivery.gate)  # U4
    if delivery.stop is not None:
        upto = min(upto, delivery.stop)  # U10, B2
    if delivery.stream is not None:
        upto = min(upto, session.streams.last(delivery.stream))  # M2
    return upto


def _over(session: Session, delivery: Delivery) -> int | None:
    """The close code, if everything this connection will ever get is written."""
    if delivery.stop is not None and delivery.position >= delivery.stop:
        return CLOSE_NORMAL
    if delivery.stream is not None:
        done = session.reason is not None or session.streams.finished(delivery.stream)
        durable = session.outbox.committed >= session.streams.last(delivery.stream)
        return CLOSE_NORMAL if done and durable else None
    if session.reason is None:
        return None
    if delivery.gate is not None:
        return CLOSE_OVER  # U4: the end lies above C and may not be written; the client settles by L7
    return CLOSE_OVER if delivery.position >= session.outbox.head else None


def _missed(session: Session, delivery: Delivery) -> bool:
    """Whether an event that this connection had yet to write is evicted."""
    if delivery.stream is None:
        return True
    last, _ = session.outbox.evicted.get(delivery.stream, (0, None))
    if delivery.position < last:
        return True
    delivery.position = session.outbox.floor  # only other streams' events are gone (M4)
    return False


def _control(session: Session, delivery: Delivery) -> bytes:
    """The control blocks that are due (W3): before events; a socket's first is the echo (U2)."""
    durable = session.inbox.durable
    out: list[bytes] = []
    if not delivery.opened:
        delivery.opened = True
        delivery.stated = session.inbox.durable
        out.append(_opening(session, delivery))
    if delivery.medium is Medium.SOCKET and out:
        return out[0]
    if delivery.probe is not None:
        out.append(encode_block("probe", msgspec.json.encode({"nonce": delivery.probe})))
        delivery.probe = None
    if delivery.medium is Medium.SOCKET:
        out += [_refused(session, untold) for untold in delivery.refused if untold.after <= durable]
        delivery.refused = [untold for untold in delivery.refused if untold.after > durable]
        if delivery.resend or delivery.restate or durable > delivery.stated:
            out.append(_received(session, delivery.resend))
            delivery.stated = durable
            delivery.restate = delivery.resend = False
    out.append(_retry(delivery))
    return b"".join(out)


def _opening(session: Session, delivery: Delivery) -> bytes:
    if delivery.medium is Medium.EVENTS:
        if delivery.stream is None:
            return encode_prime(delivery.opening, _SESSION_RETRY) + _received(session, False)
        return encode_prime(delivery.opening, int(session.limits.retry * 1000)) if delivery.primed else b""
    body = {
        "cursor": delivery.gate,
        "from": str(delivery.opening),
        **_statement(session),
        "generation": delivery.generation,
        "durability": session.durability,
        "limits": session.limits.advertised_limits(),
    }
    return encode_block("resume-cursor", msgspec.json.encode(body))


def _statement(session: Session) -> dict[str, object]:
    """What was received, and from which client process: to another the number says nothing (L6)."""
    inbox = session.inbox
    body: dict[str, object] = {"received": inbox.durable}
    if inbox.durable_process is not None:
        body["process"] = inbox.durable_process
    return body


def _received(session: Session, resend: bool) -> bytes:
    body = _statement(session)
    if resend:
        body["resend"] = True
    return encode_block("received", msgspec.json.encode(body))


def _refused(session: Session, untold: Untold) -> bytes:
    """On a socket a refusal is a control block, never a close; it says where the server is by now (L6)."""
    outbox, refusal = session.outbox, untold.refusal
    now = replace(refusal, committed=outbox.committed, floor=outbox.floor, received=session.inbox.durable)
    body = {"n": untold.number, "reason": refusal.reason.value, "error": now.error()}
    return encode_block("refused", msgspec.json.encode(body))


def _retry(delivery: Delivery) -> bytes:
    if delivery.retry is None:
        return b""
    block = encode_prime(None, int(delivery.retry * 1000))
    delivery.retry = None
    return block if delivery.medium is Medium.EVENTS else b""
