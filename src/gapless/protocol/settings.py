"""The limits and timers that a session is served under (§8), with their defaults and units."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Literal

__all__ = ["Limits"]


@dataclass(frozen=True, slots=True)
class Limits:
    """Sizes in bytes, counts, and timers in seconds, of a session and of the process that serves it.

    What a client has to know of them is advertised when a session is opened.
    """

    max_message_bytes: int = 4 * 1024 * 1024
    """The JSON text of one message, either way (W5)."""
    retain_events: int = 100_000
    """Events kept in a session's outbox (L4)."""
    retain_bytes: int = 64 * 1024 * 1024
    """Bytes kept in a session's outbox; the only limit that pins yield to (L4)."""
    retain_seconds: float = 24 * 3600.0
    """How long an event is kept (L4)."""
    ack_window: float = 10.0
    """How long a new socket may go without acknowledging progress in the gap (U4)."""
    upgrade_window: float = 30.0
    """How long the gap of an upgrade is pinned, and the `retry:` before it (L4, U10)."""
    probe_timeout: float = 1.0
    """How long a bound socket may be silent when somebody else asks for the session (B6)."""
    keepalive: float = 15.0
    """A silent connection carries something this often (C8)."""
    session_expiry: float = 30 * 60.0
    """How long a session lives without a connection (§8)."""
    tombstone: float = 24 * 3600.0
    """How long an ended session's reason is told (B4)."""
    lease: float = 10.0
    """How long a process may show no life before another one takes its sessions (N1)."""
    on_backend_loss: Literal["restart", "supersede"] = "restart"
    """What becomes of a session whose MCP server is gone: it gets a fresh one, or it ends (N2)."""
    retry: float = 1.0
    """The `retry:` of the stream view's event streams (C6), whose clients give up after two failures."""
    max_inbox: int = 1024
    """Accepted messages of a session that wait for the backend; while there are that many, `limit`."""
    max_requests: int = 1024
    """Requests of a session that are not settled; one more is answered with `limit`, and runs nothing."""
    max_subscriptions: int = 1024
    """Resources that a session is subscribed to; a fresh backend has to be told of each."""
    max_session_connections: int = 1024
    """Event streams and sockets of a session at a time."""
    max_upgrades_per_minute: int = 600
    """Attempts to pass a session's door: offers and handshakes. As many at once, the rest in their time."""
    max_sessions: int = 10_000
    """Sessions that a process opens, of those that are not over."""
    max_principal_sessions: int = 1_000
    """The same for one principal; `anonymous`, who may be everybody, has them all."""
    max_children: int = 1_000
    """Processes of a stdio server, one for each session."""
    max_connections: int = 20_000
    """TCP connections at a time, and never more than three quarters of the process's descriptors."""
    max_header_bytes: int = 32 * 1024
    """The request line and the headers."""
    max_url_bytes: int = 8 * 1024
    """The request line's URL."""
    header_timeout: float = 10.0
    """How long a connection may take to send a request's headers, its handshake's too."""
    body_timeout: float = 30.0
    """How long a body may take; each KiB of it that comes earns a second of that back."""

    def advertised_limits(self) -> dict[str, Any]:
        """The `limits` object of the protocol."""
        return {
            "message": self.max_message_bytes,
            "retain_events": self.retain_events,
            "retain_bytes": self.retain_bytes,
        }

    def advertised_timers(self) -> dict[str, Any]:
        """The `timers` object of the protocol, in seconds."""
        return {
            "keepalive": self.keepalive,
            "ack_window": self.ack_window,
            "upgrade_window": self.upgrade_window,
            "probe_timeout": self.probe_timeout,
            "session_expiry": self.session_expiry,
            "retain_seconds": self.retain_seconds,
        }
