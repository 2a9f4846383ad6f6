"""The session view: /mcp/session/...: open, messages, events, upgrade, WebSocket, ack, end (§5, §6)."""

from __future__ import annotations

import asyncio
import secrets
from contextlib import suppress
from typing import Any, Final
from urllib.parse import quote

import msgspec
from starlette.datastructures import Headers, QueryParams
from starlette.types import Receive, Scope, Send

from gapless.auth.base import Principal
from gapless.errors import MalformedError, StorageError, TooLargeError
from gapless.protocol.block import BLOCK_OVERHEAD, BlockDecoder
from gapless.protocol.cursor import EventId, parse_cursor
from gapless.protocol.delivery import Delivery
from gapless.protocol.inputs import (
    Accepted,
    Acked,
    Cursor,
    Effect,
    Ending,
    Handshake,
    Listen,
    Offered,
    Refused,
    Serving,
    Stated,
    Upgrade,
)
from gapless.protocol.media import JSON, STREAM, media_type
from gapless.protocol.refusal import CLOSE_GOING_AWAY, CLOSE_OVER, CLOSE_UNSUPPORTED_DATA, Reason, Refusal
from gapless.protocol.session import View
from gapless.server.attached import Cuttable
from gapless.server.endpoint import Endpoint
from gapless.server.faults import StorageFault
from gapless.server.feed import feed
from gapless.server.intake import message_input, message_number
from gapless.server.live import Live
from gapless.server.wire import (
    RefusedRequest,
    accepts,
    body_chunks,
    not_allowed,
    respond,
    respond_json,
    serve_events,
)

__all__ = ["SUBPROTOCOL", "SessionView"]

SUBPROTOCOL: Final = "mcp.v1"
_ECHO: Final = b"x-mcp-resume-cursor"
_CLOSE_WAIT: Final = 1.0
"""Seconds that a close frame may take to be written; a stalled peer is not waited for longer."""
_REFUSED_MOST: Final = 64
"""Refusals that may gather for a socket that does not read them; then it closes."""
_SMALL_BODY: Final = 16 * 1024


class SessionView(Endpoint):
    """The endpoints below `/mcp/session`."""

    async def _route(self, scope: Scope, receive: Receive, send: Send) -> None:
        headers = Headers(scope=scope)
        token: str | None = scope["path_params"].get("session")
        last: str = scope["path"].rpartition("/")[2]
        by_ticket = scope["type"] == "websocket" and self._by_ticket(scope, headers)
        principal = await (self._bearer(scope, token or "") if by_ticket else self._admit(scope))
        if token is None:
            await self._open(principal, scope, receive, send)
            return
        text = "this is a stream-view session: use /mcp"
        found = await self._find(scope, principal, token, View.SESSION, text)
        if scope["type"] == "websocket":
            await self._socket(found, principal, scope, receive, send)
            return
        handler, method = {
            "messages": (self._messages, "POST"),
            "events": (self._events, "GET"),
            "upgrade": (self._upgrade, "POST"),
            "ack": (self._ack, "POST"),
            "": (self._end, "DELETE"),
        }["" if last == token else last]
        if scope["method"] != method:
            raise not_allowed(scope["method"], method)
        await handler(found, principal, scope, receive, send)

    def _by_ticket(self, scope: Scope, headers: Headers) -> bool:
        """Whether a handshake has a ticket alone to say whose it is: browsers can send no header (§9)."""
        alone = "authorization" not in headers and self._access.verifier is not None
        return alone and "ticket" in QueryParams(scope["query_string"])

    async def _bearer(self, scope: Scope, token: str) -> Principal:
        """Whom the ticket of a handshake stands for; if for nobody, nothing is told of the session.

        Raises:
            RefusedRequest: as `_check`, or it lets nobody in.
        """
        self._check(scope)
        found = await self._sessions.bearer(token, QueryParams(scope["query_string"])["ticket"])
        if found is None:
            raise RefusedRequest(Refusal(Reason.UNAUTHENTICATED, "this ticket lets nobody in"))
        return found

    async def _open(self, principal: Principal, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["method"] != "POST":
            raise not_allowed(scope["method"], "POST")
        with suppress(TooLargeError):  # the body says nothing so far; whatever is in it is ignored
            await self._body(receive, _SMALL_BODY)
        token, live = await self._open_session(View.SESSION, principal)
        location = f"{_quoted(scope)}/{token}"
        body = {
            "session": token,
            "events": f"{location}/events",
            "cursor": str(EventId(0, 0, live.machine.outbox.floor_link)),
            "durability": live.machine.durability,
            "limits": self._limits.advertised_limits(),
            "timers": self._limits.advertised_timers(),
            "received": 0,
        }
        await respond_json(send, 201, body, {"Mcp-Session-Id": token, "Location": location})

    # Messages ------------------------------------------------------------------------------------

    async def _messages(self, live: Live, _: Principal, scope: Scope, receive: Receive, send: Send) -> None:
        headers = Headers(scope=scope)
        process = _process(scope, headers)
        kind = media_type(headers)
        if kind == STREAM:
            effect = await self._several(live, process, receive)
        elif kind == JSON:
            effect = await self._one(live, process, headers, receive)
        else:
            raise RefusedRequest(
                live.machine.refusal(Reason.UNSUPPORTED_MEDIA_TYPE, f"send {JSON} or {STREAM}").refusal
            )
        if isinstance(effect, Refused):
            raise RefusedRequest(effect.refusal)
        await respond_json(send, 202, {"received": live.machine.inbox.durable})

    async def _one(self, live: Live, process: str | None, headers: Headers, receive: Receive) -> Effect:
        limit = self._limits.max_message_bytes
        try:
            data = await self._body(receive, limit + BLOCK_OVERHEAD)
        except TooLargeError as error:
            # Not read whole, so it uses no number: the client sends a placeholder (L6).
            return live.machine.refusal(Reason.TOO_LARGE, str(error))
        number = message_number(headers.get("mcp-message-number"))
        return await self._take(live, process, number, data)

    async def _several(self, live: Live, process: str | None, receive: Receive) -> Effect:
        """Blocks in one body, taken one by one up to the first refusal (L6)."""
        decoder = BlockDecoder(self._limits.max_message_bytes + BLOCK_OVERHEAD)
        effect: Effect | None = None
        try:
            async for chunk in body_chunks(receive, self._limits.body_timeout):
                # Line by line: a block that cannot be decoded costs none that came before it.
                for line in chunk.splitlines(keepends=True):
                    for block in decoder.feed(line):
                        if block.event != "message":
                            continue
                        effect = await self._take(live, process, message_number(block.id), block.data or b"")
                        if isinstance(effect, Refused):
                            return effect
        except TooLargeError as error:
            return live.machine.refusal(Reason.TOO_LARGE, str(error))
        except MalformedError as error:
            return live.machine.refusal(Reason.MALFORMED, str(error))
        return effect or live.machine.refusal(Reason.MALFORMED, "the body holds no message block")

    async def _take(self, live: Live, process: str | None, number: int | None, data: bytes) -> Effect:
        if live.carrier.crowded:
            return live.machine.refusal(Reason.LIMIT, "the MCP server is behind with what it was sent")
        known = None if number is None else await live.known(number)
        limit = self._limits.max_message_bytes
        effects = await live.put(message_input(data, limit, number=number, process=process, known=known))
        return next(e for e in effects if isinstance(e, Refused | Accepted))

    # Event streams ---------------------------------------------------------------------------------

    async def _events(
        self, live: Live, principal: Principal, scope: Scope, receive: Receive, send: Send
    ) -> None:
        headers, query = Headers(scope=scope), QueryParams(scope["query_string"])
        if not accepts(headers, STREAM):
            raise RefusedRequest(live.machine.refusal(Reason.NOT_ACCEPTABLE, f"accept {STREAM}").refusal)
        stated = headers.get("last-event-id")
        cursor = None if stated is None else await self._cursor(live, stated)
        if "ticket" in query or "sec-websocket-key" in headers:
            text = "this was a WebSocket handshake when it was sent: something on the way eats upgrades"
            raise RefusedRequest(live.machine.refusal(Reason.UPGRADE_UNAVAILABLE, text).refusal)  # U6
        match _answer(await live.ask(Listen(self._connection(live), cursor))):
            case Serving(delivery):
                await serve_events(live, delivery, principal, receive, send)
            case Ending(block):
                await respond(send, 200, block, {"Content-Type": STREAM})
            case Refused(refusal):
                raise RefusedRequest(refusal)
            case other:
                raise AssertionError(other)

    async def _cursor(self, live: Live, text: str) -> Cursor:
        try:
            return await live.cursor(parse_cursor(text))
        except MalformedError as error:
            raise RefusedRequest(live.machine.refusal(Reason.MALFORMED, str(error)).refusal) from None

    async def _ack(self, live: Live, _: Principal, scope: Scope, receive: Receive, send: Send) -> None:
        body = await self._json(live, scope, receive)
        cursor = await self._cursor(live, self._string(live, body, "cursor"))
        match _answer(await live.put(Acked(cursor))):
            case Stated(ack):
                await respond_json(send, 200, {"ack": ack})
            case Refused(refusal):
                raise RefusedRequest(refusal)
            case other:
                raise AssertionError(other)

    async def _end(self, live: Live, _: Principal, scope: Scope, receive: Receive, send: Send) -> None:
        for effect in await live.end(Reason.SESSION_ENDED):
            if isinstance(effect, Refused):
                raise RefusedRequest(effect.refusal)
        await respond(send, 204, b"")

    async def _json(self, live: Live, scope: Scope, receive: Receive) -> dict[str, Any]:
        if media_type(Headers(scope=scope)) != JSON:
            raise RefusedRequest(live.machine.refusal(Reason.UNSUPPORTED_MEDIA_TYPE, f"send {JSON}").refusal)
        try:
            return msgspec.json.decode(await self._body(receive, _SMALL_BODY), type=dict[str, Any])
        except TooLargeError as error:
            raise RefusedRequest(live.machine.refusal(Reason.TOO_LARGE, str(error)).refusal) from None
        except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
            raise RefusedRequest(live.machine.refusal(Reason.MALFORMED, str(error)).refusal) from None

    def _string(self, live: Live, body: dict[str, Any], name: str) -> str:
        value = body.get(name)
        if not isinstance(value, str):
            text = f"the body has no {name!r}"
            raise RefusedRequest(live.machine.refusal(Reason.MALFORMED, text).refusal)
        return value

    # The door --------------------------------------------------------------------------------------

    async def _upgrade(
        self, live: Live, principal: Principal, scope: Scope, receive: Receive, send: Send
    ) -> None:
        self._pass_door(live)
        body = await self._json(live, scope, receive)
        stated, nonce = self._string(live, body, "cursor"), self._string(live, body, "negotiation")
        if not nonce or len(nonce) > 128:
            text = "an upgrade names its negotiation: a nonce of 1 to 128 characters"
            raise RefusedRequest(live.machine.refusal(Reason.MALFORMED, text).refusal)
        try:
            position = parse_cursor(stated)
        except MalformedError as error:
            raise RefusedRequest(live.machine.refusal(Reason.MALFORMED, str(error)).refusal) from None
        if body.get("protocol") != SUBPROTOCOL:
            text = f"the only protocol to upgrade to is {SUBPROTOCOL}"
            raise RefusedRequest(live.machine.refusal(Reason.UPGRADE_UNAVAILABLE, text).refusal)
        cursor = await live.cursor(position)
        ticket = _ticket(principal)
        match _answer(await live.ask(Upgrade(cursor, nonce, ticket, _events_url(scope)))):
            case Offered(event, negotiation, shown, url):
                offer = {"event": event, "negotiation": negotiation, "ticket": shown, "url": url}
                await respond_json(send, 200, offer)
            case Refused(refusal):
                raise RefusedRequest(refusal)
            case other:
                raise AssertionError(other)

    async def _socket(
        self, live: Live, principal: Principal, scope: Scope, receive: Receive, send: Send
    ) -> None:
        headers, query = Headers(scope=scope), QueryParams(scope["query_string"])
        await receive()  # websocket.connect
        self._pass_door(live)
        stated = query.get("cursor") or headers.get("last-event-id")
        if stated is None:
            text = "a handshake states the client's own cursor: Last-Event-ID, or cursor= in the query"
            raise RefusedRequest(live.machine.refusal(Reason.MALFORMED, text).refusal)
        cursor = await self._cursor(live, stated)
        if SUBPROTOCOL not in scope.get("subprotocols", ()):
            text = f"offer the subprotocol {SUBPROTOCOL}"
            raise RefusedRequest(live.machine.refusal(Reason.UPGRADE_UNAVAILABLE, text).refusal)
        asked = Handshake(
            self._connection(live), cursor, query.get("ticket"), secrets.token_urlsafe(12), _quoted(scope)
        )
        match _answer(await live.ask(asked)):
            case Serving(delivery, committed):
                await self._bound(
                    live, delivery, committed, principal, _process(scope, headers), receive, send
                )
            case Refused(refusal):
                raise RefusedRequest(refusal)
            case other:
                raise AssertionError(other)

    async def _bound(
        self,
        live: Live,
        delivery: Delivery,
        committed: int,
        principal: Principal,
        process: str | None,
        receive: Receive,
        send: Send,
    ) -> None:
        """A bound socket: one loop writes, one reads; the first to finish ends both."""
        wake = live.attach(delivery.connection, lambda: writer.cancel(), principal.expires)

        async def write(control: bytes, data: bytes) -> None:
            for part in (control, data):
                if part:
                    await send({"type": "websocket.send", "text": part.decode()})

        async def deliver() -> int:
            await send(
                {
                    "type": "websocket.accept",
                    "subprotocol": SUBPROTOCOL,
                    "headers": [(_ECHO, b"%d" % committed)],
                }
            )
            try:
                return (await feed(live, delivery, wake, write)).code
            except StorageError:
                return self._close_for(Reason.STORAGE)
            except RuntimeError:
                return CLOSE_GOING_AWAY  # uvicorn's word for a peer that went before the 101 was written

        reading = Cuttable()
        writer = asyncio.create_task(deliver())
        writer.add_done_callback(lambda _: reading.cut())
        code: int | None = None
        try:
            async with reading:
                code = await self._read(live, delivery, process, receive)
            if writer.done() and not writer.cancelled():
                code = writer.result()
            if code is not None:
                writer.cancel()
                delivery.close = delivery.close or code  # what its end is logged with
                with suppress(TimeoutError, RuntimeError):  # uvicorn's word for a socket that it has closed
                    async with asyncio.timeout(_CLOSE_WAIT):
                        reason = live.machine.reason if code == CLOSE_OVER else None
                        await send({"type": "websocket.close", "code": code, "reason": reason or ""})
        finally:
            live.detach(delivery.connection)
            writer.cancel()
            await asyncio.gather(writer, return_exceptions=True)

    async def _read(
        self, live: Live, delivery: Delivery, process: str | None, receive: Receive
    ) -> int | None:
        """Read a socket until it goes (`None`) or must be closed (the code)."""
        while True:
            message = await receive()
            if message["type"] == "websocket.disconnect":
                return None
            if delivery.close is not None:
                continue  # fenced, and not gone yet: what it says is void (B8)
            live.heard(delivery.connection)
            text = message.get("text")
            if text is None:
                return CLOSE_UNSUPPORTED_DATA  # W5: binary
            decoder = BlockDecoder(self._limits.max_message_bytes + BLOCK_OVERHEAD)
            try:
                blocks = decoder.feed(text.encode())
            except TooLargeError:
                return self._close_for(Reason.TOO_LARGE)
            except MalformedError:
                return self._close_for(Reason.MALFORMED)
            if decoder.pending:
                return self._close_for(Reason.MALFORMED)  # a frame holds whole blocks (W1)
            try:
                for block in blocks:
                    if block.event == "message":
                        await self._take_framed(live, delivery, process, block.id, block.data or b"")
                    elif block.event == "cursor-ack":
                        code = await self._take_ack(live, delivery, block.data or b"")
                        if code is not None:
                            return code
            except (StorageFault, StorageError):
                return self._close_for(Reason.STORAGE)
            if len(delivery.refused) > _REFUSED_MOST:
                return self._close_for(Reason.LIMIT)

    def _close_for(self, reason: Reason) -> int:
        """The close code that a refusal on a socket has, where it is no block; it is counted."""
        self._sessions.observer.refused(reason)
        code = Refusal(reason, "").row.close
        assert code is not None
        return code

    async def _take_framed(
        self, live: Live, delivery: Delivery, process: str | None, id: str | None, data: bytes
    ) -> None:
        await live.carrier.uncrowded()
        number = message_number(id)
        known = None if number is None else await live.known(number)
        limit = self._limits.max_message_bytes
        # `received` is stated by the writer once it is durable; nobody waits for that here.
        live.offer(
            message_input(
                data, limit, number=number, process=process, known=known, connection=delivery.connection
            )
        )

    async def _take_ack(self, live: Live, delivery: Delivery, data: bytes) -> int | None:
        try:
            body = msgspec.json.decode(data, type=dict[str, Any])
            stated = parse_cursor(self._string(live, body, "cursor"))
        except (msgspec.DecodeError, UnicodeDecodeError, RecursionError, MalformedError, RefusedRequest):
            return self._close_for(Reason.MALFORMED)
        cursor = await live.cursor(stated)
        live.offer(Acked(cursor, delivery.connection))
        return None


def _answer(effects: list[Effect]) -> Effect:
    """The one effect that answers the request."""
    (effect,) = effects
    return effect


def _process(scope: Scope, headers: Headers) -> str | None:
    """The client process behind a request (L6): a header, or, for browsers, a query parameter."""
    name = headers.get("mcp-client") or QueryParams(scope["query_string"]).get("client")
    return name if name and len(name) <= 128 else None


def _ticket(principal: Principal) -> str:
    """A ticket stands for whoever asked for it, and no longer than they do (§9)."""
    until = "" if principal.expires is None else f".{principal.expires:.0f}"
    return secrets.token_urlsafe(24) + until


def _events_url(scope: Scope) -> str:
    return _quoted(scope).rpartition("/")[0] + "/events"


def _quoted(scope: Scope) -> str:
    """The path as it stands in a URL, mount prefix included; what a server hands over is unquoted."""
    path: str = scope["path"]
    return quote(path.rstrip("/"), safe="/!$&'()*+,;=:@")
