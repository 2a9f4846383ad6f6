"""What all endpoints have in common: admission, finding the session, and refusing (§8)."""

from __future__ import annotations

import asyncio
from abc import ABC, abstractmethod
from math import ceil

from starlette.datastructures import Headers
from starlette.types import Receive, Scope, Send

from gapless.auth.base import Principal
from gapless.errors import StorageError
from gapless.protocol.delivery import ConnectionId
from gapless.protocol.refusal import Reason, Refusal
from gapless.protocol.session import View
from gapless.server.access import Access, Challenge
from gapless.server.faults import StorageFault
from gapless.server.live import Live
from gapless.server.relay import RELAYED, pass_on
from gapless.server.sessions import Elsewhere, Sessions
from gapless.server.wire import ClientGoneError, RefusedRequest, read_body, refuse

__all__ = ["Endpoint"]


class PassedOn(Exception):
    """Another process is to answer."""

    def __init__(self, to: Elsewhere) -> None:
        super().__init__()
        self.to = to


class Endpoint(ABC):
    """Some endpoints, as an ASGI application. Every refusal leaves here."""

    def __init__(self, sessions: Sessions, access: Access) -> None:
        self._sessions = sessions
        self._access = access
        self._limits = sessions.limits

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """One request, or one handshake."""
        try:
            try:
                await self._route(scope, receive, send)
            except PassedOn as elsewhere:
                await self._pass_on(elsewhere.to, scope, receive, send)
        except RefusedRequest as error:
            self._note(scope, error.refusal.reason)
            await refuse(scope, receive, send, error.refusal, error.headers, error.id)
        except (StorageFault, StorageError) as error:
            self._note(scope, Reason.STORAGE)
            await refuse(scope, receive, send, Refusal(Reason.STORAGE, str(error)))
        except ClientGoneError:
            pass  # nobody is left to answer

    def _note(self, scope: Scope, reason: Reason) -> None:
        """Count a refusal; of a handshake it is what came of it."""
        observer = self._sessions.observer
        observer.refused(reason)
        if scope["type"] == "websocket":
            observer.metrics.upgrades.labels(reason.value).inc()

    async def _pass_on(self, to: Elsewhere, scope: Scope, receive: Receive, send: Send) -> None:
        """Another process owns the session: it answers, unless it shows no life until its lease is over (N1).

        Raises:
            RefusedRequest: the session has changed hands meanwhile, more than once.
        """
        given_up = asyncio.ensure_future(to.silence())
        try:
            again = await pass_on(
                to.address, scope, receive, send, given_up=given_up, limit=self._limits.max_message_bytes
            )
        finally:
            given_up.cancel()
        if again is None:
            return
        try:
            if again is receive:  # nothing of it got there
                await self._route(scope, again, send)
            else:
                await self._once_more(scope, again, send)
        except PassedOn:
            text = "the process that serves this session does not answer"
            raise RefusedRequest(Refusal(Reason.LIMIT, text)) from None

    async def _once_more(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Answer a request that an owner had, which went before it answered.

        Raises:
            RefusedRequest, PassedOn: as `_route`.
        """
        await self._route(scope, receive, send)

    @abstractmethod
    async def _route(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Answer one request.

        Raises:
            RefusedRequest: the first refusal of §8's order that applies.
            PassedOn: another process answers; nothing has been read or sent.
        """

    async def _admit(self, scope: Scope) -> Principal:
        """Host, Origin, limits, and who is asking, in that order."""
        self._check(scope)
        return await self._who(scope)

    def _check(self, scope: Scope) -> None:
        """Host, Origin, limits, in that order."""
        self._check_names(scope)
        if self._sessions.draining:
            raise RefusedRequest(Refusal(Reason.LIMIT, "the server is shutting down"))

    def _check_names(self, scope: Scope) -> None:
        """Host and Origin, in that order."""
        refusal = self._access.check(Headers(scope=scope))
        if refusal is not None:
            raise RefusedRequest(refusal)

    async def _who(self, scope: Scope) -> Principal:
        """Who is asking."""
        match await self._access.principal(scope):
            case Principal() as principal:
                return principal
            case Challenge(refusal, headers):
                raise RefusedRequest(refusal, headers)

    def _connection(self, live: Live) -> ConnectionId:
        """A number for a new connection of a session that has room for it."""
        most = self._limits.max_session_connections
        if len(live.machine.connections) >= most:
            text = f"this session has {most} connections"
            raise RefusedRequest(live.machine.refusal(Reason.LIMIT, text, own=True).refusal)
        return live.connection()

    def _pass_door(self, live: Live) -> None:
        """Count an attempt to upgrade a session, unless there were too many of late."""
        wait = live.upgrades.take(live.clock())
        if wait:
            text = f"more than {self._limits.max_upgrades_per_minute} attempts to upgrade within a minute"
            refusal = live.machine.refusal(Reason.LIMIT, text, own=True).refusal
            raise RefusedRequest(refusal, {"Retry-After": str(ceil(wait))})

    async def _body(self, receive: Receive, most: int) -> bytes:
        """The whole body; see `read_body`."""
        return await read_body(receive, most, self._limits.body_timeout)

    async def _open_session(self, view: View, principal: Principal) -> tuple[str, Live]:
        opened = await self._sessions.open(view, principal.name)
        if isinstance(opened, Refusal):
            raise RefusedRequest(opened)
        return opened

    async def _find(self, scope: Scope, principal: Principal, token: str, view: View, elsewhere: str) -> Live:
        """The principal's session of this view that is not over, in that order."""
        found = await self._sessions.find(token, principal.name)
        if isinstance(found, Refusal):
            raise RefusedRequest(found)
        if isinstance(found, Elsewhere):
            if scope.get(RELAYED):
                text = "this session has just changed hands"
                raise RefusedRequest(Refusal(Reason.LIMIT, text))
            raise PassedOn(found)
        if found.machine.view is not view:
            raise RefusedRequest(found.machine.refusal(Reason.WRONG_VIEW, elsewhere).refusal)
        over = found.machine.ended()
        if over is not None:
            await found.durable()  # nobody is told of an end that a restart might not find (L2)
            raise RefusedRequest(over.refusal)
        return found
