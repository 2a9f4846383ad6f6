"""Gapless: MCP sessions that survive their connections.

::

    app = gapless.asgi(server)  # an ASGI app around an MCP server

    async with Client(gapless.connect(url)) as client:  # the official SDK's client, through ours
        ...

    async with gapless.connect(url) as (read, write):
        async with ClientSession(read, write) as session:
            ...
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from gapless.errors import (
    CursorDiscontinuityError,
    GaplessError,
    NonResumableUpgradeBoundaryError,
    SessionMigrationGapError,
)
from gapless.protocol.seam import (
    McpSession,
    Session,
    SessionState,
    negotiate_upgrade,
    resume_sse_stream,
)
from gapless.protocol.settings import Limits

if TYPE_CHECKING:
    from collections.abc import Mapping

    from gapless.client.transport import Connection, connect
    from gapless.server.app import Gapless, Settings

__all__ = [
    "Connection",
    "CursorDiscontinuityError",
    "Gapless",
    "GaplessError",
    "Limits",
    "McpSession",
    "NonResumableUpgradeBoundaryError",
    "Session",
    "SessionMigrationGapError",
    "SessionState",
    "Settings",
    "__version__",
    "asgi",
    "connect",
    "negotiate_upgrade",
    "resume_sse_stream",
]

__version__ = "0.1.0"


def asgi(
    server: Any,
    *,
    headers: Mapping[str, str] | None = None,
    log: str = "sqlite:///gapless.db",
    settings: Settings | None = None,
) -> Gapless:
    """An ASGI application that serves `server` durably: SSE, WebSocket, and the door between them.

    Args:
        server: an MCP SDK `MCPServer` or `Server`, `"module:attr"` that names one, a stdio server's
            command as a sequence of strings, started once per session, or the URL of a Streamable HTTP
            server.
        headers: sent with every request to such a URL (`Authorization`, say).
        log: where sessions are kept: `sqlite:///relative.db`, `sqlite:////absolute.db`, `memory:`.
        settings: path, limits, timers, allowed hosts and origins.

    Raises:
        UsageError: `server` is none of these, `headers` are none, or `log` names no store.
    """
    from gapless.backends import open_backends
    from gapless.log import open_log
    from gapless.server.app import Settings, build

    settings = settings or Settings()
    most = settings.limits.max_message_bytes
    backends = open_backends(server, headers=headers, max_message_bytes=most)
    return build(open_log(log), backends, settings)


def __getattr__(name: str) -> Any:
    # The client needs the MCP SDK and the server needs Starlette: each is imported when it is asked for.
    if name in ("connect", "Connection"):
        from gapless.client import transport

        return getattr(transport, name)
    if name in ("Gapless", "Settings"):
        from gapless.server import app

        return getattr(app, name)
    raise AttributeError(f"module 'gapless' has no attribute {name!r}")
