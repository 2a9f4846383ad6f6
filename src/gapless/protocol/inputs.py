"""What goes into the server machine and what comes out: closed unions of frozen values."""

from __future__ import annotations

from dataclasses import dataclass

import msgspec

from gapless.protocol.carried import Waiting
from gapless.protocol.cursor import Link, Position
from gapless.protocol.delivery import ConnectionId, Delivery
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


@dataclass(frozen=True, slots=True)
class Cursor:
    """A cursor as stated, beside what the log holds at that number: its proof (C3)."""

    stated: Position
    held: Link | None


@dataclass(frozen=True, slots=True)
class Verdict:
    """How a probe of the socket bound under `generation` ended (B6)."""

    generation: int
    alive: bool


@dataclass(frozen=True, slots=True)
class Known:
    """The inbox entry under a number that was received already."""

    digest: bytes
    empty: bool


@dataclass(frozen=True, slots=True)
class Problem:
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


@dataclass(frozen=True, slots=True)
class Handed:
    """The backend has taken all that was dispatched to that incarnation."""

    incarnation: int


@dataclass(frozen=True, slots=True)
class Lost:
    """The backend is gone: by itself, or with the process that owned the session before (N2).

    Requests of the IDs in `untaken` were dispatched, and certainly reached no backend.
    """

    message: str
    taken_over: bool = False
    untaken: frozenset[RequestId] = frozenset()


@dataclass(frozen=True, slots=True)
class Revive:
    """A fresh backend may begin: it is told the orders, in turn, and then gets what none has taken (N2)."""

    orders: tuple[Waiting, ...]
    untaken: tuple[Waiting, ...] = ()


@dataclass(frozen=True, slots=True)
class Message:
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


@dataclass(frozen=True, slots=True)
class Listen:
    """Somebody asks for an event stream. Without `cursor`: from the start, or the boundary (B1), or M3.

    For M3 `held` is the link at `Session.standalone_position`.
    """

    connection: ConnectionId
    cursor: Cursor | None
    held: Link | None = None
    verdict: Verdict | None = None
    primed: bool = True


@dataclass(frozen=True, slots=True)
class Upgrade:
    """Somebody asks in band for a WebSocket (two steps). `ticket` is a fresh random one to offer."""

    cursor: Cursor
    nonce: str
    ticket: str
    url: str
    verdict: Verdict | None = None


@dataclass(frozen=True, slots=True)
class Handshake:
    """A WebSocket handshake: with the ticket of an offer, or without, in one step.

    `nonce` is a fresh random one, used where this handshake is its own negotiation.
    """

    connection: ConnectionId
    cursor: Cursor
    ticket: str | None
    nonce: str
    url: str
    verdict: Verdict | None = None


@dataclass(frozen=True, slots=True)
class Acked:
    """The client states its ack cursor: on a socket, or over a POST (`connection` is `None`)."""

    cursor: Cursor
    connection: ConnectionId | None = None


@dataclass(frozen=True, slots=True)
class Dropped:
    """A connection is gone, for whatever reason."""

    connection: ConnectionId


@dataclass(frozen=True, slots=True)
class End:
    """DELETE, expiry or a lost backend (B9, N2): settle everything and terminate."""

    reason: Reason
    message: str


Input = Emitted | Handed | Lost | Revive | Message | Listen | Upgrade | Handshake | Acked | Dropped | End


# Effects ---------------------------------------------------------------------------------------
# They may be carried out once everything appended by the same input is durable (L2).


@dataclass(frozen=True, slots=True)
class Refused:
    """Answer with a refusal (§8)."""

    refusal: Refusal


@dataclass(frozen=True, slots=True)
class Accepted:
    """The message is received (again): answer with `received`."""

    received: int


@dataclass(frozen=True, slots=True)
class Stated:
    """The ack cursor now is."""

    ack: int


@dataclass(frozen=True, slots=True)
class Offered:
    """The upgrade is accepted: answer with this (§8, names)."""

    event: int
    negotiation: str
    ticket: str | None
    url: str


@dataclass(frozen=True, slots=True)
class Serving:
    """Run the delivery loop on this connection; a socket is answered 101 with `committed` first (U2)."""

    delivery: Delivery
    committed: int


@dataclass(frozen=True, slots=True)
class Ending:
    """Answer 200 with this one control block, and end (B1 without a cursor)."""

    block: bytes


@dataclass(frozen=True, slots=True)
class Probing:
    """Probe the socket bound under `generation`, then put the same input in again with the verdict (B6)."""

    delivery: Delivery


@dataclass(frozen=True, slots=True)
class Dispatch:
    """Hand this message to that incarnation of the backend: it is durable, and this happens once (N1).

    When all that came together are handed over, `Handed` says so. Number 0 is a replay.
    """

    number: int
    data: bytes
    envelope: Envelope
    incarnation: int


Effect = Refused | Accepted | Stated | Offered | Serving | Ending | Probing | Dispatch
