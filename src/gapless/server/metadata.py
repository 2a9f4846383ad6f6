"""What is published of the protected resource (RFC 9728)."""

from __future__ import annotations

from starlette.datastructures import Headers
from starlette.types import Receive, Scope, Send

from gapless.server.access import Access
from gapless.server.wire import not_allowed, refuse, respond, respond_json

__all__ = ["Metadata"]


class Metadata:
    """The endpoint, as an ASGI application. There is nothing at it unless somebody gives out tokens."""

    def __init__(self, access: Access) -> None:
        self._access = access

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """One request."""
        refusal = self._access.check(Headers(scope=scope))
        if refusal is None and scope["method"] not in ("GET", "HEAD"):
            denied = not_allowed(scope["method"], "GET")
            await refuse(scope, receive, send, denied.refusal, denied.headers)
            return
        if refusal is not None:
            await refuse(scope, receive, send, refusal)
            return
        found = self._access.metadata(scope)
        if found is None:
            await respond(send, 404, b"")
        else:
            await respond_json(send, 200, found)
