"""What the tests of N1–N3 share: handshakes, servers that are started again, the fresh backend's side."""

from __future__ import annotations

import hashlib
from contextlib import closing
from pathlib import Path
from typing import Any

import apsw

from gapless.log.base import SessionKey, Stored
from gapless.log.sqlite import SqliteLog
from tests.server.harness import BOTH, JSON, Scripted, Serve, Server, Session, Streams, note, request, result

__all__ = [
    "HELLO",
    "TOOLS",
    "called",
    "hold_up",
    "key_of",
    "killed",
    "logged",
    "recovered",
    "restarted",
    "says",
    "shaken",
    "stored",
]

HELLO = request(0, "initialize", protocolVersion="2025-11-25", capabilities={}, clientInfo={})
TOOLS: dict[str, Any] = {"tools": {}, "resources": {"subscribe": True}, "logging": {}}


def says(id: int | str, capabilities: dict[str, Any] | None = None, version: str = "1") -> dict[str, Any]:
    """What an MCP server answers to a handshake."""
    told = TOOLS if capabilities is None else capabilities
    about = {"name": "scripted", "version": version}
    return result(id, protocolVersion="2025-11-25", capabilities=told, serverInfo=about)


def key_of(token: str) -> SessionKey:
    """A session's key in the log."""
    return SessionKey(hashlib.sha256(token.encode()).digest())


async def stored(server: Server, session: Session | Streams) -> Stored:
    """What the server's log has of a session."""
    found = await server.log.load(key_of(session.token))
    assert found is not None
    return found


async def logged(server: Server, session: Session | Streams) -> bytes:
    """A session's events, as its log has them."""
    found = await stored(server, session)
    data, last = await server.log.read(found.key, found.floor, found.committed, 2**24)
    assert last == found.committed
    return data


async def shaken(server: Server) -> Session:
    """A session of the session view whose handshake is done: two messages, one event."""
    session = await server.open()
    assert (await session.post(1, HELLO)).status == 202
    session.backend = await server.backends.opened()
    await session.backend.take()
    await session.backend.say(says(0))
    assert (await session.post(2, note("notifications/initialized"))).status == 202
    await session.backend.take()
    return session


async def called(server: Server) -> Streams:
    """The same in the stream view."""
    streams = Streams(server, "2025-11-25")
    stream = await server.stream("POST", "/mcp", JSON | BOTH, HELLO)
    streams.token = stream.head.header("mcp-session-id")
    streams.backend = await server.backends.opened()
    await streams.backend.take()
    await streams.backend.say(says(0))
    await stream.message()
    assert await stream.end() == []
    assert (await streams.post(note("notifications/initialized"))).status == 202
    await streams.backend.take()
    return streams


async def restarted(serve: Serve, path: Path, *sessions: Session | Streams, **limits: Any) -> Server:
    """The sessions' server is stopped, and another one started on its log."""
    await serve.stop(sessions[0].server)
    server = await serve(SqliteLog(path), **limits)
    for session in sessions:
        session.server = server
    return server


async def killed(serve: Serve, path: Path, *sessions: Session | Streams, **limits: Any) -> Server:
    """The sessions' server is as good as killed: another one starts on its log as it is this moment."""
    copy = path.with_name("copy.db")
    with closing(apsw.Connection(str(path))) as source, closing(apsw.Connection(str(copy))) as target:
        with target.backup("main", source, "main") as backup:
            backup.step()
    log = SqliteLog(copy)
    await log.start()
    for owner in await log.owners():
        await log.leave(owner.id)
    await log.close()
    server = await serve(SqliteLog(copy), **limits)
    for session in sessions:
        session.server = server
    return server


async def recovered(server: Server, backend: Scripted | None = None) -> Scripted:
    """The fresh backend, once it has taken a replayed handshake."""
    backend = backend or await server.backends.opened()
    hello = await backend.take()
    assert hello["method"] == "initialize"
    await backend.emit(says(hello["id"]))
    assert (await backend.take())["method"] == "notifications/initialized"
    return backend


async def hold_up(session: Session, third: Any = None) -> None:
    """Three requests, 1 to 3, after a handshake: one is handed over, one is about to be, one comes next.

    All of them are dispatched, the latter two together, while the backends' gate was shut. Another
    message may be the third.
    """
    gate = session.server.backends.gate
    gate.clear()
    for number, message in enumerate((request(1), request(2), third or request(3)), 3):
        assert (await session.post(number, message)).status == 202
    gate.set()
    assert (await session.backend.take())["id"] == 1
    gate.clear()
    live = session.server.app.sessions._live[key_of(session.token)]
    while (await stored(session.server, session)).dispatched < 5 or len(live.carrier._dispatches) != 1:
        pass
