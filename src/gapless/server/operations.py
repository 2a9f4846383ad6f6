"""What those who run a server ask it: whether it lives, whether it is ready, what it has counted."""

from __future__ import annotations

from starlette.datastructures import Headers
from starlette.types import Receive, Scope, Send

from gapless.server.access import Access, Challenge
from gapless.server.metrics import CONTENT_TYPE
from gapless.server.sessions import Sessions
from gapless.server.wire import not_allowed, refuse, respond

__all__ = ["OPERATIONS", "Operations"]

OPERATIONS = ("/healthz", "/readyz", "/metrics")


class Operations:
    """The endpoints `/healthz`, `/readyz` and `/metrics`, as an ASGI application.

    The first two are for probes, which come by address and without a token: they tell a word. What is
    counted is for those who may call the server.
    """

    def __init__(self, sessions: Sessions, access: Access) -> None:
        self._sessions = sessions
        self._access = access

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """One request."""
        if scope["method"] not in ("GET", "HEAD"):
            denied = not_allowed(scope["method"], "GET")
            await refuse(scope, receive, send, denied.refusal, denied.headers)
            return
        match scope["path"].rpartition("/")[2]:
            case "healthz":
                await respond(send, 200, b"ok\n", _TEXT)
            case "readyz":
                trouble = self._sessions.unready()
                text = "ready" if trouble is None else trouble
                await respond(send, 200 if trouble is None else 503, f"{text}\n".encode(), _TEXT)
            case _:
                await self._metrics(scope, receive, send)

    async def _metrics(self, scope: Scope, receive: Receive, send: Send) -> None:
        refusal = self._access.check(Headers(scope=scope))
        if refusal is not None:
            await refuse(scope, receive, send, refusal)
            return
        who = await self._access.principal(scope)
        if isinstance(who, Challenge):
            await refuse(scope, receive, send, who.refusal, who.headers)
        else:
            await respond(send, 200, self._sessions.observer.metrics.text(), {"Content-Type": CONTENT_TYPE})


_TEXT = {"Content-Type": "text/plain; charset=utf-8"}
