"""Clients that are cheaper than any server: raw sockets, bytes counted and not parsed.

What arrived is kept, and checked against what was emitted once the clock has stopped.
"""

from __future__ import annotations

import json
import re
import secrets
import selectors
import socket
import time
from collections.abc import Callable, Sequence
from typing import Any, Self

from benchmarks.harness import Message, WrongEvents

__all__ = [
    "DONE",
    "FLOOR",
    "INITIALIZE",
    "PATIENCE",
    "Conn",
    "Gapless",
    "Standard",
    "burst",
    "call",
    "check",
    "frame",
    "gather",
    "last_id",
    "numbers",
    "read_all",
    "request",
]

DONE = b'"emitted '
"""Is in the result of every tool, and in nothing else."""

PATIENCE = 60.0
IDLE = 3.0
CHUNK = 1 << 20

_NUMBER = re.compile(rb'"n": ?(\d+)')
_ID = re.compile(rb"id: (\S+)")
INITIALIZE = {
    "protocolVersion": "2025-06-18",
    "capabilities": {},
    "clientInfo": {"name": "load", "version": "1"},
}


def numbers(data: bytes) -> list[int]:
    """The numbers of the notifications in a stretch of a stream, in the order of arrival."""
    return [int(found) for found in _NUMBER.findall(data)]


def last_id(data: bytes) -> str:
    """The ID of the last event in a stretch of a stream; empty if there is none."""
    found = _ID.findall(data)
    return found[-1].decode() if found else ""


def check(data: bytes, count: int, first: int = 0) -> None:
    """See that notifications `first` to `first + count - 1` are all there, once and in order.

    Raises:
        WrongEvents: they are not.
    """
    found = numbers(data)
    if found != list(range(first, first + count)):
        raise WrongEvents(f"{count} events were emitted, {len(found)} arrived, or not in order")


def request(method: str, path: str, port: int, headers: Message, body: bytes = b"") -> bytes:
    """An HTTP request."""
    lines = [f"{method} {path} HTTP/1.1", f"Host: 127.0.0.1:{port}"]
    lines += [f"{name}: {value}" for name, value in headers.items()]
    if body or method == "POST":
        lines.append(f"Content-Length: {len(body)}")
    return "\r\n".join([*lines, "", ""]).encode() + body


class Conn:
    """One TCP connection, as bytes."""

    def __init__(self, port: int) -> None:
        self.port = port
        self.sock = socket.create_connection(("127.0.0.1", port), timeout=PATIENCE)
        self.sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        self._left = b""

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *exc: object) -> None:
        self.close()

    def close(self) -> None:
        """Hang up."""
        self.sock.close()

    def send(self, data: bytes) -> None:
        """Write all of it."""
        self.sock.sendall(data)

    def recv(self) -> bytes:
        """What there is, waiting for some.

        Raises:
            WrongEvents: nothing will come.
        """
        if self._left:
            data, self._left = self._left, b""
            return data
        try:
            data = self.sock.recv(CHUNK)
        except TimeoutError:
            raise WrongEvents(f"nothing came within {PATIENCE:.0f} s") from None
        if not data:
            raise WrongEvents("the server closed the connection")
        return data

    def unread(self, data: bytes) -> None:
        """Have this read next."""
        self._left = data

    def discard(self) -> None:
        """Read and forget what has come so far."""
        self.sock.setblocking(False)
        try:
            while self.sock.recv(CHUNK):
                pass
        except BlockingIOError:
            pass
        self.sock.settimeout(PATIENCE)

    def until(self, marker: bytes) -> bytes:
        """Everything up to the read that brings `marker`."""
        parts, overlap = list[bytes](), len(marker) - 1
        seen = b""
        while marker not in seen:
            data = self.recv()
            parts.append(data)
            seen = seen[-overlap:] + data
        return b"".join(parts)

    def ask(self, data: bytes) -> tuple[int, dict[str, str], bytes]:
        """One request, and its whole answer: status, headers, body."""
        self.send(data)
        return self.answer()

    def answer(self) -> tuple[int, dict[str, str], bytes]:
        """A whole answer; chunks are left as they are."""
        head, _, body = self.until(b"\r\n\r\n").partition(b"\r\n\r\n")
        status, headers = parse(head)
        if headers.get("transfer-encoding") == "chunked":
            while not body.endswith(b"0\r\n\r\n"):
                body += self.recv()
        else:
            while len(body) < int(headers.get("content-length", 0)):
                body += self.recv()
        return status, headers, body

    def head(self, data: bytes) -> tuple[int, dict[str, str], bytes]:
        """One request, and the head of its answer; what came of the body with it is the last."""
        self.send(data)
        head, _, rest = self.until(b"\r\n\r\n").partition(b"\r\n\r\n")
        return *parse(head), rest


class Asker:
    """Asks one thing after another on one connection, on a new one if that has been idle.

    Servers close a connection after five seconds without a request.
    """

    def __init__(self, port: int) -> None:
        self.port = port
        self._conn: Conn | None = None
        self._used = 0.0

    @property
    def conn(self) -> Conn:
        """A connection that the server will not close just now."""
        now = time.monotonic()
        if self._conn is None or now - self._used > IDLE or self._conn.port != self.port:
            self.close()
            self._conn = Conn(self.port)
        self._used = now
        return self._conn

    def ask(self, data: bytes) -> tuple[int, dict[str, str], bytes]:
        """One request, and its whole answer."""
        answer = self.conn.ask(data)
        self._used = time.monotonic()
        return answer

    def close(self) -> None:
        """Hang up."""
        if self._conn is not None:
            self._conn.close()
            self._conn = None


def parse(head: bytes) -> tuple[int, dict[str, str]]:
    """The status and the headers of an answer."""
    first, *lines = head.decode("latin-1").split("\r\n")
    pairs = (line.partition(":") for line in lines)
    return int(first.split(" ")[1]), {name.lower(): value.strip() for name, _, value in pairs}


def call(id: int, name: str, arguments: Message) -> Message:
    """A `tools/call`."""
    return {
        "jsonrpc": "2.0",
        "id": id,
        "method": "tools/call",
        "params": {"name": name, "arguments": arguments},
    }


class Standard:
    """A session of standard Streamable HTTP: SDK and Gapless are asked in the very same bytes."""

    def __init__(self, port: int) -> None:
        self.port = port
        self.asker = Asker(port)
        self._headers: dict[str, Any] = {
            "Content-Type": "application/json",
            "Accept": "application/json, text/event-stream",
        }
        self._id = 0
        opening = {"jsonrpc": "2.0", "id": 0, "method": "initialize", "params": INITIALIZE}
        status, headers, body = self.asker.ask(self._post(opening))
        if status != 200:
            raise WrongEvents(f"initialize was answered {status}: {body[:200]!r}")
        self._headers |= {"Mcp-Session-Id": headers["mcp-session-id"], "MCP-Protocol-Version": "2025-06-18"}
        self.asker.ask(self._post({"jsonrpc": "2.0", "method": "notifications/initialized"}))

    def _post(self, message: Message) -> bytes:
        body = json.dumps(message, separators=(",", ":")).encode()
        return request("POST", "/mcp", self.port, self._headers, body)

    def ask(self, name: str, **arguments: Any) -> bytes:
        """The bytes that call a tool."""
        self._id += 1
        return self._post(call(self._id, name, arguments))

    def call(self, name: str, **arguments: Any) -> bytes:
        """Call a tool, and read its stream to its end."""
        _, _, body = self.asker.ask(self.ask(name, **arguments))
        if DONE not in body:
            raise WrongEvents(f"the call was answered {body[:200]!r}")
        return body

    def burst(self, count: int, **arguments: Any) -> bytes:
        """One call that emits; what arrived."""
        return self.call("burst", count=count, **arguments)

    def listen(self) -> Conn:
        """The standalone stream, on a connection of its own."""
        conn = Conn(self.port)
        headers = {**self._headers, "Accept": "text/event-stream"}
        status, _, _ = conn.head(request("GET", "/mcp", conn.port, headers))
        if status != 200:
            raise WrongEvents(f"the standalone stream was answered {status}")
        return conn

    def close(self) -> None:
        """End the session."""
        self.asker.ask(request("DELETE", "/mcp", self.port, self._headers))
        self.asker.close()


def gather(sessions: Sequence[Standard], count: int) -> list[bytes]:
    """One call that emits in each session, all at the same time; what arrived in each."""
    conns = [session.asker.conn for session in sessions]
    for session, conn in zip(sessions, conns, strict=True):
        conn.send(session.ask("burst", count=count))
    return read_all(conns, _answered)


def _answered(got: Sequence[bytes]) -> bool:
    end = b"".join(got[-3:])
    return end.endswith(b"0\r\n\r\n") and DONE in end


def read_all(conns: Sequence[Conn], ended: Callable[[Sequence[bytes]], bool]) -> list[bytes]:
    """What comes on each of several connections, until what has come of it so far has `ended`.

    Raises:
        WrongEvents: nothing comes any more.
    """
    parts: list[list[bytes]] = [[] for _ in conns]
    with selectors.DefaultSelector() as selector:
        for at, conn in enumerate(conns):
            selector.register(conn.sock, selectors.EVENT_READ, at)
        left = len(conns)
        while left:
            ready = selector.select(PATIENCE)
            if not ready:
                raise WrongEvents(f"nothing came within {PATIENCE:.0f} s; {left} readers wait")
            for key, _ in ready:
                got = parts[key.data]
                got.append(conns[key.data].recv())
                if ended(got):
                    selector.unregister(key.fileobj)
                    left -= 1
    return [b"".join(got) for got in parts]


FLOOR = b'{"session":"floor","cursor":"7.0.0123456789abcdef"}'
"""What a session is opened with where there are none: `servers/floor.py`."""


class Gapless:
    """A session of the session view, by hand: messages by POST, events on either wire."""

    def __init__(self, port: int, opened: bytes = b"") -> None:
        self.asker = Asker(port)
        self.process = secrets.token_urlsafe(6)
        opened = opened or self._open()
        body = json.loads(opened)
        self.path = f"/mcp/session/{body['session']}"
        self.cursor: str = body["cursor"]
        self.sent = 0
        self._id = 0

    def _open(self) -> bytes:
        status, _, body = self.asker.ask(request("POST", "/mcp/session", self.port, {}))
        if status != 201:
            raise WrongEvents(f"a session was answered {status}: {body[:200]!r}")
        return body

    @property
    def port(self) -> int:
        """Where the session is served."""
        return self.asker.port

    @port.setter
    def port(self, port: int) -> None:
        self.asker.port = port

    def initialize(self) -> None:
        """Open the MCP session; its answer is event 1."""
        self.send({"jsonrpc": "2.0", "id": 0, "method": "initialize", "params": INITIALIZE})
        self.send({"jsonrpc": "2.0", "method": "notifications/initialized"})

    def message(self, message: Message) -> bytes:
        """The bytes of a numbered POST."""
        self.sent += 1
        headers = {
            "Content-Type": "application/json",
            "Mcp-Client": self.process,
            "Mcp-Message-Number": self.sent,
        }
        body = json.dumps(message, separators=(",", ":")).encode()
        return request("POST", f"{self.path}/messages", self.port, headers, body)

    def send(self, message: Message) -> None:
        """POST one message."""
        status, _, body = self.asker.ask(self.message(message))
        if status != 202:
            raise WrongEvents(f"a message was answered {status}: {body[:200]!r}")

    def calling(self, name: str, **arguments: Any) -> bytes:
        """The bytes that call a tool."""
        self._id += 1
        return self.message(call(self._id, name, arguments))

    def call(self, name: str, **arguments: Any) -> None:
        """Call a tool; what it emits comes on the wire that listens."""
        status, _, body = self.asker.ask(self.calling(name, **arguments))
        if status != 202:
            raise WrongEvents(f"a call was answered {status}: {body[:200]!r}")

    def ack(self, seen: bytes) -> None:
        """State the last event seen, so that the log may let go."""
        self.cursor = last_id(seen)
        body = json.dumps({"cursor": self.cursor}).encode()
        headers = {"Content-Type": "application/json", "Mcp-Client": self.process}
        self.asker.ask(request("POST", f"{self.path}/ack", self.port, headers, body))

    def asking(self, conn: Conn) -> bytes:
        """The bytes that ask for an event stream after the cursor."""
        headers = {
            "Accept": "text/event-stream",
            "Last-Event-ID": self.cursor,
            "Mcp-Client": self.process,
        }
        return request("GET", f"{self.path}/events", conn.port, headers)

    def listen(self) -> Conn:
        """An event stream after the cursor, from when it has said so; what came with that is read next."""
        conn = Conn(self.port)
        status, _, data = conn.head(self.asking(conn))
        if status != 200:
            raise WrongEvents(f"an event stream was answered {status}: {data[:300]!r}")
        while b"retry:" not in data:
            data += conn.recv()
        conn.unread(data)
        return conn

    def knocking(self, conn: Conn) -> bytes:
        """The bytes of a handshake that states the cursor."""
        headers = {
            "Upgrade": "websocket",
            "Connection": "Upgrade",
            "Sec-WebSocket-Key": "AAAAAAAAAAAAAAAAAAAAAA==",
            "Sec-WebSocket-Version": "13",
            "Sec-WebSocket-Protocol": "mcp.v1",
            "Last-Event-ID": self.cursor,
            "Mcp-Client": self.process,
        }
        return request("GET", f"{self.path}/events", conn.port, headers)

    def upgrade(self) -> Conn:
        """A socket that has crossed the gap, and is live; what came with that is read next."""
        conn = Conn(self.port)
        status, headers, data = conn.head(self.knocking(conn))
        if status != 101:
            raise WrongEvents(f"a handshake was answered {status}: {data[:300]!r}")
        last = f"id: {headers['x-mcp-resume-cursor']}.".encode()
        while last not in data or not data.endswith(b"\n\n"):
            data += conn.recv()
        self.cursor = last_id(data)
        conn.send(frame(f'event: cursor-ack\ndata: {{"cursor":"{self.cursor}"}}\n\n'.encode()))
        conn.unread(data)
        return conn

    def close(self) -> None:
        """End the session."""
        self.asker.ask(request("DELETE", self.path, self.port, {"Mcp-Client": self.process}))
        self.asker.close()


def burst(client: Gapless, conn: Conn, count: int, **arguments: Any) -> bytes:
    """One call that emits; what arrived of it where the session listens."""
    client.call("burst", count=count, **arguments)
    return conn.until(DONE)


def frame(text: bytes) -> bytes:
    """A client's text frame; its mask is of zeros, so that the bytes stay as they are."""
    assert len(text) < 65536
    length = bytes([0x80 | len(text)]) if len(text) < 126 else b"\xfe" + len(text).to_bytes(2, "big")
    return b"\x81" + length + b"\0\0\0\0" + text
