"""The three decisions at the seam between SSE and WebSocket, as pure functions.

Each is one function over integers and states: `cover` (may this position be carried on?),
`echo_fault` (does the handshake's echo follow the cursor?) and `boundary` (what does an event
stream asked for in this state get?). The machines in `session.py` and `client.py` call them;
so do `McpSession`, `negotiate_upgrade` and `resume_sse_stream`, which give the same decisions
to programs that keep sessions of their own.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from enum import Enum
from typing import Any

from gapless.errors import (
    CursorDiscontinuityError,
    NonResumableUpgradeBoundaryError,
    SessionMigrationGapError,
)

__all__ = [
    "Boundary",
    "Cover",
    "EchoFault",
    "McpSession",
    "Session",
    "SessionState",
    "boundary",
    "cover",
    "echo_fault",
    "negotiate_upgrade",
    "resume_sse_stream",
]


class SessionState(Enum):
    """Where a session stands between its two transports (§1)."""

    SSE_ACTIVE = "sse_active"
    """Event streams are served; no door is open."""
    UPGRADE_ACCEPTED_PENDING = "upgrade_accepted_pending"
    """`upgrade-accepted` is durable; its handshake has not completed."""
    WEBSOCKET_BOUND = "websocket_bound"
    """A live socket holds the session."""
    TERMINATED = "terminated"
    """Over; the token is burned."""


class Cover(Enum):
    """Whether a log that holds `floor < seq <= committed` can carry a cursor on."""

    COVERED = "covered"
    EVICTED = "evicted"
    AHEAD = "ahead"


def cover(cursor: int, floor: int, committed: int) -> Cover:
    """Can everything after `cursor` be delivered? (U1, C5)"""
    if cursor < floor:
        return Cover.EVICTED
    if cursor > committed:
        return Cover.AHEAD
    return Cover.COVERED


class EchoFault(Enum):
    """What is wrong with an upgrade's echo."""

    MISSING = "missing"
    REGRESSED = "regressed"
    EVICTED = "evicted"


def echo_fault(cursor: int, echo: int | None, floor: int = 0) -> EchoFault | None:
    """What is wrong with `echo`, the committed position an upgrade carried, for a client at `cursor` (U2)."""
    if echo is None:
        return EchoFault.MISSING
    if echo < cursor:
        return EchoFault.REGRESSED
    if cover(cursor, floor, echo) is Cover.EVICTED:
        return EchoFault.EVICTED
    return None


class Boundary(Enum):
    """What a request for an event stream gets."""

    SERVE = "serve"
    """The stream, open-ended."""
    DRAIN = "drain"
    """The events up to `upgrade-accepted`, then the end (B2)."""
    BURN = "burn"
    """Nothing: the session is superseded and its token burned (B1)."""
    BOUND = "bound"
    """A refusal, if the socket that holds the session lives (B6)."""
    ENDED = "ended"
    """A refusal: the session is over (B4)."""


def boundary(state: SessionState, upgrade_event: int | None, cursor: int | None) -> Boundary:
    """Decide a resume at `cursor` (`None`: without one) of a session in `state` (B1, B2, B4, B6)."""
    match state:
        case SessionState.SSE_ACTIVE:
            return Boundary.SERVE
        case SessionState.UPGRADE_ACCEPTED_PENDING:
            if upgrade_event is None:
                return Boundary.SERVE
            return Boundary.BURN if cursor is None or cursor >= upgrade_event else Boundary.DRAIN
        case SessionState.WEBSOCKET_BOUND:
            return Boundary.BOUND
        case SessionState.TERMINATED:
            return Boundary.ENDED


class McpSession:
    """A session's replay buffer, and its migration to a WebSocket.

    Args:
        session_id: for messages only.
        last_ack_id: the highest event the client is known to have processed.
        replay_buffer: event number to payload; may be bounded, with the oldest evicted. It is looked at
            anew at each migration, for events are emitted until then.
    """

    def __init__(
        self, session_id: str, last_ack_id: int, replay_buffer: Mapping[int, dict[str, Any]]
    ) -> None:
        self.session_id = session_id
        self.last_ack_id = last_ack_id
        self.replay_buffer = replay_buffer
        self._emitted = max(replay_buffer, default=0)

    @property
    def last_emitted_id(self) -> int:
        """The highest event that the buffer has been seen to hold: it goes on as events are emitted."""
        self._emitted = max(self._emitted, max(self.replay_buffer, default=0))
        return self._emitted

    def migrate_to_websocket(self, client_cursor: int) -> list[dict[str, Any]]:
        """The payloads to replay first on the socket: all after the client's own cursor, in order.

        Raises:
            SessionMigrationGapError: the cursor is not the acknowledged one (it may be an echo
                of a server position), or the buffer no longer holds the whole gap. Refuse the
                upgrade; the client resumes SSE.
        """
        if client_cursor != self.last_ack_id:
            raise SessionMigrationGapError(
                f"session {self.session_id}: the client states cursor {client_cursor} but has acknowledged "
                f"{self.last_ack_id}; it may be echoing a position that the server emitted"
            )
        last = self.last_emitted_id
        wanted = range(client_cursor + 1, last + 1)
        missing = [seq for seq in wanted if seq not in self.replay_buffer]
        floor = missing[-1] if missing else min(client_cursor, last)
        match cover(client_cursor, floor, last):
            case Cover.COVERED:
                return [self.replay_buffer[seq] for seq in wanted]
            case Cover.EVICTED:
                raise SessionMigrationGapError(
                    f"session {self.session_id}: the replay buffer cannot cover the gap after "
                    f"{client_cursor}: {len(missing)} of {len(wanted)} events are gone (last emitted: {last})"
                )
            case Cover.AHEAD:
                raise SessionMigrationGapError(
                    f"session {self.session_id}: the client is at {client_cursor}, past all that was "
                    f"emitted ({last}): was the replay buffer emptied or replaced?"
                )


def negotiate_upgrade(
    prior_event_id: int, committed_cursor: int, echo_in_handshake: bool, replay_buffer_floor: int
) -> int:
    """Check that an SSE-to-WebSocket upgrade can be resumed; return the cursor it starts from.

    Raises:
        CursorDiscontinuityError: the handshake carries no echo, the committed cursor lies behind
            the client's, or the replay buffer no longer reaches back to it.
    """
    fault = echo_fault(prior_event_id, committed_cursor if echo_in_handshake else None, replay_buffer_floor)
    match fault:
        case None:
            return committed_cursor
        case EchoFault.MISSING:
            raise CursorDiscontinuityError(
                f"the upgrade carries no cursor: a client at {prior_event_id} cannot tell what it missed"
            )
        case EchoFault.REGRESSED:
            raise CursorDiscontinuityError(
                f"the committed cursor {committed_cursor} lies behind the client's {prior_event_id}; "
                "was the log truncated or replaced?"
            )
        case EchoFault.EVICTED:
            raise CursorDiscontinuityError(
                f"events up to {replay_buffer_floor} are evicted: a client at {prior_event_id} that falls "
                "back to SSE would lose some"
            )


@dataclass
class Session:
    """The state of one session's door, for programs that keep it themselves."""

    token: str
    state: SessionState
    upgrade_event_id: int | None = None
    handshake_complete: bool = False


def resume_sse_stream(session: Session, last_event_id: int | None) -> SessionState:
    """Decide an attempt to resume SSE; a refusal at the boundary burns the session.

    Raises:
        NonResumableUpgradeBoundaryError: the session is over, bound to a WebSocket, or at the
            boundary, which terminates it.
    """
    upgrade_event = None if session.handshake_complete else session.upgrade_event_id
    match boundary(session.state, upgrade_event, last_event_id):
        case Boundary.SERVE | Boundary.DRAIN:
            return session.state
        case Boundary.BURN:
            session.state = SessionState.TERMINATED
            raise NonResumableUpgradeBoundaryError(
                f"session {session.token}: upgrade-accepted is event {session.upgrade_event_id} and its "
                "handshake is pending; the token is burned"
            )
        case Boundary.BOUND:
            raise NonResumableUpgradeBoundaryError(f"session {session.token} is bound to a WebSocket")
        case Boundary.ENDED:
            raise NonResumableUpgradeBoundaryError(f"session {session.token} is over")
