"""The ASGI application: routes, lifespan, settings."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass
from typing import Final
from urllib.parse import urlsplit

from starlette.applications import Starlette
from starlette.middleware import Middleware
from starlette.middleware.cors import CORSMiddleware
from starlette.routing import Route, WebSocketRoute
from starlette.types import Receive, Scope, Send

from gapless.auth.base import Verifier
from gapless.backends.base import BackendFactory
from gapless.errors import UsageError
from gapless.log.base import Log
from gapless.protocol.refusal import Reason, Refusal
from gapless.protocol.settings import Limits
from gapless.server.access import LOOPBACK, METADATA, Access
from gapless.server.door import SessionView
from gapless.server.endpoint import Endpoint
from gapless.server.metadata import Metadata
from gapless.server.operations import OPERATIONS, Operations
from gapless.server.relay import Doorway
from gapless.server.sessions import Sessions
from gapless.server.streams import StreamView
from gapless.server.wire import RefusedRequest

__all__ = ["Gapless", "Settings", "build"]


_SENT: Final = (
    *("Authorization", "Content-Type", "Last-Event-ID"),
    *("Mcp-Client", "Mcp-Message-Number", "Mcp-Protocol-Version", "Mcp-Session-Id"),
)
"""Headers that pages may send, beside those that they always may."""
_EXPOSED: Final = ("Location", "Mcp-Session-Id", "Retry-After", "WWW-Authenticate")
"""Headers that pages may read."""


@dataclass(frozen=True, slots=True)
class Settings:
    """How a server serves.

    Attributes:
        path: where the endpoints are mounted.
        limits: sizes and timers (§8).
        allowed_hosts: host names that `Host` may carry; loopback names by default.
        allowed_origins: origins that browsers may call from; loopback ones by default.
        verifier: knows whom a bearer token stands for; without one everybody is anonymous.
        public_url: the URL of the endpoints as clients know it, behind a proxy; its host and its origin are
            allowed. Tokens are for this URL.
    """

    path: str = "/mcp"
    limits: Limits = Limits()
    allowed_hosts: Sequence[str] = LOOPBACK
    allowed_origins: Sequence[str] = LOOPBACK
    verifier: Verifier | None = None
    public_url: str | None = None


class Gapless(Starlette):
    """A Starlette application that serves one MCP server's sessions.

    Run it alone, or mount it in another application and enter its `lifespan` from there.
    """

    sessions: Sessions
    doorway: Doorway
    verifier: Verifier | None = None
    _watching: asyncio.Task[None] | None = None
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
            GaplessError: the log cannot be opened, the MCP server not be started, or tokens not verified.
        """
        if self.verifier is not None:
            await self.verifier.start()
        await self.sessions.start(self.doorway.open)
        if self.verifier is not None:
            self._watching = asyncio.create_task(self.verifier.watch(self.sessions.revoke))
        self.started = True

    async def close(self) -> None:
        """End what is still being served, and release the log."""
        if self._watching is not None:
            self._watching.cancel()
        try:
            await self.doorway.close()
        finally:
            await self.sessions.close()
            if self.verifier is not None:
                await self.verifier.close()


def _access(settings: Settings) -> Access:
    hosts, origins = [*settings.allowed_hosts], [*settings.allowed_origins]
    if settings.public_url is not None:
        parts = urlsplit(settings.public_url)
        if parts.scheme not in ("http", "https") or not parts.hostname or parts.query or parts.fragment:
            raise UsageError(
                f"{settings.public_url!r} is not the URL of an endpoint", hint="for example https://host/mcp"
            )
        hosts.append(parts.netloc)
        origins.append(f"{parts.scheme}://{parts.netloc}")
    return Access(hosts, origins, settings.verifier, settings.path, settings.public_url)


def _cross_origin(settings: Settings) -> list[Middleware]:
    """CORS, for the origins that were named; a page from elsewhere cannot read what it is answered."""
    named = [origin for origin in settings.allowed_origins if origin == "*" or "://" in origin]
    if not named:
        return []
    return [
        Middleware(
            CORSMiddleware,
            allow_origins=named,
            allow_methods=["GET", "POST", "DELETE"],
            allow_headers=_SENT,
            expose_headers=_EXPOSED,
        )
    ]


def _metadata(settings: Settings) -> set[str]:
    """Where the metadata is looked for: at the root, and under the endpoints' path, public and our own."""
    public = urlsplit(settings.public_url or "").path.rstrip("/")
    return {METADATA, METADATA + settings.path.rstrip("/"), METADATA + public}


class _Nowhere(Endpoint):
    """What is no endpoint is refused as those refuse."""

    async def _route(self, scope: Scope, receive: Receive, send: Send) -> None:
        raise RefusedRequest(Refusal(Reason.NOT_FOUND, "there is no endpoint of this name"))


def build(log: Log, backends: BackendFactory, settings: Settings) -> Gapless:
    """Assemble the application around a log and a backend."""
    sessions = Sessions(log, backends, settings.limits)
    access = _access(settings)
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
        routes=[  # in the order of how often each is asked for: they are tried in turn
            *(Route(at, stream_view) for at in dict.fromkeys((base or "/", f"{base}/"))),
            *(
                Route(f"{base}/session/{{session}}/{part}", session_view)
                for part in ("messages", "events", "ack", "upgrade")
            ),
            WebSocketRoute(f"{base}/session/{{session}}/events", session_view),
            Route(f"{base}/session", session_view),
            Route(f"{base}/session/{{session}}", session_view),
            *(Route(at, Operations(sessions, access)) for at in OPERATIONS),
            *(Route(at, Metadata(sessions, access)) for at in _metadata(settings)),
        ],
        middleware=_cross_origin(settings),
        lifespan=lifespan,
    )
    app.router.default = _Nowhere(sessions, access)
    app.router.redirect_slashes = False  # it would redirect whoever asks, to whatever `Host` says
    app.verifier = settings.verifier
    app.sessions = sessions
    app.doorway = Doorway(app, settings.limits.max_message_bytes)
    return app
