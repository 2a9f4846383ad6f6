"""What the server's tests share: real servers, raw connections, a scripted MCP server.

Everything here speaks to the server over sockets. HTTP is written and read by hand, so that a
test sees every header and every byte; WebSockets go through the `websockets` client.
"""

from __future__ import annotations

import asyncio
import json
import logging
import socket
from collections import deque
from collections.abc import Awaitable, Callable, Mapping
from contextlib import suppress
from dataclasses import dataclass, field
from functools import partial
from typing import Any, Final, TypeVar, cast

import hypercorn
import hypercorn.asyncio
import pytest
import uvicorn
from websockets.asyncio.client import ClientConnection, connect
from websockets.exceptions import ConnectionClosed, InvalidStatus
from websockets.typing import Subprotocol

from gapless.auth.base import Verifier
from gapless.backends.base import Backend, Sink
from gapless.cli.connections import Handshakes, Requests
from gapless.errors import BackendError, StorageError
from gapless.log.base import Entry, Log, OwnerId, SessionKey, Write
from gapless.log.memory import MemoryLog
from gapless.protocol.block import Block, BlockDecoder
from gapless.protocol.cursor import Link
from gapless.protocol.jsonrpc import Envelope, RequestId, peek
from gapless.protocol.refusal import Reason
from gapless.protocol.settings import Limits
from gapless.server.app import Gapless, Settings, build

T = TypeVar("T")

PATIENCE: Final = 10.0
"""Seconds after which a test that waits has failed."""

JSON: Final = {"Content-Type": "application/json"}
BLOCKS: Final = {"Content-Type": "text/event-stream"}
BOTH: Final = {"Accept": "application/json, text/event-stream"}

on_both_servers = pytest.mark.parametrize("serve", ["uvicorn", "hypercorn"], indirect=True)
"""Runs a test on uvicorn and on hypercorn; without it, on uvicorn."""


async def soon(awaitable: Awaitable[T], seconds: float = PATIENCE) -> T:
    """Its result; a test that would wait for ever fails."""
    async with asyncio.timeout(seconds):
        return await awaitable


def request(id: int | str, method: str = "tools/call", **params: Any) -> dict[str, Any]:
    """A JSON-RPC request."""
    return {"jsonrpc": "2.0", "id": id, "method": method, "params": params}


def note(method: str = "notifications/message", **params: Any) -> dict[str, Any]:
    """A JSON-RPC notification."""
    return {"jsonrpc": "2.0", "method": method, "params": params}


def result(id: int | str, **value: Any) -> dict[str, Any]:
    """A JSON-RPC result."""
    return {"jsonrpc": "2.0", "id": id, "result": value}


def encode(value: Any) -> bytes:
    """JSON on one line; bytes are taken as they are."""
    return value if isinstance(value, bytes) else json.dumps(value, separators=(",", ":")).encode()


def block_of(value: Any, number: int | str | None = None, event: str = "message") -> bytes:
    """A block as a client writes it (W2)."""
    head = b"" if number is None else f"id: {number}\n".encode()
    if event != "message":
        head += f"event: {event}\n".encode()
    return head + b"data: " + encode(value) + b"\n\n"


def seq_of(event_id: str | None) -> int:
    """The number in an event ID."""
    assert event_id is not None
    return int(event_id.partition(".")[0])


# The MCP server behind it all ----------------------------------------------------------------------


class Scripted(Backend):
    """A backend that says what the test has it say, and remembers what it was sent."""

    def __init__(self, sink: Sink, backends: ScriptedBackends) -> None:
        self._sink = sink
        self._backends = backends
        self.sent: list[bytes] = []
        self.closed = asyncio.Event()
        self._queue: asyncio.Queue[dict[str, Any]] = asyncio.Queue()

    async def send(self, data: bytes, envelope: Envelope) -> None:
        assert envelope == peek(data)
        await self._backends.gate.wait()
        if self._backends.failure is not None:
            raise self._backends.failure
        self.sent.append(data)
        self._queue.put_nowait(json.loads(data))

    async def close(self) -> None:
        self.closed.set()

    async def take(self) -> dict[str, Any]:
        """The next message that it was sent."""
        return await soon(self._queue.get())

    async def emit(self, message: Any, related: RequestId | None = None) -> None:
        """Say something; returns as a backend's emission does."""
        data = encode(message)
        full = self._sink.emit(data, peek(data), related)
        if full is not None:
            await full

    async def say(self, *messages: Any, related: RequestId | None = None) -> None:
        """Say messages, each in a commit of its own, and wait until they are durable."""
        for message in messages:
            await self.emit(message, related)
            await soon(self._sink._carrier._live.durable())  # type: ignore[attr-defined]

    async def lose(self, message: str = "it crashed", *untaken: RequestId) -> None:
        """Be gone, without having had the requests in `untaken`."""
        await self._sink.lost(message, frozenset(untaken))


class ScriptedBackends:
    """Opens scripted backends. `gate` holds back what they are sent, `failure` is raised instead."""

    spawns = False
    kind: type[Scripted] = Scripted

    def __init__(self) -> None:
        self.gate = asyncio.Event()
        self.gate.set()
        self.failure: Exception | None = None
        self.refusal: BackendError | None = None
        self.all: list[Scripted] = []
        self._new: asyncio.Queue[Scripted] = asyncio.Queue()

    async def start(self) -> None:
        pass

    async def open(self, sink: Sink) -> Backend:
        if self.refusal is not None:
            raise self.refusal
        backend = self.kind(sink, self)
        self.all.append(backend)
        self._new.put_nowait(backend)
        return backend

    async def close(self) -> None:
        pass

    async def opened(self) -> Scripted:
        """The next backend that is opened."""
        return await soon(self._new.get())


class Fragile(MemoryLog):
    """A log in memory whose commits can be held back or refused, and whose reads can fail."""

    def __init__(self) -> None:
        super().__init__()
        self.held = asyncio.Event()
        """Set while a commit waits at the gate."""
        self.gate = asyncio.Event()
        self.gate.set()
        self.full = False
        self.unreadable = False

    async def create(self, key: SessionKey, record: bytes, link: Link, owner: OwnerId | None = None) -> None:
        if self.full:
            raise StorageError("no space left")
        await super().create(key, record, link, owner)

    async def commit(self, key: SessionKey, write: Write) -> None:
        if not self.gate.is_set():
            self.held.set()
            await self.gate.wait()
            self.held.clear()
        if self.full:
            raise StorageError("no space left")
        await super().commit(key, write)

    async def read(self, key: SessionKey, after: int, upto: int, limit: int) -> tuple[bytes, int]:
        if self.unreadable:
            raise StorageError("a bad sector")
        return await super().read(key, after, upto, limit)

    async def link(self, key: SessionKey, seq: int) -> Link | None:
        if self.unreadable:
            raise StorageError("a bad sector")
        return await super().link(key, seq)

    async def entries(self, key: SessionKey, after: int, limit: int) -> tuple[Entry, ...]:
        if self.unreadable:
            raise StorageError("a bad sector")
        return await super().entries(key, after, limit)


# HTTP by hand --------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Answer:
    """A response. Header names are lower case."""

    status: int
    headers: list[tuple[str, str]]
    body: bytes = b""

    def all(self, name: str) -> list[str]:
        """Every value of a header."""
        return [value for key, value in self.headers if key == name.lower()]

    def header(self, name: str) -> str:
        """The value of a header that is there exactly once."""
        (value,) = self.all(name)
        return value

    def json(self) -> Any:
        """The body as JSON."""
        assert self.header("content-type") == "application/json", self
        return json.loads(self.body)

    @property
    def data(self) -> dict[str, Any]:
        """`data` of the refusal in the body (§8)."""
        body = self.json()
        assert body["jsonrpc"] == "2.0"
        assert isinstance(body["error"]["code"], int)
        assert body["error"]["message"]
        return body["error"]["data"]

    @property
    def reason(self) -> tuple[int, str]:
        """Status and reason of a refusal."""
        assert self.status >= 400, self
        return self.status, self.data["reason"]


class Wire:
    """One raw connection."""

    def __init__(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter, host: str) -> None:
        self._reader, self._writer, self._host = reader, writer, host

    async def send(
        self, method: str, target: str, headers: Mapping[str, str] | None = None, body: bytes = b""
    ) -> None:
        """Write a request. `Host` and `Content-Length` are added where they are not given."""
        given = {name.lower() for name in headers or {}}
        lines = [f"{method} {target} HTTP/1.1"]
        if "host" not in given:
            lines.append(f"Host: {self._host}")
        if body and "content-length" not in given:
            lines.append(f"Content-Length: {len(body)}")
        head = "".join(f"{line}\r\n" for line in lines).encode()
        head += b"".join(
            name.encode() + b": " + value.encode() + b"\r\n" for name, value in (headers or {}).items()
        )
        await self.write(head + b"\r\n" + body)

    async def write(self, data: bytes) -> None:
        """Write bytes as they are."""
        self._writer.write(data)
        await soon(self._writer.drain())

    async def head(self) -> Answer:
        """A response's status line and headers."""
        raw = await soon(self._reader.readuntil(b"\r\n\r\n"))
        first, *lines = raw.decode("latin-1").split("\r\n")[:-2]
        headers = [line.split(": ", 1) for line in lines]
        return Answer(int(first.split(" ")[1]), [(name.lower(), value) for name, value in headers])

    async def chunk(self) -> bytes:
        """The next chunk of a chunked body; empty at its end."""
        size = int(await soon(self._reader.readuntil(b"\r\n")), 16)
        data = await soon(self._reader.readexactly(size + 2))
        return data[:-2]

    async def answer(self) -> Answer:
        """A whole response."""
        head = await self.head()
        if head.all("transfer-encoding") == ["chunked"]:
            body = b""
            while chunk := await self.chunk():
                body += chunk
        elif length := head.all("content-length"):
            body = await soon(self._reader.readexactly(int(length[0])))
        else:
            body = await soon(self._reader.read()) if head.status not in (101, 204) else b""
        return Answer(head.status, head.headers, body)

    async def until(self, bytes_: bytes) -> None:
        """Read, and forget, until these bytes have come."""
        tail = b""
        while bytes_ not in tail:
            data = await soon(self._reader.read(2**20))
            assert data, f"closed before {bytes_!r}"
            tail = tail[-len(bytes_) :] + data

    async def rest(self) -> bytes:
        """All that comes until the server closes."""
        return await soon(self._reader.read())

    def stall(self) -> None:
        """Read no more from the network, until `resume`."""
        self._writer.transport.pause_reading()  # type: ignore[attr-defined]

    def resume(self) -> None:
        """Read again."""
        self._writer.transport.resume_reading()  # type: ignore[attr-defined]

    def drop(self) -> None:
        """Reset the connection."""
        self._writer.transport.abort()


class EventStream:
    """An event stream: blocks, or raw bytes."""

    def __init__(self, wire: Wire, head: Answer) -> None:
        self.head = head
        self.stall, self.resume = wire.stall, wire.resume
        self.raw = b""
        """Everything that came, without the chunks' own bytes."""
        self._wire = wire
        self._decoder = BlockDecoder(2**26)
        self._blocks: deque[Block] = deque()
        self.finished = False

    async def pull(self) -> bool:
        """Read one chunk; whether there was one."""
        chunk = await self._wire.chunk()
        self.raw += chunk
        self._blocks.extend(self._decoder.feed(chunk))
        self.finished = not chunk
        return not self.finished

    async def block(self) -> Block:
        """The next block, whatever it is."""
        while not self._blocks:
            assert await self.pull(), f"the stream ended after {self.raw[-500:]!r}"
        return self._blocks.popleft()

    async def event(self) -> Block:
        """The next log event: neither priming, control, nor `retry:`."""
        while True:
            block = await self.block()
            if block.id is not None and block.data:
                return block

    async def message(self) -> dict[str, Any]:
        """The next log event's JSON."""
        return json.loads((await self.event()).data or b"")

    async def events(self, count: int) -> list[Block]:
        """The next log events."""
        return [await self.event() for _ in range(count)]

    async def beat(self) -> None:
        """Wait for a keep-alive; no event comes before it."""
        while True:
            assert not [b for b in self._blocks if b.id is not None and b.data], self._blocks
            before = len(self.raw)
            assert await self.pull()
            if self.raw[before:] == b":\n\n":
                return

    async def end(self) -> list[Block]:
        """What is left, once the server has ended the stream in order."""
        while not self.finished:
            await self.pull()
        rest = list(self._blocks)
        self._blocks.clear()
        return rest

    def drop(self) -> None:
        """Reset the connection."""
        self._wire.drop()


class Socket:
    """A WebSocket: blocks, or raw frames."""

    def __init__(self, connection: ClientConnection) -> None:
        self._connection = connection
        self.frames: list[str] = []
        self._blocks: deque[Block] = deque()
        response = connection.response
        assert response is not None
        self.headers = response.headers

    async def frame(self) -> str:
        """The next frame."""
        frame = await soon(self._connection.recv())
        assert isinstance(frame, str), "a text frame"
        self.frames.append(frame)
        return frame

    async def block(self) -> Block:
        """The next block, whatever it is. Frames hold whole blocks (W1)."""
        while not self._blocks:
            decoder = BlockDecoder(2**26)
            self._blocks.extend(decoder.feed((await self.frame()).encode()))
            assert not decoder.pending
        return self._blocks.popleft()

    async def event(self) -> Block:
        """The next log event."""
        while True:
            block = await self.block()
            if block.id is not None:
                return block

    async def events(self, count: int) -> list[Block]:
        """The next log events."""
        return [await self.event() for _ in range(count)]

    async def message(self) -> dict[str, Any]:
        """The next log event's JSON."""
        return json.loads((await self.event()).data or b"")

    async def control(self, event: str) -> dict[str, Any]:
        """The next control block, which must be of this kind; keep-alives apart."""
        while True:
            block = await self.block()
            if block.event != "keepalive":
                break
        assert (block.event, block.id) == (event, None), block
        return json.loads(block.data or b"")

    async def beat(self) -> None:
        """Wait for a keep-alive; nothing else comes before it."""
        block = await self.block()
        assert (block.event, block.id) == ("keepalive", None), block

    async def send(self, block: bytes | str) -> None:
        """Write a text frame, or, given a `bytearray`, a binary one."""
        text = block.decode() if isinstance(block, bytes) else block
        await soon(self._connection.send(text))

    async def send_binary(self, data: bytes) -> None:
        """Write a binary frame."""
        await soon(self._connection.send(data))

    async def say(self, number: int | str | None, message: Any) -> None:
        """Send a numbered message."""
        await self.send(block_of(message, number))

    async def ack(self, cursor: str) -> None:
        """Send `cursor-ack`."""
        await self.send(block_of({"cursor": cursor}, event="cursor-ack"))

    async def closed(self) -> int:
        """The close code; frames that come before are kept in `frames`."""
        try:
            while True:
                await self.frame()
        except ConnectionClosed as error:
            return 1006 if error.rcvd is None else error.rcvd.code

    @property
    def why(self) -> str | None:
        """The reason in the server's close frame."""
        return self._connection.close_reason

    async def cross(self) -> list[Block]:
        """Read the echo and the gap, ack `C`; the gap's events."""
        echo = await self.control("resume-cursor")
        gap = await self.events(echo["cursor"] - seq_of(echo["from"]))
        last = gap[-1].id if gap else echo["from"]
        assert last is not None
        await self.ack(last)
        return gap

    def drop(self) -> None:
        """Reset the connection."""
        self._connection.transport.abort()

    async def close(self) -> None:
        """Close it in order."""
        await soon(self._connection.close())


# Servers -------------------------------------------------------------------------------------------


@dataclass
class Server:
    """A running server."""

    app: Gapless
    log: Log
    backends: ScriptedBackends
    port: int
    prefix: str = ""
    drops: list[Callable[[], object]] = field(default_factory=list[Callable[[], object]])
    headers: dict[str, str] = field(default_factory=dict[str, str])
    """What every request carries from here on."""

    @property
    def host(self) -> str:
        return f"127.0.0.1:{self.port}"

    async def wire(self) -> Wire:
        """A raw connection."""
        sock = socket.socket()
        sock.setblocking(False)
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 2**16)
        await soon(asyncio.get_running_loop().sock_connect(sock, ("127.0.0.1", self.port)))
        reader, writer = await soon(asyncio.open_connection(sock=sock, limit=2**24))
        wire = Wire(reader, writer, self.host)
        self.drops.append(wire.drop)
        return wire

    async def ask(
        self, method: str, target: str, headers: Mapping[str, str] | None = None, body: Any = b""
    ) -> Answer:
        """One request on a connection of its own."""
        wire = await self.wire()
        await wire.send(
            method, target, {**self.headers, **(headers or {})}, encode(body) if body != b"" else b""
        )
        answer = await wire.answer()
        wire.drop()
        return answer

    async def stream(
        self, method: str, target: str, headers: Mapping[str, str] | None = None, body: Any = b""
    ) -> EventStream:
        """A request that is answered with an event stream."""
        wire = await self.wire()
        await wire.send(
            method, target, {**self.headers, **(headers or {})}, encode(body) if body != b"" else b""
        )
        head = await wire.head()
        if head.status != 200:
            raise AssertionError(f"{head} {await wire.rest()!r}")
        assert head.header("content-type") == "text/event-stream"
        return EventStream(wire, head)

    async def knock(
        self,
        target: str,
        headers: Mapping[str, str] | None = None,
        *,
        subprotocols: tuple[str, ...] = ("mcp.v1",),
    ) -> Socket | Answer:
        """A WebSocket handshake, and the socket or the denial that it gets."""
        extra = {**self.headers, **(headers or {})}
        try:
            connection = await soon(
                connect(
                    f"ws://{self.host}{target}",
                    additional_headers=extra,
                    subprotocols=[Subprotocol(name) for name in subprotocols] or None,
                    compression=None,
                    ping_interval=None,
                    close_timeout=1,
                    max_size=None,
                    proxy=None,
                    user_agent_header=None,
                ).__aenter__()
            )
        except InvalidStatus as error:
            response = error.response
            headers_seen = [(name.lower(), value) for name, value in response.headers.raw_items()]
            return Answer(response.status_code, headers_seen, bytes(response.body or b""))
        self.drops.append(connection.transport.abort)
        return Socket(connection)

    async def open(self) -> Session:
        """Open a session of the session view."""
        answer = await self.ask("POST", f"{self.prefix}/mcp/session")
        assert answer.status == 201, answer
        return Session(self, answer)

    async def started(self) -> Session:
        """A session with a backend: its first message, number 1 of process `p`, has been sent."""
        session = await self.open()
        assert (await session.post(1, note("notifications/initialized"))).status == 202
        session.backend = await self.backends.opened()
        await session.backend.take()
        return session

    async def initialized(self, revision: str = "2025-11-25") -> Streams:
        """An initialized session of the stream view."""
        streams = Streams(self, revision)
        await streams.initialize()
        return streams


class Session:
    """A client of the session view that keeps no rules of its own."""

    def __init__(self, server: Server, opened: Answer) -> None:
        self.server = server
        self.opened = opened
        self.token: str = opened.json()["session"]
        self.start: str = opened.json()["cursor"]
        self.base = f"{server.prefix}/mcp/session/{self.token}"
        self.backend: Scripted

    async def post(
        self, number: int | str | None, message: Any, *, process: str | None = "p", **more: str
    ) -> Answer:
        """`POST …/messages` with one message."""
        headers = dict(JSON) | more
        if number is not None:
            headers["Mcp-Message-Number"] = str(number)
        if process is not None:
            headers["Mcp-Client"] = process
        return await self.server.ask("POST", f"{self.base}/messages", headers, message)

    async def post_blocks(self, body: bytes, *, process: str | None = "p") -> Answer:
        """`POST …/messages` with several blocks."""
        headers = dict(BLOCKS) | ({} if process is None else {"Mcp-Client": process})
        return await self.server.ask("POST", f"{self.base}/messages", headers, body)

    async def get(self, cursor: str | None = None, **more: str) -> Answer:
        """`GET …/events` that ends by itself, or is refused."""
        headers = {"Accept": "text/event-stream"} | more
        if cursor is not None:
            headers["Last-Event-ID"] = cursor
        return await self.server.ask("GET", f"{self.base}/events", headers)

    async def events(self, cursor: str | None = None, **more: str) -> EventStream:
        """`GET …/events`."""
        headers = {"Accept": "text/event-stream"} | more
        if cursor is not None:
            headers["Last-Event-ID"] = cursor
        return await self.server.stream("GET", f"{self.base}/events", headers)

    async def upgrade(self, cursor: Any, nonce: Any = "n1", protocol: Any = "mcp.v1") -> Answer:
        """`POST …/upgrade`."""
        body = {"cursor": cursor, "negotiation": nonce, "protocol": protocol}
        return await self.server.ask("POST", f"{self.base}/upgrade", JSON, body)

    async def pend(self, cursor: str, nonce: str = "n1") -> dict[str, Any]:
        """An accepted upgrade."""
        answer = await self.upgrade(cursor, nonce)
        assert answer.status == 200, answer
        return answer.json()

    async def knock(
        self, cursor: str | None, ticket: str | None = None, *, process: str | None = "p", **more: str
    ) -> Socket | Answer:
        """A handshake: in one step, or, with a ticket, as a browser makes it."""
        headers = dict(more)
        target = f"{self.base}/events"
        if process is not None:
            headers["Mcp-Client"] = process
        if ticket is not None:
            target += f"?ticket={ticket}" + ("" if cursor is None else f"&cursor={cursor}")
        elif cursor is not None:
            headers["Last-Event-ID"] = cursor
        return await self.server.knock(target, headers)

    async def bind(self, cursor: str, ticket: str | None = None, *, process: str | None = "p") -> Socket:
        """A socket."""
        found = await self.knock(cursor, ticket, process=process)
        assert isinstance(found, Socket), found
        return found

    async def denied(self, cursor: str | None, ticket: str | None = None, **more: str) -> Answer:
        """A handshake's denial."""
        found = await self.knock(cursor, ticket, **more)
        assert isinstance(found, Answer)
        return found

    async def ack(self, cursor: Any) -> Answer:
        """`POST …/ack`."""
        return await self.server.ask("POST", f"{self.base}/ack", JSON, {"cursor": cursor})

    async def delete(self) -> Answer:
        """`DELETE`."""
        return await self.server.ask("DELETE", self.base)

    async def ids(self) -> list[str]:
        """The IDs of every event so far, read from the start."""
        stream = await self.events(self.start)
        found: list[str] = []
        committed = (await self.get("9.0.0000000000000000" * 2)).data["resume-cursor"]
        while len(found) < committed:
            event = await stream.event()
            assert event.id is not None
            found.append(event.id)
        stream.drop()
        return found


class Streams:
    """A client of the stream view that keeps no rules of its own."""

    def __init__(self, server: Server, revision: str) -> None:
        self.server = server
        self.revision = revision
        self.token = ""
        self.backend: Scripted

    @property
    def headers(self) -> dict[str, str]:
        """What every request after `initialize` carries."""
        return {"Mcp-Session-Id": self.token, "MCP-Protocol-Version": self.revision}

    async def initialize(self) -> None:
        """POST `initialize`, have it answered, and read its stream to the end."""
        body = request(0, "initialize", protocolVersion=self.revision, capabilities={}, clientInfo={})
        stream = await self.server.stream("POST", "/mcp", JSON | BOTH, body)
        self.token = stream.head.header("mcp-session-id")
        self.backend = await self.server.backends.opened()
        assert (await self.backend.take())["method"] == "initialize"
        await self.backend.say(result(0, protocolVersion=self.revision))
        assert (await stream.message())["result"] == {"protocolVersion": self.revision}
        assert await stream.end() == []

    async def call(self, id: int | str, method: str = "tools/call", **params: Any) -> EventStream:
        """POST a request; its stream."""
        headers = JSON | BOTH | self.headers
        return await self.server.stream("POST", "/mcp", headers, request(id, method, **params))

    async def post(self, body: Any, **more: str) -> Answer:
        """POST something that is answered at once."""
        return await self.server.ask("POST", "/mcp", JSON | BOTH | self.headers | more, body)

    async def listen(self, cursor: str | None = None, **more: str) -> EventStream:
        """`GET /mcp`."""
        headers = {"Accept": "text/event-stream"} | self.headers | more
        if cursor is not None:
            headers["Last-Event-ID"] = cursor
        return await self.server.stream("GET", "/mcp", headers)

    async def get(self, cursor: str | None = None, **more: str) -> Answer:
        """`GET /mcp` that ends by itself, or is refused."""
        headers = {"Accept": "text/event-stream"} | self.headers | more
        if cursor is not None:
            headers["Last-Event-ID"] = cursor
        return await self.server.ask("GET", "/mcp", headers)


# Running them --------------------------------------------------------------------------------------


class Complaints(logging.Handler):
    """What the HTTP servers and the event loop log as errors: a test that causes any has failed."""

    def __init__(self) -> None:
        super().__init__(logging.ERROR)
        self.seen: list[str] = []

    def emit(self, record: logging.LogRecord) -> None:
        self.seen.append(self.format(record))


def listening() -> socket.socket:
    """A bound socket on a free port."""
    sock = socket.socket()
    sock.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    sock.bind(("127.0.0.1", 0))
    return sock


def _uncounted(_: Reason) -> None:
    pass


class Uvicorn:
    """uvicorn as the command runs it, started and stopped without its half-second of ticks."""

    def __init__(self, app: Any, sock: socket.socket) -> None:
        limits = app.sessions.limits if isinstance(app, Gapless) else Limits()
        refused = app.sessions.observer.refused if isinstance(app, Gapless) else _uncounted
        config = uvicorn.Config(
            app,
            http=cast("Any", partial(Requests, limits, limits.max_connections, refused)),
            ws=cast("Any", partial(Handshakes, refused)),
            lifespan="on",
            log_config=None,
            access_log=False,
            ws_ping_interval=None,
        )
        config.load()
        self._server = uvicorn.Server(config)
        self._server.lifespan = config.lifespan_class(config)
        self._sock = sock

    async def start(self) -> None:
        await self._server.startup(sockets=[self._sock])

    async def stop(self) -> None:
        state = self._server.server_state
        for server in self._server.servers:
            server.close()
        for connection in list(state.connections):
            connection.transport.abort()
        await soon(asyncio.gather(*state.tasks, return_exceptions=True))
        await soon(self._server.lifespan.shutdown())


class Hypercorn:
    """hypercorn."""

    def __init__(self, app: Any, sock: socket.socket) -> None:
        sock.listen()
        self._config = hypercorn.Config()
        self._config.bind = [f"fd://{sock.detach()}"]
        self._config.accesslog = None
        self._config.errorlog = logging.getLogger("hypercorn.error")
        self._config.graceful_timeout = 1
        self._config.websocket_ping_interval = None
        self._app = app
        self._stop = asyncio.Event()
        self._task: asyncio.Task[None]

    async def start(self) -> None:
        self._task = asyncio.create_task(
            hypercorn.asyncio.serve(self._app, self._config, shutdown_trigger=self._stop.wait)  # type: ignore[arg-type]
        )

    async def stop(self) -> None:
        self._stop.set()
        await soon(self._task)


class Serve:
    """Starts servers of one kind; stops them at the end of the test."""

    def __init__(self, kind: str) -> None:
        self.kind = kind
        self._running: list[tuple[Server, Uvicorn | Hypercorn]] = []
        self.complaints = Complaints()

    async def __call__(
        self,
        log: Log | None = None,
        *,
        wrap: Callable[[Gapless], Any] | None = None,
        prefix: str = "",
        hosts: tuple[str, ...] | None = None,
        origins: tuple[str, ...] | None = None,
        path: str = "/mcp",
        verifier: Verifier | None = None,
        public_url: str | None = None,
        **limits: Any,
    ) -> Server:
        log = log or MemoryLog()
        backends = ScriptedBackends()
        lists: dict[str, Any] = {}
        if hosts is not None:
            lists["allowed_hosts"] = hosts
        if origins is not None:
            lists["allowed_origins"] = origins
        app = build(
            log, backends, Settings(path, Limits(**limits), verifier=verifier, public_url=public_url, **lists)
        )
        sock = listening()
        server = Server(app, log, backends, sock.getsockname()[1], prefix)
        served = app if wrap is None else wrap(app)
        runner = Uvicorn(served, sock) if self.kind == "uvicorn" else Hypercorn(served, sock)
        await soon(runner.start())
        self._running.append((server, runner))
        return server

    async def stop(self, server: Server) -> None:
        """Stop one server, its clients' connections first."""
        for running, runner in list(self._running):
            if running is server:
                self._running.remove((running, runner))
                for drop in server.drops:
                    with suppress(RuntimeError):
                        drop()
                await runner.stop()

    async def close(self) -> None:
        """Stop every server."""
        for server, _ in list(self._running):
            await self.stop(server)
