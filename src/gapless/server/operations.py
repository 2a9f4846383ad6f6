"""What those who run a server ask it: whether it lives, whether it is ready, what it has counted."""

from __future__ import annotations

from typing import Final

from starlette.types import Receive, Scope, Send

from gapless.server.endpoint import Endpoint
from gapless.server.metrics import CONTENT_TYPE
from gapless.server.wire import not_allowed, respond

__all__ = ["OPERATIONS", "Operations"]

OPERATIONS: Final = ("/healthz", "/readyz", "/metrics")
_TEXT: Final = {"Content-Type": "text/plain; charset=utf-8"}


class Operations(Endpoint):
    """`/healthz`, `/readyz` and `/metrics`.

    The first two are for probes, which come by address and without a token: they tell a word. What is
    counted is for those who may call the server.
    """

    async def _route(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["method"] not in ("GET", "HEAD"):
            raise not_allowed(scope["method"], "GET")
        match scope["path"].rpartition("/")[2]:
            case "healthz":
                await respond(send, 200, b"ok\n", _TEXT)
            case "readyz":
                trouble = self._sessions.unready()
                text = "ready" if trouble is None else trouble
                await respond(send, 200 if trouble is None else 503, f"{text}\n".encode(), _TEXT)
            case _:
                self._check_names(scope)
                await self._who(scope)
                text = self._sessions.observer.metrics.text()
                await respond(send, 200, text, {"Content-Type": CONTENT_TYPE})
