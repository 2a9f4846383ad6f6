"""A naive server: the continuity protocol and Streamable HTTP, in memory, around a ladder of its own.

With every switch off it is right in what it has: both views, but no limits on bytes, no expiry, and
no check of Host and Origin. Each switch of `NaiveSwitches` makes one mistake that servers in the
field have made, so that whoever looks for mistakes can be shown to find it.
"""

from __future__ import annotations

import asyncio
import re
from collections.abc import AsyncGenerator, Coroutine
from contextlib import asynccontextmanager, nullcontext, suppress
from typing import Any, Final

import msgspec
from starlette.applications import Starlette
from starlette.requests import ClientDisconnect, HTTPConnection, Request
from starlette.responses import JSONResponse, Response
from starlette.routing import Route, WebSocketRoute
from starlette.types import Receive, Scope, Send
from starlette.websockets import WebSocket, WebSocketDisconnect

from gapless.errors import MalformedError
from gapless.protocol import refusal
from gapless.protocol.block import BlockDecoder
from gapless.protocol.jsonrpc import Kind, error_response, one_line, peek
from gapless.protocol.refusal import Reason, Refusal
from gapless.protocol.revisions import STREAM_VIEW, primes, requested_revision, unsupported_version
from tests.server.harness import Uvicorn, listening
from tests.torture.naive_log import Reader
from tests.torture.naive_session import NaiveSession, RefusedError
from tests.torture.naive_switches import NaiveSwitches

__all__ = ["NaiveSwitches", "naive_server"]

_SUBPROTOCOL: Final = "mcp.v1"
_STREAM: Final = "text/event-stream"
_JSON: Final = "application/json"
_FRAME: Final = 16 * 1024 * 1024
_NUMBER: Final = re.compile(r"[1-9][0-9]{0,17}", re.ASCII)


@asynccontextmanager
async def naive_server(switches: NaiveSwitches | None = None) -> AsyncGenerator[str]:
    """A running naive server: the URL of its `/mcp`."""
    server, sock = _Server(switches or NaiveSwitches()), listening()
    runner = Uvicorn(server.app, sock)
    port = sock.getsockname()[1]
    await runner.start()
    try:
        yield f"http://127.0.0.1:{port}/mcp"
    finally:
        for session in server.sessions.values():
            session.ladder.close()
        await runner.stop()


class _Server:
    def __init__(self, switches: NaiveSwitches) -> None:
        self.sessions: dict[str, NaiveSession] = {}
        self._switches = switches
        self._journal: list[str] = []
        self.turn = asyncio.Lock() if switches.one_queue else nullcontext()
        """Held while something is written, if all is written by one hand."""
        session = "/mcp/session/{token}"
        self.app = Starlette(
            routes=[
                Route("/mcp/session", self._open, methods=["POST"]),
                Route(session, self._end, methods=["DELETE"]),
                Route(f"{session}/messages", self._messages, methods=["POST"]),
                Route(f"{session}/events", self._events, methods=["GET"]),
                Route(f"{session}/upgrade", self._upgrade, methods=["POST"]),
                Route(f"{session}/ack", self._ack, methods=["POST"]),
                WebSocketRoute(f"{session}/events", self._socket),
                Route("/mcp", self._post, methods=["POST"]),
                Route("/mcp", self._get, methods=["GET"]),
                Route("/mcp", self._delete, methods=["DELETE"]),
            ],
            exception_handlers={RefusedError: _refuse, ClientDisconnect: _nobody},
        )

    def _new(self, *, by_stream: bool) -> NaiveSession:
        session = NaiveSession(self._switches, self._journal, by_stream=by_stream)
        self.sessions[session.token] = session
        return session

    def _find(self, token: str, *, by_stream: bool = False) -> NaiveSession:
        session = self.sessions.get(token)
        if session is None:
            raise _refused(Reason.SESSION_UNKNOWN, "no such session")
        if session.by_stream is not by_stream:
            raise _refused(Reason.WRONG_VIEW, "this session was opened at the other endpoint")
        session.alive()
        return session

    async def _listen(self, session: NaiveSession, request: Request) -> Response | _Events:
        if not _accepts(request, _STREAM):
            raise session.refused(Reason.NOT_ACCEPTABLE, f"accept {_STREAM}")
        stated = request.headers.get("last-event-id")
        keeper = self._keeper(session, stated)
        found = await keeper.listen(stated, primed=primes(request.headers.get("mcp-protocol-version")))
        if isinstance(found, bytes):
            return Response(found, media_type=_STREAM)
        return _Events(self, keeper, found)

    def _keeper(self, session: NaiveSession, text: str | None) -> NaiveSession:
        """Whose cursor this is: the session's own, unless all sessions share a store."""
        if not self._switches.shares_cursors or text is None:
            return session
        for other in self.sessions.values():
            with suppress(RefusedError):
                if other.by_stream is session.by_stream and other.owns(other.parse(text)):
                    return other
        return session

    # The session view -----------------------------------------------------------------------------

    async def _open(self, request: Request) -> Response:
        session, limits = self._new(by_stream=False), self._switches.limits
        location = f"/mcp/session/{session.token}"
        body = {
            "session": session.token,
            "events": f"{location}/events",
            "cursor": str(session.id(0)),
            "received": 0,
            "durability": "memory",
            "limits": limits.advertised_limits(),
            "timers": limits.advertised_timers(),
        }
        return JSONResponse(body, 201, {"Mcp-Session-Id": session.token, "Location": location})

    async def _end(self, request: Request) -> Response:
        self._find(request.path_params["token"]).end(Reason.SESSION_ENDED, Reason.SESSION_ENDED.value)
        return Response(status_code=204)

    async def _messages(self, request: Request) -> Response:
        session = self._find(request.path_params["token"])
        process, body = _process(request), await request.body()
        match _media_type(request):
            case "application/json":
                session.take(process, _number(request.headers.get("mcp-message-number")), body)
            case "text/event-stream":
                try:
                    blocks = BlockDecoder(_FRAME).feed(body)
                except MalformedError as error:
                    raise session.refused(Reason.MALFORMED, str(error)) from None
                for block in blocks:
                    session.take(process, _number(block.id), block.data or b"")
            case _:
                raise session.refused(Reason.UNSUPPORTED_MEDIA_TYPE, f"send {_JSON} or {_STREAM}")
        return JSONResponse({"received": session.received}, 202)

    async def _events(self, request: Request) -> Response | _Events:
        session = self._find(request.path_params["token"])
        if "ticket" in request.query_params or "sec-websocket-key" in request.headers:
            raise session.refused(Reason.UPGRADE_UNAVAILABLE, "something on the way eats upgrades")
        return await self._listen(session, request)

    async def _upgrade(self, request: Request) -> Response:
        session = self._find(request.path_params["token"])
        body = await _object(session, request)
        cursor, nonce = session.parse(str(body.get("cursor"))), body.get("negotiation")
        if not isinstance(nonce, str) or not 0 < len(nonce) <= 128:
            raise session.refused(Reason.MALFORMED, "an upgrade names its negotiation")
        if body.get("protocol") != _SUBPROTOCOL:
            raise session.refused(Reason.UPGRADE_UNAVAILABLE, f"the only protocol is {_SUBPROTOCOL}")
        return JSONResponse(await session.upgrade(cursor, nonce))

    async def _ack(self, request: Request) -> Response:
        session = self._find(request.path_params["token"])
        cursor = session.parse(str((await _object(session, request)).get("cursor")))
        session.prove(cursor)
        return JSONResponse({"ack": session.ack(cursor)})

    async def _socket(self, websocket: WebSocket) -> None:
        await websocket.receive()
        session = self._find(websocket.path_params["token"])
        stated = websocket.query_params.get("cursor") or websocket.headers.get("last-event-id")
        session = self._keeper(session, stated)
        cursor = session.parse(stated or "")
        if _SUBPROTOCOL not in websocket.scope["subprotocols"]:
            raise session.refused(Reason.UPGRADE_UNAVAILABLE, f"offer {_SUBPROTOCOL}")
        reader, echo = await session.handshake(cursor, websocket.query_params.get("ticket"))
        headers = [] if echo is None else [(b"x-mcp-resume-cursor", b"%d" % echo)]

        async def write(data: bytes) -> None:
            async with self.turn:
                await websocket.send_text(data.decode())

        async def deliver() -> int:
            await websocket.accept(_SUBPROTOCOL, headers)
            return await session.deliver(reader, write)

        try:
            with suppress(WebSocketDisconnect, RuntimeError):  # it went while it was written to
                code = await _first(deliver(), _read(session, reader, websocket))
                if code is not None:
                    await websocket.close(code)
        finally:
            session.detach(reader)

    # The stream view ------------------------------------------------------------------------------

    async def _post(self, request: Request) -> Response | _Events:
        token, revision = request.headers.get("mcp-session-id"), request.headers.get("mcp-protocol-version")
        session = None if token is None else self._find(token, by_stream=True)
        if not _accepts(request, _JSON, _STREAM):
            raise _refused(Reason.NOT_ACCEPTABLE, f"accept {_JSON} and {_STREAM}")
        if _media_type(request) != _JSON:
            raise _refused(Reason.UNSUPPORTED_MEDIA_TYPE, f"send {_JSON}")
        try:
            data = one_line(await request.body())
            envelope = peek(data)
        except MalformedError as error:
            raise _refused(Reason.MALFORMED, str(error)) from None
        if revision is not None and revision not in STREAM_VIEW:
            return Response(unsupported_version(envelope.id, revision), 400, media_type=_JSON)
        if session is None and envelope.method == "initialize" and envelope.kind is Kind.REQUEST:
            session, revision = self._new(by_stream=True), requested_revision(data)
        if session is None:
            raise _refused(Reason.MALFORMED, "Mcp-Session-Id is missing: initialize first")
        try:
            reader = session.call(data, envelope, primed=primes(revision))
        except RefusedError as error:
            told = error.refusal.error()
            body = error_response(envelope.id, told["code"], told["message"], told["data"])
            return Response(body, error.refusal.row.status, media_type=_JSON)
        return Response(status_code=202) if reader is None else _Events(self, session, reader)

    async def _get(self, request: Request) -> Response | _Events:
        return await self._listen(self._find(_needed(request), by_stream=True), request)

    async def _delete(self, request: Request) -> Response:
        session = self._find(_needed(request), by_stream=True)
        session.end(Reason.SESSION_ENDED, Reason.SESSION_ENDED.value)
        return Response(status_code=204)


class _Events:
    """An event stream, as an ASGI response."""

    def __init__(self, server: _Server, session: NaiveSession, reader: Reader) -> None:
        self._server, self._session, self._reader = server, session, reader

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        async def write(data: bytes, more: bool = True) -> None:
            async with self._server.turn:
                await send({"type": "http.response.body", "body": data, "more_body": more})

        async def deliver() -> None:
            head = [(b"content-type", _STREAM.encode()), (b"cache-control", b"no-store")]
            if self._session.by_stream:
                head.append((b"mcp-session-id", self._session.token.encode()))
            await send({"type": "http.response.start", "status": 200, "headers": head})
            await self._session.deliver(self._reader, write)
            await write(b"", more=False)

        async def gone() -> None:
            while (await receive())["type"] != "http.disconnect":
                pass

        try:
            await _first(deliver(), gone())
        finally:
            self._session.detach(self._reader)


async def _first(*work: Coroutine[Any, Any, Any]) -> Any:
    """What the first to finish returns; the others are cancelled."""
    tasks = [asyncio.create_task(each) for each in work]
    try:
        done, _ = await asyncio.wait(tasks, return_when=asyncio.FIRST_COMPLETED)
        return next(iter(done)).result()
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)


async def _read(session: NaiveSession, reader: Reader, websocket: WebSocket) -> int | None:
    """Read a socket until it goes, or must be closed: the code."""
    process, hole = _process(websocket), -1
    while (message := await websocket.receive())["type"] != "websocket.disconnect":
        if not session.heard(reader):
            continue
        if message.get("text") is None:
            return refusal.CLOSE_UNSUPPORTED_DATA
        decoder = BlockDecoder(_FRAME)
        try:
            blocks = decoder.feed(message["text"].encode())
        except MalformedError:
            return refusal.CLOSE_MALFORMED
        if decoder.pending:
            return refusal.CLOSE_MALFORMED
        for block in blocks:
            data = block.data or b""
            try:
                if block.event == "message":
                    session.take(process, _number(block.id), data)
                    session.tell(reader, "received", {"received": session.received})
                elif block.event == "cursor-ack":
                    cursor = session.parse(str(msgspec.json.decode(data, type=dict[str, Any]).get("cursor")))
                    session.prove(cursor)
                    session.ack_on(reader, cursor)
            except msgspec.DecodeError:
                return refusal.CLOSE_MALFORMED
            except RefusedError as error:
                reason = error.refusal.reason
                if block.event == "cursor-ack" and reason is not Reason.CURSOR_EVICTED:
                    return error.refusal.row.close
                if reason is Reason.MESSAGE_GAP and hole != session.received:
                    hole = session.received
                    session.tell(reader, "received", {"received": hole, "resend": True})
                elif block.event == "message" and reason is not Reason.MESSAGE_GAP:
                    body = {"n": _number(block.id), "reason": reason.value, "error": error.refusal.error()}
                    session.tell(reader, "refused", body)
    return None


# Requests and refusals --------------------------------------------------------------------------------


def _refused(reason: Reason, message: str) -> RefusedError:
    return RefusedError(Refusal(reason, message))


async def _refuse(connection: Any, error: Any) -> Any:
    told: Refusal = error.refusal
    headers = {"Upgrade": "websocket", "Sec-WebSocket-Protocol": _SUBPROTOCOL}
    headers = headers if told.reason is Reason.UPGRADE_UNAVAILABLE else {}
    response = Response(told.body(), told.row.status, headers, media_type=_JSON)
    if isinstance(connection, Request):
        return response
    await connection.send_denial_response(response)
    with suppress(TimeoutError):
        async with asyncio.timeout(0.2):  # uvicorn logs an error if this ends before the peer is gone
            while True:
                await connection._receive()
    return None


async def _nobody(connection: Any, error: Any) -> Any:
    return Response(status_code=400)  # the client went before its request was whole


def _needed(request: Request) -> str:
    token = request.headers.get("mcp-session-id")
    if token is None:
        raise _refused(Reason.MALFORMED, "Mcp-Session-Id is missing")
    return token


async def _object(session: NaiveSession, request: Request) -> dict[str, Any]:
    try:
        return msgspec.json.decode(await request.body(), type=dict[str, Any])
    except (msgspec.DecodeError, UnicodeDecodeError) as error:
        raise session.refused(Reason.MALFORMED, str(error)) from None


def _number(text: str | None) -> int | None:
    return int(text) if text is not None and _NUMBER.fullmatch(text) else None


def _process(connection: HTTPConnection) -> str | None:
    return connection.headers.get("mcp-client") or connection.query_params.get("client")


def _media_type(request: Request) -> str:
    return request.headers.get("content-type", "").partition(";")[0].strip().lower()


def _accepts(request: Request, *types: str) -> bool:
    named = {
        part.partition(";")[0].strip().lower() for part in request.headers.get("accept", "*/*").split(",")
    }
    return all(t in named or "*/*" in named or t.partition("/")[0] + "/*" in named for t in types)
