"""The door: four states, one table (§6). What a request means is classified first, then looked up."""

from __future__ import annotations

from enum import Enum
from hmac import compare_digest
from typing import Final, NamedTuple

from gapless.protocol.seam import Boundary, SessionState, boundary

__all__ = ["TRANSITIONS", "Asked", "Do", "Door", "Pending"]


class Asked(Enum):
    """What is asked of the door, guards included."""

    LISTEN = "listen"
    LISTEN_BELOW = "listen below U"
    LISTEN_AT = "listen at U or without a cursor"
    UPGRADE = "upgrade"
    UPGRADE_BELOW = "upgrade below U, or shown U"
    UPGRADE_AT = "another upgrade at U"
    UPGRADE_SPENT = "upgrade, nonce concluded"
    HANDSHAKE = "handshake"
    TICKET_SPENT = "handshake, ticket spent"
    SOCKET_LIVES = "asked for while the socket lives"
    SOCKET_SILENT = "probe unanswered"
    SOCKET_GONE = "socket gone"
    SOCKET_UNTOLD = "handshake refused after all"
    END = "end"


class Do(Enum):
    """What the machine does about it."""

    SERVE = "serve"
    DRAIN = "drain to U"
    BURN = "burn"
    OFFER = "append U, offer"
    OFFER_AGAIN = "offer again"
    OPEN_AND_BIND = "append U, bind"
    BIND = "bind"
    PROBE = "probe"
    FENCE = "fence"
    UNBIND = "unbind"
    REOPEN = "pending as before"
    REFUSE_SPENT = "ticket-spent"
    REFUSE_BOUND = "websocket-bound"
    TERMINATE = "settle, terminate"


_SSE: Final = SessionState.SSE_ACTIVE
_PENDING: Final = SessionState.UPGRADE_ACCEPTED_PENDING
_BOUND: Final = SessionState.WEBSOCKET_BOUND
_OVER: Final = SessionState.TERMINATED
_NONE: Final[frozenset[str]] = frozenset()
"""One for all: each empty one would take 216 bytes."""

TRANSITIONS: Final[dict[tuple[SessionState, Asked], tuple[Do, SessionState]]] = {
    (_SSE, Asked.LISTEN): (Do.SERVE, _SSE),
    (_SSE, Asked.UPGRADE): (Do.OFFER, _PENDING),
    (_SSE, Asked.UPGRADE_SPENT): (Do.REFUSE_SPENT, _SSE),  # U7
    (_SSE, Asked.HANDSHAKE): (Do.OPEN_AND_BIND, _BOUND),  # one step: no door to fall on
    (_SSE, Asked.TICKET_SPENT): (Do.REFUSE_SPENT, _SSE),
    (_SSE, Asked.END): (Do.TERMINATE, _OVER),
    (_PENDING, Asked.LISTEN_BELOW): (Do.DRAIN, _PENDING),  # B2
    (_PENDING, Asked.LISTEN_AT): (Do.BURN, _OVER),  # B1
    (_PENDING, Asked.UPGRADE_BELOW): (Do.OFFER_AGAIN, _PENDING),  # U7
    (_PENDING, Asked.UPGRADE_AT): (Do.BURN, _OVER),  # U7, B1
    (_PENDING, Asked.UPGRADE_SPENT): (Do.REFUSE_SPENT, _PENDING),
    (_PENDING, Asked.HANDSHAKE): (Do.BIND, _BOUND),  # B3
    (_PENDING, Asked.TICKET_SPENT): (Do.REFUSE_SPENT, _PENDING),
    (_PENDING, Asked.END): (Do.TERMINATE, _OVER),
    (_BOUND, Asked.LISTEN): (Do.PROBE, _BOUND),  # B6
    (_BOUND, Asked.UPGRADE): (Do.PROBE, _BOUND),
    (_BOUND, Asked.HANDSHAKE): (Do.PROBE, _BOUND),
    (_BOUND, Asked.UPGRADE_SPENT): (
        Do.REFUSE_SPENT,
        _BOUND,
    ),  # B6: what the binding does not decide comes first
    (_BOUND, Asked.TICKET_SPENT): (Do.REFUSE_SPENT, _BOUND),
    (_BOUND, Asked.SOCKET_LIVES): (Do.REFUSE_BOUND, _BOUND),
    (_BOUND, Asked.SOCKET_SILENT): (Do.FENCE, _SSE),  # B6, B8
    (_BOUND, Asked.SOCKET_GONE): (Do.UNBIND, _SSE),  # B7
    (_BOUND, Asked.SOCKET_UNTOLD): (Do.REOPEN, _PENDING),  # U8
    (_BOUND, Asked.END): (Do.TERMINATE, _OVER),
}
"""Every legal pair. A pair that is not here is never asked, and raises: of a terminated session nothing is,
since `Session.ended` refuses first (B4)."""


class Pending(NamedTuple):
    """What of a pending negotiation a handshake concludes."""

    ticket: str | None
    shown: frozenset[str]


class Door:
    """The door's own memory: which negotiation is pending, which are concluded, who is bound."""

    __slots__ = ("concluded", "event", "generation", "negotiation", "shown", "state", "ticket")

    def __init__(self) -> None:
        self.state = SessionState.SSE_ACTIVE
        self.event: int | None = None
        """`U`, while its negotiation is pending or its socket bound."""
        self.negotiation = ""
        self.ticket: str | None = None
        self.shown = _NONE
        """Nonces that were shown the pending acceptance."""
        self.concluded = _NONE
        """Nonces whose negotiation ended with a handshake; kept for the session's life (U7)."""
        self.generation = 0

    def listen(self, cursor: int | None) -> Asked:
        """Classify a request for an event stream; the decision is `seam.boundary`."""
        match boundary(self.state, self.event, cursor):
            case Boundary.SERVE | Boundary.BOUND | Boundary.ENDED:
                return Asked.LISTEN
            case Boundary.DRAIN:
                return Asked.LISTEN_BELOW
            case Boundary.BURN:
                return Asked.LISTEN_AT

    def upgrade(self, nonce: str, cursor: int) -> Asked:
        """Classify `POST …/upgrade` (U7)."""
        if nonce in self.concluded:
            return Asked.UPGRADE_SPENT
        if self.state is not _PENDING:
            return Asked.UPGRADE
        below = boundary(self.state, self.event, cursor) is Boundary.DRAIN
        return Asked.UPGRADE_BELOW if below or nonce in self.shown else Asked.UPGRADE_AT

    def handshake(self, ticket: str | None) -> Asked:
        """Classify a handshake: no ticket is one step, which also completes a pending negotiation (U7)."""
        if ticket is None:
            return Asked.HANDSHAKE
        if self.state is not _PENDING or self.ticket is None:
            return Asked.TICKET_SPENT
        # As bytes: of texts it takes ASCII alone, and what is compared is whatever somebody sent.
        same = compare_digest(ticket.encode(errors="replace"), self.ticket.encode())
        return Asked.HANDSHAKE if same else Asked.TICKET_SPENT

    def take(self, asked: Asked) -> Do:
        """Make the transition and return what to do.

        Raises:
            KeyError: the pair is not in the table; nothing changed.
        """
        do, self.state = TRANSITIONS[self.state, asked]
        return do

    def offer(self, event: int, nonce: str, ticket: str) -> None:
        """`upgrade-accepted` is event `event`, for whoever asked under `nonce`."""
        self.event, self.negotiation, self.ticket = event, nonce, ticket
        self.shown = frozenset({nonce})

    def show(self, nonce: str) -> None:
        """`nonce` is shown the pending acceptance, and concluded with it (U7)."""
        self.shown |= {nonce}

    @property
    def pending(self) -> Pending | None:
        """The negotiation that the next handshake concludes, if there is one."""
        return Pending(self.ticket, self.shown) if self.state is _PENDING else None

    def bind(self, event: int | None) -> int:
        """Conclude whatever is pending; the ticket is spent. Returns the new generation."""
        if event is not None:
            self.event = event
        self.concluded |= self.shown
        self.shown, self.ticket = _NONE, None
        self.generation += 1
        return self.generation

    def reopen(self, pending: Pending) -> None:
        """The handshake that concluded this was never answered 101: it changes nothing (U8)."""
        self.ticket, self.shown = pending
        self.concluded -= pending.shown

    def unbind(self) -> None:
        """The socket is gone: `U` is history (B7)."""
        self.event = None

    def copy(self) -> Door:
        """An independent copy."""
        other = Door()
        for name in Door.__slots__:
            setattr(other, name, getattr(self, name))
        return other
