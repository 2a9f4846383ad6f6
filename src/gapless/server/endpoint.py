"""What the endpoints of both views have in common: admission, finding the session, and refusing (§8)."""

from __future__ import annotations

from abc import ABC, abstractmethod

from starlette.datastructures import Headers
from starlette.types import Receive, Scope, Send

from gapless.errors import StorageError
from gapless.protocol.refusal import Reason, Refusal
from gapless.protocol.session import View
from gapless.server.access import Access
from gapless.server.live import Live, StorageFault
from gapless.server.sessions import Sessions
from gapless.server.wire import ClientGoneError, RefusedRequest, refuse

__all__ = ["Endpoint"]


class Endpoint(ABC):
    """One view's endpoints, as an ASGI application. Every refusal leaves here."""

    def __init__(self, sessions: Sessions, access: Access) -> None:
        self._sessions = sessions
        self._access = access
        self._limits = sessions.limits

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """One request, or one handshake."""
        try:
            await self._route(scope, receive, send)
        except RefusedRequest as error:
            await refuse(scope, receive, send, error.refusal, error.headers)
        except (StorageFault, StorageError) as error:
            await refuse(scope, receive, send, Refusal(Reason.STORAGE, str(error)))
        except ClientGoneError:
            pass  # nobody is left to answer

    @abstractmethod
    async def _route(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Answer one request.

        Raises:
            RefusedRequest: the first refusal of §8's order that applies.
        """

    def _admit(self, headers: Headers) -> None:
        """Host, Origin, limits, in that order."""
        refusal = self._access.check(headers)
        if refusal is not None:
            raise RefusedRequest(refusal)
        if self._sessions.draining:
            raise RefusedRequest(Refusal(Reason.LIMIT, "the server is shutting down"))

    async def _find(self, token: str, headers: Headers, view: View, elsewhere: str) -> Live:
        """The principal's session of this view that is not over, in that order."""
        found = await self._sessions.find(token, self._access.principal(headers))
        if isinstance(found, Refusal):
            raise RefusedRequest(found)
        if found.machine.view is not view:
            raise RefusedRequest(found.machine.refusal(Reason.WRONG_VIEW, elsewhere).refusal)
        over = found.machine.ended()
        if over is not None:
            raise RefusedRequest(over.refusal)
        return found
