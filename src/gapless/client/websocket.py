"""The client's socket: the handshake, one reader, one writer; never waits for a close."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Sequence
from contextlib import aclosing
from typing import Final
from urllib.parse import urlencode

import httpx2
from websockets.asyncio.client import ClientConnection, connect
from websockets.exceptions import ConnectionClosed, InvalidHandshake, InvalidStatus, InvalidURI
from websockets.typing import Subprotocol

from gapless.client.http import SUBPROTOCOL, decimal, refused
from gapless.client.network import Network
from gapless.errors import MalformedError, TooLargeError
from gapless.protocol.block import BLOCK_OVERHEAD, Block, BlockDecoder
from gapless.protocol.cursor import EventId
from gapless.protocol.moves import Failed, Input, SocketClosed, SocketOpened

__all__ = ["Socket", "knock"]

_ECHO: Final = "X-MCP-Resume-Cursor"
_BROKEN: Final = 1006
_FRAME: Final = 64 * 1024
"""Bytes of blocks that a server may put into one frame beside its largest message."""


class Socket:
    """A bound socket. Frames are written in order; `abort` drops it without asking the peer."""

    def __init__(self, connection: ClientConnection) -> None:
        self._connection = connection
        self._frames: asyncio.Queue[str | None] = asyncio.Queue()

    def send(self, frame: bytes) -> None:
        """Write a frame after those before it. What is unsent when the socket goes is resent later (L6)."""
        self._frames.put_nowait(frame.decode())

    def abort(self) -> None:
        """Drop the socket at once; whoever writes to it ends."""
        self._connection.transport.abort()
        self._frames.put_nowait(None)

    async def write(self) -> None:
        """Write frames until cancelled, or the socket is gone."""
        try:
            while (frame := await self._frames.get()) is not None:
                await self._connection.send(frame)
        except ConnectionClosed:
            return  # the reader says so

    async def read(
        self,
        attempt: int,
        limit: int,
        put: Callable[[Input], None],
        read: Callable[[int, Sequence[Block | None]], Awaitable[None]],
    ) -> None:
        """Put in what arrives, until the socket closes."""
        code, reason = _BROKEN, ""
        try:
            while True:
                frame = await self._connection.recv(decode=False)
                await read(attempt, BlockDecoder(limit + BLOCK_OVERHEAD).feed(frame))
        except ConnectionClosed as closed:
            if closed.rcvd is not None:
                code, reason = closed.rcvd.code, closed.rcvd.reason
        except (MalformedError, TooLargeError):
            self.abort()
        put(SocketClosed(attempt, code, reason))


async def knock(
    url: str,
    process: str,
    attempt: int,
    cursor: EventId,
    ticket: str | None,
    *,
    limit: int,
    network: Network,
    put: Callable[[Input], None],
) -> Socket | None:
    """The WebSocket handshake: in one step, or with a ticket. What came of it is put in (§6).

    Whatever authorizes requests authorizes it: it is offered the handshake as a GET, and its answer.
    """
    ours = {"Mcp-Client": process} | ({"Last-Event-ID": str(cursor)} if ticket is None else {})
    if ticket is not None:
        url += "?" + urlencode({"ticket": ticket, "cursor": str(cursor)})
    request = httpx2.Request("GET", url, headers={**network.headers, **ours})
    plain = {name.lower() for name in httpx2.Request("GET", url).headers}
    try:
        async with aclosing(network.auth.async_auth_flow(request)) as flow:
            asked = await anext(flow)
            while True:
                if asked.url != request.url:  # what authorizes needs to know something first
                    response = await network.client.send(asked, auth=None)
                else:
                    headers = [item for item in asked.headers.multi_items() if item[0].lower() not in plain]
                    try:
                        connection = await _connect(str(asked.url), headers, limit, network)
                        break
                    except InvalidStatus as error:
                        answer = error.response
                        body, raw = bytes(answer.body or b""), list(answer.headers.raw_items())
                        response = httpx2.Response(
                            answer.status_code, headers=raw, content=body, request=asked
                        )
                try:
                    asked = await flow.asend(response)
                except StopAsyncIteration:
                    retry_after = response.headers.get("Retry-After")
                    put(refused(attempt, response.status_code, response.content, retry_after))
                    return None
    except (InvalidHandshake, InvalidURI, OSError, TimeoutError, EOFError, httpx2.HTTPError) as error:
        put(Failed(attempt, f"the handshake failed: {str(error) or type(error).__name__}"))
        return None
    if connection.subprotocol != SUBPROTOCOL or connection.response is None:
        connection.transport.abort()
        put(Failed(attempt, "the 101 names no subprotocol of ours"))
        return None
    echo = next(iter(connection.response.headers.get_all(_ECHO)), None)
    put(SocketOpened(attempt, decimal(echo)))
    return Socket(connection)


async def _connect(
    url: str, headers: list[tuple[str, str]], limit: int, network: Network
) -> ClientConnection:
    proxy = network.proxy
    return await connect(
        url.replace("http", "ws", 1),
        subprotocols=[Subprotocol(SUBPROTOCOL)],
        additional_headers=headers,
        compression=None,
        open_timeout=network.answer_timeout,
        ping_interval=None,
        max_size=limit + BLOCK_OVERHEAD + _FRAME,
        ssl=network.tls,
        proxy=True if proxy is None else (None if proxy is False else proxy),
    )
