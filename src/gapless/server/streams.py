"""The stream view: POST, GET and DELETE /mcp, as standard Streamable HTTP clients know it (§7)."""

from __future__ import annotations

import re
from typing import Final

from starlette.datastructures import Headers
from starlette.types import Receive, Scope, Send

from gapless.auth.base import Principal
from gapless.errors import MalformedError, TooLargeError
from gapless.protocol.block import BLOCK_OVERHEAD
from gapless.protocol.cursor import parse_cursor
from gapless.protocol.inputs import Accepted, Listen, Message, Refused, Serving
from gapless.protocol.jsonrpc import Kind, outcome_unknown
from gapless.protocol.media import JSON, STREAM, media_type
from gapless.protocol.refusal import Reason, Refusal
from gapless.protocol.revisions import STREAM_VIEW, primes, requested_revision, unsupported_version
from gapless.protocol.session import View
from gapless.server.endpoint import Endpoint
from gapless.server.faults import StorageFault
from gapless.server.intake import message_input
from gapless.server.live import Live
from gapless.server.wire import (
    RefusedRequest,
    accepts,
    not_allowed,
    respond,
    serve_events,
)

__all__ = ["StreamView"]

_ALLOW: Final = "GET, POST, DELETE"
_SESSION: Final = "mcp-session-id"
_REVISION: Final = "mcp-protocol-version"
_TOKEN: Final = re.compile(r"[\x21-\x7e]+", re.ASCII)
"""A session ID as standard MCP has it: visible ASCII, and some of it."""


class StreamView(Endpoint):
    """The endpoint `/mcp`."""

    async def _route(self, scope: Scope, receive: Receive, send: Send) -> None:
        headers = Headers(scope=scope)
        principal = await self._admit(scope)
        token = headers.get(_SESSION)
        live = None
        if token is not None and _TOKEN.fullmatch(token) is not None:
            elsewhere = "this session was opened at /mcp/session: use its endpoints"
            live = await self._find(scope, principal, token, View.STREAM, elsewhere)
        match scope["method"]:
            case "POST":
                await self._post(live, principal, headers, receive, send)
            case "GET":
                await self._get(live, principal, headers, receive, send)
            case "DELETE":
                await self._need(live).end(Reason.SESSION_ENDED)
                await respond(send, 204, b"")
            case method:
                raise not_allowed(method, _ALLOW)

    async def _once_more(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["method"] == "POST":
            await self._give_up(receive, send)
        else:
            await self._route(scope, receive, send)

    async def _give_up(self, receive: Receive, send: Send) -> None:
        """A message here has no number (L6): the owner that is gone may have run it, so nobody does again."""
        data = await self._body(receive, self._limits.max_message_bytes + BLOCK_OVERHEAD)
        envelope = message_input(data, self._limits.max_message_bytes).envelope
        why = "the process that served this session is gone"
        if envelope is None or envelope.kind is not Kind.REQUEST:
            raise RefusedRequest(Refusal(Reason.LIMIT, f"{why}; the outcome is unknown"))
        await respond(send, 200, outcome_unknown(envelope.id, why), {"Content-Type": JSON})

    def _need(self, live: Live | None) -> Live:
        if live is None:
            text = "Mcp-Session-Id is missing, or is no token: initialize first"
            raise RefusedRequest(Refusal(Reason.MALFORMED, text))
        return live

    async def _post(
        self, live: Live | None, principal: Principal, headers: Headers, receive: Receive, send: Send
    ) -> None:
        if not accepts(headers, JSON, STREAM):
            raise RefusedRequest(Refusal(Reason.NOT_ACCEPTABLE, f"accept {JSON} and {STREAM}"))
        if media_type(headers) != JSON:
            raise RefusedRequest(Refusal(Reason.UNSUPPORTED_MEDIA_TYPE, f"send {JSON}"))
        limit = self._limits.max_message_bytes
        try:
            data = await self._body(receive, limit + BLOCK_OVERHEAD)
        except TooLargeError as error:
            raise RefusedRequest(Refusal(Reason.TOO_LARGE, str(error))) from None
        looked = message_input(data, limit)
        if await self._unspoken(headers, looked, send):
            return
        try:
            await self._post_message(live, principal, headers, looked, receive, send)
        except RefusedRequest as refused:  # M6: as the error of the request that it refuses
            about = looked.envelope if looked.problem is None else looked.problem.request
            raise RefusedRequest(refused.refusal, refused.headers, about.id if about else None) from None

    async def _post_message(
        self,
        live: Live | None,
        principal: Principal,
        headers: Headers,
        looked: Message,
        receive: Receive,
        send: Send,
    ) -> None:
        if looked.problem is not None:
            raise RefusedRequest(Refusal(looked.problem.reason, looked.problem.message))
        revision = headers.get(_REVISION)
        assert looked.envelope is not None
        opens = looked.envelope.method == "initialize" and looked.envelope.kind is Kind.REQUEST
        if opens and _SESSION not in headers:
            revision = requested_revision(looked.data)
            token, live = await self._open_session(View.STREAM, principal)
        else:
            live, token = self._need(live), headers[_SESSION]
        if live.carrier.crowded:
            raise RefusedRequest(live.machine.refusal(Reason.LIMIT, "the MCP server is behind").refusal)
        await self._take(live, principal, token, looked, primes(revision), receive, send)

    async def _unspoken(self, headers: Headers, looked: Message, send: Send) -> bool:
        """M7: a revision that this endpoint does not speak gets that revision's own error."""
        revision = headers.get(_REVISION)
        if revision is None or revision in STREAM_VIEW:
            return False
        id = None if looked.envelope is None else looked.envelope.id
        await respond(send, 400, unsupported_version(id, revision))
        return True

    async def _take(
        self,
        live: Live,
        principal: Principal,
        token: str,
        looked: Message,
        primed: bool,
        receive: Receive,
        send: Send,
    ) -> None:
        assert looked.envelope is not None
        connection = self._connection(live) if looked.envelope.kind is Kind.REQUEST else None
        message = Message(looked.data, looked.digest, looked.envelope, answer_on=connection, primed=primed)
        answered = {"Mcp-Session-Id": token}
        try:
            effects = await live.put(message)
        except StorageFault as fault:
            # It runs once the log takes writes: told to try again, its client would have it run twice.
            if looked.envelope.kind is not Kind.REQUEST:
                raise
            self._sessions.observer.refused(Reason.STORAGE)
            answer = outcome_unknown(looked.envelope.id, f"it may run yet: {fault}")
            await respond(send, 200, answer, {"Content-Type": JSON, **answered})
            return
        for effect in effects:
            match effect:
                case Serving(delivery):
                    await serve_events(live, delivery, principal, receive, send, answered)
                case Accepted():
                    await respond(send, 202, b"", answered)
                case Refused(refusal):
                    raise RefusedRequest(refusal)
                case _:
                    pass

    async def _get(
        self, found: Live | None, principal: Principal, headers: Headers, receive: Receive, send: Send
    ) -> None:
        if not accepts(headers, STREAM):
            raise RefusedRequest(Refusal(Reason.NOT_ACCEPTABLE, f"accept {STREAM}"))
        live = self._need(found)
        primed = primes(headers.get(_REVISION))
        stated = headers.get("last-event-id")
        if stated is None:
            listen = await self._standalone(live, primed)
        else:
            try:
                cursor = await live.cursor(parse_cursor(stated))
            except MalformedError as error:
                raise RefusedRequest(live.machine.refusal(Reason.MALFORMED, str(error)).refusal) from None
            listen = Listen(self._connection(live), cursor, primed=primed)
        (effect,) = await live.put(listen)
        match effect:
            case Serving(delivery):
                token = headers[_SESSION]
                await serve_events(live, delivery, principal, receive, send, {"Mcp-Session-Id": token})
            case Refused(refusal):
                raise RefusedRequest(refusal)
            case other:
                raise AssertionError(other)

    async def _standalone(self, live: Live, primed: bool) -> Listen:
        """M3: without a cursor the standalone stream goes on from where its client said it was."""
        while True:
            at = live.machine.standalone_position
            held = await live.log.link(live.key, at)
            if at == live.machine.standalone_position:
                return Listen(self._connection(live), None, held, primed=primed)
