"""Requests for a session that another process owns: passed on to that process, and its answers back (N1).

What travels is not HTTP but the messages of ASGI. The passing process sends its scope, then whatever
its `receive` yields; the owner runs its own application with that, and what the application sends
travels back. So requests, event streams, WebSockets and denials are all carried by the same few
lines, and each side waits for the other as it would wait for a client: a position stays a number.

A frame is a length, 4 bytes, big-endian, and one message in msgpack. The owner says that it has said
all by closing its direction. If either process dies, the kernel tells the other.
"""

from __future__ import annotations

import asyncio
import logging
import os
import secrets
import socket
import stat
import tempfile
from collections import deque
from contextlib import suppress
from enum import Enum
from typing import Any, Final

import msgspec
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from gapless.errors import TooLargeError
from gapless.protocol.refusal import CLOSE_RESTART, Reason, Refusal
from gapless.server.wire import refuse, respond

__all__ = ["RELAYED", "Doorway", "Reach", "bury", "pass_on", "reachable"]

RELAYED: Final = "gapless.relayed"
"""True in a scope that came from another process, and that is therefore not passed on again."""

_log: Final = logging.getLogger("gapless.relay")
_SLACK: Final = 1024 * 1024
"""Bytes that a frame may hold beside the largest message: headers, or what a server reads at once."""
_LONGEST: Final = 100
"""Bytes of a socket's path; systems differ in whether 104 or 108 is too much."""
_IN_TEMP: Final = "door.sock"
_BACKLOG: Final = 2048
_PATIENCE: Final = 1.0
"""Seconds that a client may take to be told the end of what was cut."""
_GONE: Final[dict[str, Message]] = {
    "http": {"type": "http.disconnect"},
    "websocket": {"type": "websocket.disconnect", "code": 1006},
}
_PLAIN: Final = (
    *("type", "asgi", "http_version", "method", "scheme", "path", "raw_path", "root_path"),
    *("query_string", "subprotocols", "client", "server"),
)


class Reach(Enum):
    """Whether a process listens at an address. `DEAD`: it was killed, for who closes removes its file."""

    LISTENS = "listens"
    DEAD = "dead"
    UNKNOWN = "unknown"


class _Link:
    """A connection between two processes, as messages."""

    def __init__(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter, limit: int) -> None:
        self._reader, self._writer = reader, writer
        self._limit = limit + _SLACK
        self._size: int | None = None

    async def get(self) -> Message | None:
        """The next message; `None` if no more come. Cancelled, it loses nothing, not even within a frame."""
        try:
            if self._size is None:
                self._size = int.from_bytes(await self._reader.readexactly(4), "big")
            if self._size > self._limit:
                return None
            data = await self._reader.readexactly(self._size)
            self._size = None
            return msgspec.msgpack.decode(data, type=dict[str, Any])
        except (asyncio.IncompleteReadError, OSError, msgspec.DecodeError):
            return None

    async def put(self, message: Message) -> None:
        """Write a message, and wait until the other side takes more.

        Raises:
            TooLargeError: nothing was written. OSError: the other side is gone.
        """
        data = msgspec.msgpack.encode(message)
        if len(data) > self._limit:
            raise TooLargeError(f"a {message['type']} of {len(data)} bytes")
        if self._writer.is_closing():
            raise ConnectionResetError  # uvloop would raise a RuntimeError
        # In one piece: asyncio's `writelines` has forgotten to hold back, in some versions.
        self._writer.write(len(data).to_bytes(4, "big") + data)
        await self._writer.drain()

    async def finish(self) -> None:
        """Say that no more comes, and wait until the other side has read all and goes.

        To close at once would lose an answer while its request's body is still being written.
        """
        if self._writer.is_closing():
            return
        with suppress(OSError):
            self._writer.write_eof()
            while await self._reader.read(64 * 1024):
                pass

    def cut(self) -> None:
        """Close at once."""
        self._writer.transport.abort()


# The owner -----------------------------------------------------------------------------------------


class Doorway:
    """Where an owner lets in what other processes pass on to it.

    Args:
        app: what is run for each exchange; `scope["gapless.relayed"]` is true there.
        limit: bytes of the largest WebSocket message, either way.
    """

    def __init__(self, app: ASGIApp, limit: int) -> None:
        self._app = app
        self._limit = limit
        self._address = ""
        self._server: asyncio.Server | None = None
        self._running: set[asyncio.Task[None]] = set()

    async def open(self, near: str | None) -> str:
        """Listen, beside `near` if there is room for the path, else in a directory of its own.

        Nobody but this user can connect, at any time. Returns the address.

        Raises:
            OSError: there can be no socket there.
        """
        listening, self._address = _bind(near)
        self._server = await asyncio.start_unix_server(self._accept, sock=listening, backlog=_BACKLOG)
        return self._address

    async def close(self) -> None:
        """Remove the socket, and cut what still runs. Idempotent."""
        if self._server is None:
            return
        server, self._server = self._server, None
        # First the file: one that is there and refuses is a dead process's, and we are still alive.
        _remove(self._address)
        server.close()
        for task in self._running:
            task.cancel()
        await asyncio.gather(*self._running, return_exceptions=True)

    def _accept(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        link = _Link(reader, writer, self._limit)
        if self._server is None:
            link.cut()  # accepted while we closed
            return
        task = asyncio.create_task(self._serve(link))
        self._running.add(task)
        task.add_done_callback(self._running.discard)
        task.add_done_callback(lambda _: link.cut())  # even if it was cancelled before it began

    async def _serve(self, link: _Link) -> None:
        scope = await link.get()
        if scope is not None:
            await self._run(scope, link)
            await link.finish()

    async def _run(self, scope: Scope, link: _Link) -> None:
        """Run the application as a server does: what it fails to answer is answered, with an error."""
        scope["extensions"] = {name: {} for name in scope["extensions"]}
        scope[RELAYED] = True
        answered = gone = False

        async def receive() -> Message:
            nonlocal gone
            message = await link.get()
            if message is None:
                if gone:
                    await asyncio.Event().wait()  # it was told; to tell it for ever would keep the loop busy
                message = _GONE[scope["type"]]
            gone = gone or message["type"].endswith(".disconnect")
            return message

        async def send(message: Message) -> None:
            nonlocal answered
            answered = True
            try:
                await link.put(message)
            except OSError as error:
                raise _PeerGoneError from error

        try:
            await self._app(scope, receive, send)
        except _PeerGoneError:
            return
        except Exception:
            _log.exception("an exchange that was passed on has failed")
        if answered or gone:
            return
        with suppress(_PeerGoneError):
            if scope["type"] == "http":
                await respond(send, 500, b"")
            else:
                await send({"type": "websocket.close", "code": 1011})


class _PeerGoneError(OSError):
    """What an application is told that sends to a client who is gone; in ASGI that is an OSError."""


def _bind(near: str | None) -> tuple[socket.socket, str]:
    address = "" if near is None else f"{os.path.abspath(near)}-{secrets.token_hex(4)}.sock"
    if near is None or len(os.fsencode(address)) > _LONGEST:
        address = os.path.join(tempfile.mkdtemp(prefix="gapless-"), _IN_TEMP)
    listening = socket.socket(socket.AF_UNIX)
    try:
        listening.bind(address)
        os.chmod(address, 0o600)  # before it listens: until then it lets nobody in, whatever its mode
    except OSError:
        if listening.getsockname():  # it is bound, so what is there is ours
            _remove(address)
        listening.close()
        raise
    return listening, address


def _remove(address: str) -> None:
    with suppress(OSError):
        if stat.S_ISSOCK(os.lstat(address).st_mode):
            os.unlink(address)
            if os.path.basename(address) == _IN_TEMP:
                os.rmdir(os.path.dirname(address))


async def reachable(address: str) -> Reach:
    """Whether a process listens at an address."""
    try:
        _, writer = await asyncio.open_unix_connection(address)
    except ConnectionRefusedError:
        return Reach.DEAD
    except OSError:
        return Reach.UNKNOWN
    writer.transport.abort()
    return Reach.LISTENS


async def bury(address: str) -> None:
    """Remove the socket that a dead process has left; anything else stays, and nothing is raised."""
    _remove(address)


# The passing process -------------------------------------------------------------------------------


async def pass_on(
    address: str,
    scope: Scope,
    receive: Receive,
    send: Send,
    *,
    given_up: asyncio.Future[Any],
    limit: int,
) -> Receive | None:
    """Have the owner at `address` serve an exchange.

    If the owner goes, or is given up, before its first answer, somebody else may serve the exchange:
    what it had been sent is kept for that, up to `limit` bytes of body. Of a longer body, and of a
    scope or message too large for a frame, nothing is kept: the client is refused with 503. The owner
    may have acted on what it was sent; the log knows. If it goes later, what it has begun is ended: a
    response with an empty body, a WebSocket with 1012. A response that says how long it is has not begun
    before its body comes.

    Args:
        given_up: done when the owner is not to be waited for any longer.
        limit: bytes of the largest WebSocket message, either way.

    Returns:
        `None` when the exchange is over; or else a `receive` by which to serve it.
    """
    passage = _Passage(scope, receive, send, limit)
    if not given_up.done():
        try:
            reader, writer = await asyncio.open_unix_connection(address)
        except OSError:
            return receive
        await passage.carry(_Link(reader, writer, limit), given_up)
    return await passage.conclude()


class _Passage:
    """One exchange that is passed on."""

    def __init__(self, scope: Scope, receive: Receive, send: Send, limit: int) -> None:
        self._scope, self._receive, self._send = scope, receive, send
        self._taken: deque[Message] | None = deque()
        """What was received, while it may have to be received again; `None`: it is too late for that."""
        self._spare = limit
        self._answered = False
        self._end: Message | None = None
        """What ends the answer that has begun."""
        self._gone = False
        """Whether the client is."""

    async def carry(self, link: _Link, given_up: asyncio.Future[Any]) -> None:
        """Pass messages both ways, until the owner has said all, goes, or is given up."""
        there, back = asyncio.create_task(self._bring(link)), asyncio.create_task(self._fetch(link))
        try:
            await asyncio.wait({back, given_up}, return_when=asyncio.FIRST_COMPLETED)
        finally:
            there.cancel()
            back.cancel()
            await asyncio.gather(there, back, return_exceptions=True)
            link.cut()  # to the owner's application, if it still runs, its client is gone

    async def conclude(self) -> Receive | None:
        """What is left to do; a `receive` if that is everything."""
        if self._gone:
            return None
        if self._end is not None:
            with suppress(Exception):  # whoever does not take it is cut
                async with asyncio.timeout(_PATIENCE):
                    await self._send(self._end)
        elif self._taken is not None:
            return self._again
        elif not self._answered:
            text = "the process that serves this session does not answer"
            await refuse(self._scope, self._receive, self._send, Refusal(Reason.LIMIT, text))
        return None

    async def _again(self) -> Message:
        return self._taken.popleft() if self._taken else await self._receive()

    async def _take(self) -> Message:
        message = await self._receive()
        if self._taken is not None:
            self._taken.append(message)
            self._spare -= len(message.get("body", b""))
            if self._spare < 0:
                self._taken = None
        self._gone = self._gone or message["type"].endswith(".disconnect")
        return message

    async def _bring(self, link: _Link) -> None:
        """What comes from the client."""
        try:
            await link.put(_portable(self._scope))
            while not self._gone:
                await link.put(await self._take())
        except Exception as error:
            if not isinstance(error, OSError):  # that is the owner, gone
                _log.warning("what a client sends cannot be passed on: %s", error)
                self._taken = None
            link.cut()

    async def _fetch(self, link: _Link) -> None:
        """What comes from the owner.

        An answer that says how long it is goes out with its body: without that it could not be ended.
        """
        begun: list[Message] = []
        while (message := await link.get()) is not None:
            begun.append(message)
            kind, _, part = message["type"].rpartition(".")
            if part == "start" and any(
                name.lower() == b"content-length" for name, _ in message.get("headers", ())
            ):
                continue
            self._answered, self._taken = True, None
            if kind == "websocket":
                self._end = {"type": "websocket.close", "code": CLOSE_RESTART}
            else:
                self._end = {"type": f"{kind}.body", "body": b""}
            try:
                for said in begun:
                    await self._send(said)
            except Exception:  # each server has its own for a client that is gone
                self._gone = True
                return
            begun.clear()
            if part == "close" or (part == "body" and not message.get("more_body", False)):
                self._end = None


def _portable(scope: Scope) -> Message:
    """What of a scope is plain data; of its extensions, their names."""
    plain: Message = {key: scope[key] for key in _PLAIN if key in scope}
    return plain | {"headers": list(scope["headers"]), "extensions": list(scope.get("extensions") or ())}
