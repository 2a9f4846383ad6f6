"""What goes into the server machine and what comes out: closed unions of frozen values."""

from __future__ import annotations

import msgspec

from gapless.protocol.carried import Waiting
from gapless.protocol.cursor import Link, Position
from gapless.protocol.delivery import ConnectionId, Delivery
from gapless.protocol.door import Pending
from gapless.protocol.jsonrpc import Envelope, RequestId
from gapless.protocol.refusal import Reason, Refusal

__all__ = [
    "Accepted",
    "Acked",
    "Cursor",
    "Dispatch",
    "Dropped",
    "Effect",
    "Emitted",
    "End",
    "Ending",
    "Handed",
    "Handshake",
    "Input",
    "Known",
    "Listen",
    "Lost",
    "Message",
    "Offered",
    "Probing",
    "Problem",
    "Refused",
    "Revive",
    "Serving",
    "Stated",
    "Upgrade",
    "Verdict",
]


class Cursor(msgspec.Struct, frozen=True):
    """A cursor as stated, beside what the log holds at that number: its proof (C3)."""

    stated: Position
    held: Link | None


class Verdict(msgspec.Struct, frozen=True):
    """How a probe of the socket bound under `generation` ended (B6)."""

    generation: int
    alive: bool


class Known(msgspec.Struct, frozen=True):
    """The inbox entry under a number that was received already."""

    digest: bytes
    empty: bool


class Problem(msgspec.Struct, frozen=True):
    """Why a client message cannot be accepted although its number is valid (W4, W5, L6)."""

    reason: Reason
    message: str
    request: Envelope | None


# Inputs ----------------------------------------------------------------------------------------


class Emitted(msgspec.Struct, frozen=True):
    """The backend emitted a message: its incarnation of that number, or, for 0, whichever runs.

    `more` are messages that came right behind it and are as this one: only where that is `plain`.
    """

    data: bytes
    envelope: Envelope
    related: RequestId | None = None
    incarnation: int = 0
    more: tuple[bytes, ...] = ()


class Handed(msgspec.Struct, frozen=True):
    """The backend has taken all that was dispatched to that incarnation."""

    incarnation: int


class Lost(msgspec.Struct, frozen=True):
    """The backend is gone: by itself, or with the process that owned the session before (N2).

    Requests of the IDs in `untaken` were dispatched, and certainly reached no backend.
    """

    message: str
    taken_over: bool = False
    untaken: frozenset[RequestId] = frozenset()


class Revive(msgspec.Struct, frozen=True):
    """A fresh backend may begin: it is told the orders, in turn, and then gets what none has taken (N2)."""

    orders: tuple[Waiting, ...]
    untaken: tuple[Waiting, ...] = ()


class Message(msgspec.Struct, frozen=True):
    """A client message arrived: over a POST (`connection` is `None`) or on a socket.

    `envelope` is `None` for a placeholder (empty data) and where there is a `problem`.
    `number` and `process` are `None` in the stream view, where clients state neither.
    """

    data: bytes
    digest: bytes
    envelope: Envelope | None
    number: int | None = None
    process: str | None = None
    known: Known | None = None
    problem: Problem | None = None
    connection: ConnectionId | None = None
    answer_on: ConnectionId | None = None
    primed: bool = True


class Listen(msgspec.Struct, frozen=True):
    """Somebody asks for an event stream. Without `cursor`: from the start, or the boundary (B1), or M3.

    For M3 `held` is the link at `Session.standalone_position`.
    """

    connection: ConnectionId
    cursor: Cursor | None
    held: Link | None = None
    verdict: Verdict | None = None
    primed: bool = True


class Upgrade(msgspec.Struct, frozen=True):
    """Somebody asks in band for a WebSocket (two steps). `ticket` is a fresh random one to offer."""

    cursor: Cursor
    nonce: str
    ticket: str
    url: str
    verdict: Verdict | None = None


class Handshake(msgspec.Struct, frozen=True):
    """A WebSocket handshake: with the ticket of an offer, or without, in one step.

    `nonce` is a fresh random one, used where this handshake is its own negotiation.
    """

    connection: ConnectionId
    cursor: Cursor
    ticket: str | None
    nonce: str
    url: str
    verdict: Verdict | None = None


class Acked(msgspec.Struct, frozen=True):
    """The client states its ack cursor: on a socket, or over a POST (`connection` is `None`)."""

    cursor: Cursor
    connection: ConnectionId | None = None


class Dropped(msgspec.Struct, frozen=True):
    """A connection is gone, for whatever reason.

    Attributes:
        pending: of a socket whose handshake was refused after all: what it had concluded (U8).
    """

    connection: ConnectionId
    pending: Pending | None = None


class End(msgspec.Struct, frozen=True):
    """DELETE, expiry or a lost backend (B9, N2): settle everything and terminate."""

    reason: Reason
    message: str


Input = Emitted | Handed | Lost | Revive | Message | Listen | Upgrade | Handshake | Acked | Dropped | End


# Effects ---------------------------------------------------------------------------------------
# They may be carried out once everything appended by the same input is durable (L2).


class Refused(msgspec.Struct, frozen=True):
    """Answer with a refusal (§8)."""

    refusal: Refusal


class Accepted(msgspec.Struct, frozen=True):
    """The message is received (again): answer with `received`."""

    received: int


class Stated(msgspec.Struct, frozen=True):
    """The ack cursor now is."""

    ack: int


class Offered(msgspec.Struct, frozen=True):
    """The upgrade is accepted: answer with this (§8, names)."""

    event: int
    negotiation: str
    ticket: str | None
    url: str


class Serving(msgspec.Struct, frozen=True):
    """Run the delivery loop on this connection; a socket is answered 101 with `committed` first (U2).

    Attributes:
        pending: the negotiation that this concludes; if nobody can be served, it is to be as it was (U8).
    """

    delivery: Delivery
    committed: int
    pending: Pending | None = None


class Ending(msgspec.Struct, frozen=True):
    """Answer 200 with this one control block, and end (B1 without a cursor)."""

    block: bytes


class Probing(msgspec.Struct, frozen=True):
    """Probe the socket bound under `generation`, then put the same input in again with the verdict (B6)."""

    delivery: Delivery


class Dispatch(msgspec.Struct, frozen=True):
    """Hand this message to that incarnation of the backend: it is durable, and this happens once (N1).

    When all that came together are handed over, `Handed` says so. Number 0 is a replay.
    """

    number: int
    data: bytes
    envelope: Envelope
    incarnation: int


Effect = Refused | Accepted | Stated | Offered | Serving | Ending | Probing | Dispatch
