"""Gapless in front of a server that wants authorization, letting in whom that server lets in.

`gapless serve --upstream` has one credential for its server, and whom it lets in itself is its own affair.
A judge of how a client authorizes has to see the client's own tokens. So each message is taken to the
server first, with the token that it came with. If the server refuses it, the client is refused: with that
status, in the words of our protocol, and with the server's `WWW-Authenticate`. If not, Gapless gets the
message, and from us, in the place of the server, the answer that there already is: the server hears it once.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator
from contextlib import asynccontextmanager
from typing import Final

import httpx2
from starlette.datastructures import Headers
from starlette.requests import Request
from starlette.responses import Response
from starlette.types import Message, Receive, Scope, Send

import gapless
from gapless.protocol.block import BlockDecoder
from gapless.protocol.media import JSON, STREAM, media_type
from gapless.protocol.refusal import Reason, Refusal
from gapless.server.wire import refuse
from tests.server.harness import Uvicorn, listening

__all__ = ["Gatekeeper", "guarding"]

_UPSTREAM: Final = "/upstream"
_LARGEST: Final = 4 * 1024 * 1024
_REASONS: Final = {401: Reason.UNAUTHENTICATED, 403: Reason.INSUFFICIENT_SCOPE}
_PASSED: Final = ("content-type", "mcp-session-id")


class Gatekeeper:
    """The ASGI application: the way in, and what Gapless takes for the server.

    What carries no message (the opening, the event stream, the handshake) is let in with a token that the
    server has taken before; with another, the server is asked with an empty message.

    Attributes:
        held: by message, what the server has answered that Gapless has not asked it yet.
        heard: the messages that the server has taken.
        handshakes: how many were let in.
    """

    def __init__(self, server: str, port: int) -> None:
        self._server = server
        self._gapless = gapless.asgi(f"http://127.0.0.1:{port}{_UPSTREAM}", log="memory:")
        self._client = httpx2.AsyncClient(timeout=httpx2.Timeout(10.0), verify=False)
        self._asking = asyncio.Lock()
        self._taken: dict[str, None] = {}  # in order: the last is what the server hears from Gapless
        self.held: dict[bytes, httpx2.Response] = {}
        self.heard: list[bytes] = []
        self.handshakes = 0

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] == "lifespan":
            await self._gapless(scope, receive, send)
        elif scope["path"] == _UPSTREAM:
            response = await self._answer(Request(scope, receive))
            await response(scope, receive, send)
        else:
            await self._guard(scope, receive, send)

    async def close(self) -> None:
        """Close what is open to the server."""
        await self._client.aclose()

    async def _guard(self, scope: Scope, receive: Receive, send: Send) -> None:
        headers = Headers(scope=scope)
        if scope["type"] == "http" and scope["path"].endswith("/messages"):
            body = await Request(scope, receive).body()
            receive = _again(body, receive)
            messages = _messages(headers, body)
        else:
            messages = [b""]
        answer = await self._refused(messages, headers.get("authorization", ""))
        if answer is None:
            self.handshakes += scope["type"] == "websocket"
            await self._gapless(scope, receive, send)
            return
        refusal = Refusal(_REASONS[answer.status_code], "so says the server")
        told = {name: answer.headers[name] for name in ("www-authenticate",) if name in answer.headers}
        await refuse(scope, receive, send, refusal, told)

    async def _refused(self, messages: list[bytes], token: str) -> httpx2.Response | None:
        """The server's refusal of one of these, if it does not take them."""
        sent = {"Accept": f"{JSON}, {STREAM}", "Content-Type": JSON, **_authorization(token)}
        async with self._asking:
            for message in messages:
                if message in self.held or (not message and token in self._taken):
                    continue
                answer = await self._client.post(self._server, content=message, headers=sent)
                if answer.status_code in _REASONS:
                    return answer
                if message:
                    self.held[message] = answer
                    self.heard.append(message)
                self._taken.pop(token, None)
                self._taken[token] = None
        return None

    async def _answer(self, request: Request) -> Response:
        """What the server says to Gapless: what it has said already, or says now to the last token."""
        message = await request.body()
        answer = self.held.pop(message, None)
        if answer is None:
            kept = ("accept", "content-type", "mcp-protocol-version", "mcp-session-id")
            sent = {name: value for name, value in request.headers.items() if name in kept}
            token = next(reversed(self._taken), "")
            answer = await self._client.request(
                request.method, self._server, content=message, headers=sent | _authorization(token)
            )
            self.heard.append(message)
        passed = {name: answer.headers[name] for name in _PASSED if name in answer.headers}
        return Response(answer.content, answer.status_code, passed)


@asynccontextmanager
async def guarding(server: str) -> AsyncGenerator[tuple[str, Gatekeeper]]:
    """Run one in front of the server at that URL: its own URL, and the gatekeeper."""
    sock = listening()
    port = sock.getsockname()[1]
    keeper = Gatekeeper(server, port)
    runner = Uvicorn(keeper, sock)
    await runner.start()
    try:
        yield f"http://127.0.0.1:{port}/mcp", keeper
    finally:
        await runner.stop()
        await keeper.close()


def _authorization(token: str) -> dict[str, str]:
    return {"Authorization": token} if token else {}


def _messages(headers: Headers, body: bytes) -> list[bytes]:
    if media_type(headers) != STREAM:
        return [body]
    return [block.data or b"" for block in BlockDecoder(_LARGEST).feed(body)]


def _again(body: bytes, receive: Receive) -> Receive:
    """A body that was read, to be read once more."""
    parts: list[Message] = [{"type": "http.request", "body": body, "more_body": False}]

    async def receive_again() -> Message:
        return parts.pop() if parts else await receive()

    return receive_again
