"""An HTTP server that a test plays: it sees each request as it was written, and writes each answer itself."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncGenerator
from contextlib import asynccontextmanager, suppress
from typing import Any, Final

import pytest

from gapless.backends import upstream
from gapless.backends.base import Backend
from gapless.backends.http import HttpBackends
from gapless.protocol.jsonrpc import RequestId, peek
from tests.backends.conftest import Recorder, soon

__all__ = [
    "REVISION",
    "SECRET",
    "SESSION",
    "Exchange",
    "UpstreamServer",
    "World",
    "block",
    "error_of",
    "note",
    "result",
    "unknown",
    "upstream_world",
]

REVISION: Final = "2025-11-25"
SESSION: Final = "the session"
SECRET: Final = "Bearer open sesame"

_PHRASES: Final = {
    200: "OK",
    202: "Accepted",
    404: "Not Found",
    405: "Method Not Allowed",
    502: "Bad Gateway",
}


def block(message: Any = None, id: str | None = None, retry: int | None = None) -> bytes:
    """An event; without a message, one that only primes."""
    lines = [b""] if message is None else [json.dumps(message).encode()]
    text = b"".join(b"data: " + line + b"\n" for line in lines)
    text += b"" if id is None else f"id: {id}\n".encode()
    text += b"" if retry is None else f"retry: {retry}\n".encode()
    return text + b"\n"


class Exchange:
    """A request, and the way to answer it."""

    def __init__(
        self, method: str, path: str, headers: dict[str, str], body: bytes, writer: asyncio.StreamWriter
    ) -> None:
        self.method = method
        self.path = path
        self.headers = headers
        self.body = body
        self.gone = asyncio.Event()
        """Set once its client has closed the connection."""
        self._writer = writer

    @property
    def message(self) -> dict[str, Any]:
        """What was POSTed."""
        return json.loads(self.body)

    async def answer(self, status: int, body: bytes = b"", **headers: str) -> None:
        """A whole answer. Underscores in names stand for hyphens."""
        head = f"HTTP/1.1 {status} {_PHRASES.get(status, 'Whatever')}\r\nContent-Length: {len(body)}\r\n"
        await self.write(head.encode() + _lines(headers) + b"\r\n" + body)

    async def json(self, message: Any, status: int = 200, **headers: str) -> None:
        """An answer in JSON."""
        body = message if isinstance(message, bytes) else json.dumps(message).encode()
        await self.answer(status, body, content_type="application/json", **headers)

    async def result(self, **headers: str) -> None:
        """An empty result."""
        await self.json(result(self.message["id"]), 200, **headers)

    async def stream(self, *blocks: bytes, **headers: str) -> None:
        """Begin an event stream, which ends with its connection."""
        head = b"HTTP/1.1 200 OK\r\nContent-Type: text/event-stream\r\nConnection: close\r\n"
        await self.write(head + _lines(headers) + b"\r\n" + b"".join(blocks))

    async def write(self, data: bytes) -> None:
        """Write bytes as they are."""
        self._writer.write(data)
        await soon(self._writer.drain())

    async def end(self) -> None:
        """Close the connection in order."""
        self._writer.close()

    def drop(self) -> None:
        """Reset it."""
        self._writer.transport.abort()


def _lines(headers: dict[str, str]) -> bytes:
    return "".join(f"{name.replace('_', '-')}: {value}\r\n" for name, value in headers.items()).encode()


class UpstreamServer:
    """Listens on a port of its own."""

    def __init__(self) -> None:
        self.port = 0
        self.indulgent = False
        """Whether it answers everything with 200 by itself."""
        self._exchanges: asyncio.Queue[Exchange] = asyncio.Queue()
        self._server: asyncio.Server | None = None
        self._writers: set[asyncio.StreamWriter] = set()

    @property
    def url(self) -> str:
        """Of its endpoint, with something in its query that nobody is to see."""
        return f"http://127.0.0.1:{self.port}/mcp?key=sesame"

    async def start(self) -> None:
        """Listen; on the same port, if it has listened before."""
        self._server = await asyncio.start_server(self._serve, "127.0.0.1", self.port, limit=2**24)
        self.port = self._server.sockets[0].getsockname()[1]

    async def stop(self) -> None:
        """Listen no more, and reset every connection."""
        if self._server is not None:
            self._server.close()
            for writer in self._writers:
                writer.transport.abort()
            await soon(self._server.wait_closed())
            self._server = None

    async def next(self, method: str = "POST") -> Exchange:
        """The next request, which must be of that method."""
        exchange = await soon(self._exchanges.get())
        assert exchange.method == method, (exchange.method, exchange.body)
        return exchange

    @property
    def quiet(self) -> bool:
        """Whether no request waits for its answer to be begun."""
        return self._exchanges.empty()

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self._writers.add(writer)
        last: Exchange | None = None
        with suppress(asyncio.IncompleteReadError, ConnectionError):
            while True:
                head = (await reader.readuntil(b"\r\n\r\n")).decode()
                first, *lines = head.split("\r\n")[:-2]
                method, path, _ = first.split(" ")
                headers = {name.lower(): value for name, value in (line.split(": ", 1) for line in lines)}
                body = await reader.readexactly(int(headers.get("content-length", "0")))
                last = Exchange(method, path, headers, body, writer)
                if self.indulgent:
                    await last.answer(200)
                else:
                    self._exchanges.put_nowait(last)
        if last is not None:
            last.gone.set()
        self._writers.discard(writer)
        writer.close()


class World:
    """An upstream server, a session on it, and what that session says."""

    def __init__(self, server: UpstreamServer, backend: Backend, sink: Recorder) -> None:
        self.server, self.backend, self.sink = server, backend, sink

    def say(self, id: RequestId | None = None, method: str = "tools/call", **more: Any) -> asyncio.Task[None]:
        """Send a message; done when the backend has taken it."""
        message = {"jsonrpc": "2.0", "method": method, "params": more}
        return self.send(message if id is None else {**message, "id": id})

    def send(self, message: dict[str, Any]) -> asyncio.Task[None]:
        data = json.dumps(message).encode()
        return asyncio.create_task(self.backend.send(data, peek(data)))

    async def call(self, id: RequestId, method: str = "tools/call", **more: Any) -> Exchange:
        """Send a request; how it arrives."""
        sending = self.say(id, method, **more)
        exchange = await self.server.next()
        await soon(sending)
        assert exchange.message["id"] == id
        return exchange

    async def listen(self) -> Exchange:
        """Say that the session is initialized; the GET that follows, not answered yet."""
        saying = self.say(method="notifications/initialized")
        await (await self.server.next()).answer(202)
        listening = await self.server.next("GET")
        self.listening = saying
        return listening

    async def shake(self, session: str | None = SESSION) -> None:
        """The handshake, with a server that offers no standalone stream."""
        saying = self.say("hello", "initialize", protocolVersion=REVISION)
        exchange = await self.server.next()
        answer = result("hello", protocolVersion=REVISION)
        await exchange.json(answer, 200, **({} if session is None else {"mcp_session_id": session}))
        await soon(saying)
        assert await self.sink.next() == answer
        if session is None:
            saying = self.say(method="notifications/initialized")
            await (await self.server.next()).answer(202)
        else:
            await (await self.listen()).answer(405)
            saying = self.listening
        await soon(saying)


def result(id: RequestId, **value: Any) -> dict[str, Any]:
    return {"jsonrpc": "2.0", "id": id, "result": value}


def note(method: str = "notifications/message", **params: Any) -> dict[str, Any]:
    return {"jsonrpc": "2.0", "method": method, "params": params}


async def error_of(world: World, id: RequestId) -> dict[str, Any]:
    """The error that a request is answered with, next."""
    message = await world.sink.next()
    assert message["id"] == id
    return message["error"]


async def unknown(world: World, id: RequestId) -> str:
    """That a request is answered with `outcome-unknown` next; in which words."""
    error = await error_of(world, id)
    assert error["data"]["reason"] == "outcome-unknown"
    assert error["message"].endswith("; the outcome is unknown")
    return error["message"]


@asynccontextmanager
async def upstream_world(sink: Recorder, monkeypatch: pytest.MonkeyPatch) -> AsyncGenerator[World]:
    """A world before the handshake. Nothing in it is waited for longer than need be."""
    monkeypatch.setattr(upstream, "_RETRY", 0.01)
    server = UpstreamServer()
    await server.start()
    backends = HttpBackends(server.url, headers={"Authorization": SECRET}, max_message_bytes=2000)
    await backends.start()
    backend = await backends.open(sink)
    yield World(server, backend, sink)
    server.indulgent = True
    await soon(backend.close())
    await backends.close()
    await server.stop()
