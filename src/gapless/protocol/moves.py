"""What goes into the client machine and what comes out: closed unions of frozen values.

A connection is known by the number of the attempt that made it; what comes from an older
attempt is ignored.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import msgspec

from gapless.errors import GaplessError
from gapless.protocol.block import Block
from gapless.protocol.cursor import EventId
from gapless.protocol.jsonrpc import Envelope, RequestId
from gapless.protocol.outgoing import Kept
from gapless.protocol.refusal import Refusal

__all__ = [
    "Arrived",
    "CloseSocket",
    "CloseStream",
    "Delete",
    "Delivered",
    "Effect",
    "Failed",
    "Get",
    "Input",
    "Knock",
    "Leave",
    "Move",
    "Negotiate",
    "Offered",
    "Open",
    "Opened",
    "Over",
    "Post",
    "PostAck",
    "Received",
    "Refused",
    "Send",
    "Settle",
    "SocketClosed",
    "SocketOpened",
    "Start",
    "StreamEnded",
    "StreamOpened",
    "Submit",
    "Tick",
]


# Inputs --------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Start:
    """Begin: open a session, or go on with a saved one."""


@dataclass(frozen=True, slots=True)
class Submit:
    """The application sends a message."""

    data: bytes
    envelope: Envelope


@dataclass(frozen=True, slots=True)
class Move:
    """The application asks for the WebSocket now, whatever the policy says."""


class Delivered(msgspec.Struct, frozen=True):
    """The application accepted the event that `take` handed out: it is processed."""


@dataclass(frozen=True, slots=True)
class Tick:
    """The clock reached `deadline`."""


@dataclass(frozen=True, slots=True)
class Leave:
    """The application is done with the session: of its own will, or because of an error of its own."""

    error: GaplessError | None = None


@dataclass(frozen=True, slots=True)
class Opened:
    """201: the session exists."""

    attempt: int
    session: str
    cursor: EventId
    limits: dict[str, Any] = field(default_factory=dict[str, Any])
    timers: dict[str, Any] = field(default_factory=dict[str, Any])


@dataclass(frozen=True, slots=True)
class StreamOpened:
    """200: the event stream is there."""

    attempt: int


class Arrived(msgspec.Struct, frozen=True):
    """Something arrived: a block, or, where `block` is `None`, a comment or a part of one.

    `more` are log events that arrived right behind one, at most as many as there is `Client.room` for.
    """

    attempt: int
    block: Block | None
    more: tuple[Block, ...] = ()


@dataclass(frozen=True, slots=True)
class StreamEnded:
    """The event stream ended, or broke."""

    attempt: int


@dataclass(frozen=True, slots=True)
class Offered:
    """200 to a negotiation: the upgrade is accepted."""

    attempt: int
    ticket: str | None


@dataclass(frozen=True, slots=True)
class SocketOpened:
    """101. `echo` is `X-MCP-Resume-Cursor`, if it came through."""

    attempt: int
    echo: int | None


@dataclass(frozen=True, slots=True)
class SocketClosed:
    """The socket closed with `code`, for the `reason` that its close frame gave; 1006 if it broke."""

    attempt: int
    code: int
    reason: str = ""


@dataclass(frozen=True, slots=True)
class Received:
    """A POST of messages was answered with `received`."""

    attempt: int
    received: int


@dataclass(frozen=True, slots=True)
class Refused:
    """The request of `attempt` was answered with an error; `refusal` if it is one of ours."""

    attempt: int
    status: int
    refusal: Refusal | None
    retry_after: float | None = None


@dataclass(frozen=True, slots=True)
class Failed:
    """The request of `attempt` got no answer."""

    attempt: int
    message: str


Input = (
    Start
    | Submit
    | Move
    | Delivered
    | Tick
    | Leave
    | Opened
    | StreamOpened
    | Arrived
    | StreamEnded
    | Offered
    | SocketOpened
    | SocketClosed
    | Received
    | Refused
    | Failed
)


# Effects, to be carried out in order ---------------------------------------------------------------
# A client that survives restarts saves its cursor before any of them that states it (C4).


@dataclass(frozen=True, slots=True)
class Open:
    """`POST /mcp/session`."""

    attempt: int


@dataclass(frozen=True, slots=True)
class Get:
    """`GET …/events` with `Last-Event-ID: cursor`."""

    attempt: int
    cursor: EventId


@dataclass(frozen=True, slots=True)
class Negotiate:
    """`POST …/upgrade` with the client's own cursor; the nonce is of the machine's negotiation number."""

    attempt: int
    cursor: EventId
    nonce: str


@dataclass(frozen=True, slots=True)
class Knock:
    """The WebSocket handshake, with a ticket or in one step."""

    attempt: int
    cursor: EventId
    ticket: str | None


@dataclass(frozen=True, slots=True)
class Post:
    """`POST …/messages`."""

    attempt: int
    messages: tuple[Kept, ...]


@dataclass(frozen=True, slots=True)
class PostAck:
    """`POST …/ack`; nobody waits for its answer."""

    cursor: EventId


@dataclass(frozen=True, slots=True)
class Send:
    """Write a text frame; `states` says that it states the cursor (C4)."""

    attempt: int
    frame: bytes
    states: bool = False


@dataclass(frozen=True, slots=True)
class CloseStream:
    """Drop the event stream."""

    attempt: int


@dataclass(frozen=True, slots=True)
class CloseSocket:
    """Drop the socket; never wait for the peer."""

    attempt: int


@dataclass(frozen=True, slots=True)
class Delete:
    """`DELETE` the session; nobody waits for its answer."""


@dataclass(frozen=True, slots=True)
class Settle:
    """Answer this request to the application with this error (L7)."""

    id: RequestId
    code: int
    message: str
    data: dict[str, Any]


@dataclass(frozen=True, slots=True)
class Over:
    """The client follows the session no more; `error` says why, `None` if the application just left."""

    error: GaplessError | None


Effect = (
    Open
    | Get
    | Negotiate
    | Knock
    | Post
    | PostAck
    | Send
    | CloseStream
    | CloseSocket
    | Delete
    | Settle
    | Over
)
