"""What goes into the client machine and what comes out: closed unions of frozen values.

A connection is known by the number of the attempt that made it; what comes from an older
attempt is ignored.
"""

from __future__ import annotations

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


class Start(msgspec.Struct, frozen=True):
    """Begin: open a session, or go on with a saved one."""


class Submit(msgspec.Struct, frozen=True):
    """The application sends a message."""

    data: bytes
    envelope: Envelope


class Move(msgspec.Struct, frozen=True):
    """The application asks for the WebSocket now, whatever the policy says."""


class Delivered(msgspec.Struct, frozen=True):
    """The application accepted the event that `take` handed out: it is processed."""


class Tick(msgspec.Struct, frozen=True):
    """The clock reached `deadline`."""


class Leave(msgspec.Struct, frozen=True):
    """The application is done with the session: of its own will, or because of an error of its own."""

    error: GaplessError | None = None


class Opened(msgspec.Struct, frozen=True):
    """201: the session exists."""

    attempt: int
    session: str
    cursor: EventId
    limits: dict[str, Any] = msgspec.field(default_factory=dict[str, Any])
    timers: dict[str, Any] = msgspec.field(default_factory=dict[str, Any])


class StreamOpened(msgspec.Struct, frozen=True):
    """200: the event stream is there."""

    attempt: int


class Arrived(msgspec.Struct, frozen=True):
    """Something arrived: a block, or, where `block` is `None`, a comment or a part of one.

    `more` are log events that arrived right behind one, at most as many as there is `Client.room` for.
    """

    attempt: int
    block: Block | None
    more: tuple[Block, ...] = ()


class StreamEnded(msgspec.Struct, frozen=True):
    """The event stream ended, or broke."""

    attempt: int


class Offered(msgspec.Struct, frozen=True):
    """200 to a negotiation: the upgrade is accepted."""

    attempt: int
    ticket: str | None


class SocketOpened(msgspec.Struct, frozen=True):
    """101. `echo` is `X-MCP-Resume-Cursor`, if it came through."""

    attempt: int
    echo: int | None


class SocketClosed(msgspec.Struct, frozen=True):
    """The socket closed with `code`, for the `reason` that its close frame gave; 1006 if it broke."""

    attempt: int
    code: int
    reason: str = ""


class Received(msgspec.Struct, frozen=True):
    """A POST of messages was answered with `received`."""

    attempt: int
    received: int


class Refused(msgspec.Struct, frozen=True):
    """The request of `attempt` was answered with an error; `refusal` if it is one of ours."""

    attempt: int
    status: int
    refusal: Refusal | None
    retry_after: float | None = None


class Failed(msgspec.Struct, frozen=True):
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


class Open(msgspec.Struct, frozen=True):
    """`POST /mcp/session`."""

    attempt: int


class Get(msgspec.Struct, frozen=True):
    """`GET …/events` with `Last-Event-ID: cursor`."""

    attempt: int
    cursor: EventId


class Negotiate(msgspec.Struct, frozen=True):
    """`POST …/upgrade` with the client's own cursor; the nonce is of the machine's negotiation number."""

    attempt: int
    cursor: EventId
    nonce: str


class Knock(msgspec.Struct, frozen=True):
    """The WebSocket handshake, with a ticket or in one step."""

    attempt: int
    cursor: EventId
    ticket: str | None


class Post(msgspec.Struct, frozen=True):
    """`POST …/messages`."""

    attempt: int
    messages: tuple[Kept, ...]


class PostAck(msgspec.Struct, frozen=True):
    """`POST …/ack`; nobody waits for its answer."""

    cursor: EventId


class Send(msgspec.Struct, frozen=True):
    """Write a text frame; `states` says that it states the cursor (C4)."""

    attempt: int
    frame: bytes
    states: bool = False


class CloseStream(msgspec.Struct, frozen=True):
    """Drop the event stream."""

    attempt: int


class CloseSocket(msgspec.Struct, frozen=True):
    """Drop the socket; never wait for the peer."""

    attempt: int


class Delete(msgspec.Struct, frozen=True):
    """`DELETE` the session; nobody waits for its answer."""


class Settle(msgspec.Struct, frozen=True):
    """Answer this request to the application with this error (L7)."""

    id: RequestId
    code: int
    message: str
    data: dict[str, Any]


class Over(msgspec.Struct, frozen=True):
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
