"""The ASGI application: routes, lifespan, settings."""

from __future__ import annotations

from collections.abc import AsyncGenerator, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass

from starlette.applications import Starlette
from starlette.routing import Route, WebSocketRoute
from starlette.types import Receive, Scope, Send

from gapless.backends.base import BackendFactory
from gapless.errors import UsageError
from gapless.log.base import Log
from gapless.protocol.settings import Limits
from gapless.server.access import LOOPBACK, Access
from gapless.server.door import SessionView
from gapless.server.relay import Doorway
from gapless.server.sessions import Sessions
from gapless.server.streams import StreamView

__all__ = ["Gapless", "Settings", "build"]


@dataclass(frozen=True, slots=True)
class Settings:
    """How a server serves.

    Attributes:
        path: where the endpoints are mounted.
        limits: sizes and timers (§8).
        allowed_hosts: host names that `Host` may carry; loopback names by default.
        allowed_origins: origins that browsers may call from; loopback ones by default.
    """

    path: str = "/mcp"
    limits: Limits = Limits()
    allowed_hosts: Sequence[str] = LOOPBACK
    allowed_origins: Sequence[str] = LOOPBACK


class Gapless(Starlette):
    """A Starlette application that serves one MCP server's sessions.

    Run it alone, or mount it in another application and enter its `lifespan` from there.
    """

    sessions: Sessions
    doorway: Doorway
    started: bool = False
    """Whether `start` has returned, be it called by the lifespan."""

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Answer.

        Raises:
            UsageError: nobody has entered the lifespan: most likely that of a mounted application.
        """
        if not self.started and scope["type"] != "lifespan":
            raise UsageError(
                "Gapless was not started: enter its lifespan from that of the application it is mounted in",
                hint="async with app.router.lifespan_context(app): ...",
            )
        await super().__call__(scope, receive, send)

    async def start(self) -> None:
        """Begin to serve: open the log, start what all sessions share.

        Raises:
            GaplessError: the log cannot be opened, or the MCP server not be started.
        """
        await self.sessions.start(self.doorway.open)
        self.started = True

    async def close(self) -> None:
        """End what is still being served, and release the log."""
        try:
            await self.doorway.close()
        finally:
            await self.sessions.close()


def build(log: Log, backends: BackendFactory, settings: Settings) -> Gapless:
    """Assemble the application around a log and a backend."""
    sessions = Sessions(log, backends, settings.limits)
    access = Access(settings.allowed_hosts, settings.allowed_origins)
    session_view, stream_view = SessionView(sessions, access), StreamView(sessions, access)
    base = settings.path.rstrip("/")

    @asynccontextmanager
    async def lifespan(_: Starlette) -> AsyncGenerator[None]:
        try:
            await app.start()
            yield
        finally:
            await app.close()

    app = Gapless(
        routes=[
            Route(f"{base}/session", session_view),
            Route(f"{base}/session/{{session}}", session_view),
            *(
                Route(f"{base}/session/{{session}}/{part}", session_view)
                for part in ("messages", "events", "upgrade", "ack")
            ),
            WebSocketRoute(f"{base}/session/{{session}}/events", session_view),
            Route(base or "/", stream_view),
        ],
        lifespan=lifespan,
    )
    app.sessions = sessions
    app.doorway = Doorway(app, settings.limits.max_message_bytes)
    return app
