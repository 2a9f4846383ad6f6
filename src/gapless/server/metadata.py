"""What is published of the protected resource (RFC 9728)."""

from __future__ import annotations

from starlette.types import Receive, Scope, Send

from gapless.server.endpoint import Endpoint
from gapless.server.wire import not_allowed, respond, respond_json

__all__ = ["Metadata"]


class Metadata(Endpoint):
    """Below `/.well-known`. There is nothing at it unless somebody gives out tokens."""

    async def _route(self, scope: Scope, receive: Receive, send: Send) -> None:
        self._check_names(scope)
        if scope["method"] not in ("GET", "HEAD"):
            raise not_allowed(scope["method"], "GET")
        found = self._access.metadata(scope)
        if found is None:
            await respond(send, 404, b"")
        else:
            await respond_json(send, 200, found)
