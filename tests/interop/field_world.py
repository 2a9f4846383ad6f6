"""What the field reports' tests have around Gapless: logs that take their time, proxies, middleware."""

from __future__ import annotations

import asyncio
import re
import socket
import sys
from collections.abc import AsyncGenerator, Callable
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

from starlette.types import ASGIApp, Message, Receive, Scope, Send

import gapless
from gapless.log.base import SessionKey
from gapless.log.memory import MemoryLog
from gapless.server.app import Settings
from gapless.torture.faults import Direction, FaultProxy, Link
from tests.server.harness import (
    BOTH,
    JSON,
    ScriptedBackends,
    Server,
    Streams,
    Uvicorn,
    listening,
    note,
    request,
)

__all__ = [
    "CHILD",
    "Holding",
    "Idle",
    "Paced",
    "Reframed",
    "Stated",
    "Unscripted",
    "behind",
    "port_of",
    "running",
]

CHILD = [sys.executable, "-I", "-S", str(Path(__file__).with_name("field_child.py"))]
"""The command of the child; a manner is to follow."""


class Paced(MemoryLog):
    """A log whose reads can be made to take their time: what they found is handed out later."""

    def __init__(self) -> None:
        super().__init__()
        self.reading = asyncio.Event()
        """Set while a read waits at the gate."""
        self.gate = asyncio.Event()
        self.gate.set()

    async def read(self, key: SessionKey, after: int, upto: int, limit: int) -> tuple[bytes, int]:
        found = await super().read(key, after, upto, limit)
        if not self.gate.is_set():
            self.reading.set()
            await self.gate.wait()
            self.reading.clear()
        return found


class Unscripted(Streams):
    """A client of the stream view by hand, of a server whose MCP server is a real one."""

    async def initialize(self) -> None:
        body = request(
            0,
            "initialize",
            protocolVersion=self.revision,
            capabilities={"elicitation": {}},
            clientInfo={"name": "by hand", "version": "1"},
        )
        stream = await self.server.stream("POST", "/mcp", JSON | BOTH, body)
        self.token = stream.head.header("mcp-session-id")
        self.answer = await stream.message()
        assert await stream.end() == []
        if "result" in self.answer:
            assert (await self.post(note("notifications/initialized"))).status == 202


@asynccontextmanager
async def running(
    backend: Any,
    log: str = "memory:",
    port: int | None = None,
    wrap: Callable[[Any], Any] | None = None,
    **limits: Any,
) -> AsyncGenerator[Server]:
    """`gapless.asgi` around a real MCP server, on a real socket, on a port of one's own if need be."""
    app = gapless.asgi(backend, log=log, settings=Settings(limits=gapless.Limits(**limits)))
    sock = listening() if port is None else _at(port)
    runner = Uvicorn(app if wrap is None else wrap(app), sock)
    server = Server(app, app.sessions.log, ScriptedBackends(), sock.getsockname()[1])
    await runner.start()
    try:
        yield server
    finally:
        for drop in server.drops:
            drop()
        await runner.stop()


def _at(port: int) -> socket.socket:
    sock = socket.socket()
    sock.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    sock.bind(("127.0.0.1", port))
    return sock


@asynccontextmanager
async def behind(port: int, on_request: Callable[[Link], None] | None = None) -> AsyncGenerator[FaultProxy]:
    """A fault proxy before a server's port."""
    proxy = FaultProxy("127.0.0.1", port, on_request)
    await proxy.start()
    try:
        yield proxy
    finally:
        await proxy.close()


def port_of(url: str) -> int:
    """The port in a URL."""
    found = re.search(r":(\d+)/", url)
    assert found is not None
    return int(found[1])


class Stated:
    """Notes the cursor of every event stream that is asked for through a proxy; then does `act`."""

    def __init__(self, act: Callable[[Link, int], None] | None = None) -> None:
        self.cursors: list[str] = []
        self.asked = asyncio.Condition()
        self._act = act
        self._tasks: set[asyncio.Task[None]] = set()

    def __call__(self, link: Link) -> None:
        if link.request.startswith("GET") and link.headers.get("accept") == "text/event-stream":
            self.cursors.append(link.headers.get("last-event-id", ""))
            if self._act is not None:
                self._act(link, len(self.cursors))
            told = asyncio.create_task(self._tell())
            self._tasks.add(told)
            told.add_done_callback(self._tasks.discard)

    async def _tell(self) -> None:
        async with self.asked:
            self.asked.notify_all()

    async def times(self, count: int) -> None:
        """Wait until so many were asked for."""
        async with asyncio.timeout(10), self.asked:
            await self.asked.wait_for(lambda: len(self.cursors) >= count)


class Idle:
    """A proxy's manner to cut a connection on which nothing has passed for a while."""

    def __init__(self, proxy: FaultProxy, seconds: float) -> None:
        self.cut = 0
        self._seconds = seconds
        self._timers: dict[int, asyncio.TimerHandle] = {}
        proxy.on_bytes = self._passed

    def _passed(self, link: Link, direction: Direction, count: int, _: str) -> None:
        timer = self._timers.pop(link.number, None)
        if timer is not None:
            timer.cancel()
        if link.open:
            loop = asyncio.get_running_loop()
            self._timers[link.number] = loop.call_later(self._seconds, self._idle, link)

    def _idle(self, link: Link) -> None:
        if link.open:
            self.cut += 1
            link.reset()

    def stop(self) -> None:
        """Cut no more."""
        for timer in self._timers.values():
            timer.cancel()


class Holding:
    """Middleware that holds a body until it is whole, unless it is told not to, as proxies do."""

    def __init__(self, app: ASGIApp, header: bytes, value: bytes) -> None:
        self._app, self._header, self._value = app, header, value

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        held: list[Message] | None = None

        async def hold(message: Message) -> None:
            nonlocal held
            if message["type"] == "http.response.start":
                found = dict(message["headers"]).get(self._header, b"")
                held = None if self._value in found else []
            if held is None:
                await send(message)
                return
            held.append(message)
            if message["type"] == "http.response.body" and not message.get("more_body"):
                for each in held:
                    await send(each)

        await self._app(scope, receive, hold)


class Reframed:
    """Middleware that writes event streams as another server might: the same events, other bytes."""

    def __init__(self, app: ASGIApp, reframe: Callable[[bytes], list[bytes]], tail: bytes = b"") -> None:
        self._app, self._reframe, self._tail = app, reframe, tail

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        events = False

        async def other(message: Message) -> None:
            nonlocal events
            if message["type"] == "http.response.start":
                events = (b"content-type", b"text/event-stream") in message["headers"]
            if not events or message["type"] != "http.response.body":
                await send(message)
                return
            for piece in self._reframe(message["body"]):
                await send({"type": "http.response.body", "body": piece, "more_body": True})
                await asyncio.sleep(0)
            if not message["more_body"]:
                await send({"type": "http.response.body", "body": self._tail, "more_body": False})

        await self._app(scope, receive, other)
