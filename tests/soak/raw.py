"""Thousands of sessions from one process: raw sockets, and no more of a client than counts its events."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Callable
from contextlib import suppress
from typing import Any, Final
from urllib.parse import urlsplit

from websockets.client import ClientProtocol
from websockets.frames import Frame
from websockets.http11 import Response
from websockets.typing import Subprotocol
from websockets.uri import parse_uri

from gapless.protocol.block import Block, BlockDecoder, encode_block
from gapless.protocol.cursor import EventId, Link, link_after, parse_event_id
from gapless.torture.ladder import Account, Climb, Ledger
from gapless.torture.reading import LIMIT, message_of

__all__ = ["Member", "Refused", "Requests"]

_HEAD: Final = b"\r\n\r\n"
_PATIENCE: Final = 120.0
"""Seconds that an answer may take where thousands are waited for."""

_AGAIN: Final = 3
"""Connections that a server may end, for reasons of its own, before its client complains."""


class Refused(Exception):
    """A request was answered something else than what it asks for, or not at all."""


class Requests:
    """Plain requests to one server over a few connections that are kept.

    Args:
        most: how many there are at a time.
    """

    def __init__(self, url: str, most: int) -> None:
        parts = urlsplit(url)
        self.host, self.port, self.path = parts.hostname or "", parts.port or 80, parts.path
        self._free: asyncio.LifoQueue[tuple[asyncio.StreamReader, asyncio.StreamWriter] | None]
        self._free = asyncio.LifoQueue()
        for _ in range(most):
            self._free.put_nowait(None)

    async def ask(self, method: str, path: str, body: bytes = b"", **headers: str) -> Any:
        """One request; the JSON of its answer. A connection that was closed meanwhile is made anew.

        Raises:
            Refused: it is answered with an error.
        """
        kept = await self._free.get()
        link = kept
        try:
            try:
                link = link or await self.connect()
                status, data = await self._once(link, method, path, body, headers)
            except (OSError, asyncio.IncompleteReadError):
                link = await self.connect()
                status, data = await self._once(link, method, path, body, headers)
        finally:
            self._free.put_nowait(link)
        if not 200 <= status < 300:
            raise Refused(
                f"{method} {path.rpartition('/')[2]}: {status} {data[:300].decode(errors='replace')}"
            )
        return json.loads(data) if data else None

    async def connect(self) -> tuple[asyncio.StreamReader, asyncio.StreamWriter]:
        """A connection."""
        return await asyncio.open_connection(self.host, self.port)

    async def _once(
        self,
        link: tuple[asyncio.StreamReader, asyncio.StreamWriter],
        method: str,
        path: str,
        body: bytes,
        headers: dict[str, str],
    ) -> tuple[int, bytes]:
        reader, writer = link
        writer.write(self.head(method, path, headers | {"Content-Length": str(len(body))}) + body)
        async with asyncio.timeout(_PATIENCE):
            status, length = await read_head(reader)
            return status, await reader.readexactly(length)

    def head(self, method: str, path: str, headers: dict[str, str]) -> bytes:
        """A request's line and headers."""
        lines = [f"{method} {path} HTTP/1.1", f"Host: {self.host}:{self.port}"]
        lines += [f"{name.replace('_', '-')}: {value}" for name, value in headers.items()]
        return "\r\n".join(lines).encode() + _HEAD

    async def close(self) -> None:
        """Close what is kept."""
        while not self._free.empty():
            link = self._free.get_nowait()
            if link is not None:
                link[1].transport.abort()


async def read_head(reader: asyncio.StreamReader) -> tuple[int, int]:
    """The status of a response, and how long its body is, if it says so."""
    head = (await reader.readuntil(_HEAD)).lower()
    _, found, length = head.partition(b"content-length:")
    return int(head.split(b" ", 2)[1]), int(length.split(b"\r\n", 1)[0]) if found else 0


class Member:
    """One session of a crowd.

    Attributes:
        ledger: of the climbs that it makes.
        wrong: what is wrong with its events, in words; or that it was refused.
        ended: connections that were accepted, and that the server has ended.
        back: when the connection that was last asked for began to deliver.
        changed: called whenever an event came.
    """

    def __init__(self, requests: Requests, number: int) -> None:
        self.ledger = Ledger()
        self.wrong: list[str] = []
        self.ended: list[str] = []
        self.back = asyncio.Event()
        self.changed: Callable[[], None] = lambda: None
        self._requests = requests
        self._process = f"member-{number}"
        self._token = ""
        self._sent = 0
        self._cursor = EventId(0, 0, Link(b""))
        self._writer: asyncio.StreamWriter | None = None
        self._task: asyncio.Task[None] | None = None

    @property
    def _path(self) -> str:
        return f"{self._requests.path}/session/{self._token}"

    async def open(self, *messages: dict[str, Any]) -> None:
        """Open the session, and say these."""
        opened = await self._requests.ask("POST", f"{self._requests.path}/session")
        self._token, self._cursor = opened["session"], parse_event_id(opened["cursor"])
        for message in messages:
            await self.post(message)

    async def post(self, message: dict[str, Any]) -> None:
        """Say the next message."""
        self._sent += 1
        headers = {"Content-Type": "application/json", "Mcp-Client": self._process}
        body = json.dumps(message).encode()
        path = f"{self._path}/messages"
        await self._requests.ask("POST", path, body, Mcp_Message_Number=str(self._sent), **headers)

    async def climb(self, climb: Climb, id: int) -> Account:
        """Begin a climb."""
        account = self.ledger.start(climb, id)
        await self.post(climb.request(id))
        return account

    # Connections --------------------------------------------------------------------------------------

    def listen(self, socket: bool) -> None:
        """Ask for all events after the last that came: over an event stream, or over a WebSocket."""
        self.back.clear()
        self._task = asyncio.create_task(self._listen(socket))

    def cut(self) -> None:
        """Reset the connection. What has not been read of it is lost with it."""
        if self._task is not None:
            self._task.cancel()
        if self._writer is not None:
            self._writer.transport.abort()

    async def _listen(self, socket: bool) -> None:
        """Listen, and again where the server ends what it had begun: it may, and its clients resume."""
        what = "socket" if socket else "events"
        while not self.wrong:
            writer: asyncio.StreamWriter | None = None
            try:
                async with asyncio.timeout(_PATIENCE):
                    reader, writer = await self._requests.connect()
                    self._writer = writer
                    read = await (self._shake if socket else self._get)(reader, writer)
            except (Refused, OSError, EOFError) as error:  # a timeout among them
                self.wrong.append(f"{what}: {type(error).__name__}: {error}")
            else:
                with suppress(OSError, EOFError):
                    await read()
                self.ended.append(what)
                if len(self.ended) > _AGAIN:
                    self.wrong.append(f"{what}: the server keeps ending them")
            finally:
                if writer is not None:
                    writer.transport.abort()
        self.back.set()  # nobody waits for it any more
        self.changed()

    async def _get(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> Any:
        headers = {"Accept": "text/event-stream", "Last-Event-ID": str(self._cursor)}
        headers["Mcp-Client"] = self._process
        writer.write(self._requests.head("GET", f"{self._path}/events", headers))
        status, length = await read_head(reader)
        if status != 200:
            raise Refused(f"{status} {(await reader.readexactly(length)).decode(errors='replace')}")
        decoder = BlockDecoder(LIMIT)

        async def read() -> None:
            while size := int(await reader.readline(), 16):
                for block in decoder.feed((await reader.readexactly(size + 2))[:size]):
                    self.take(block)

        return read

    async def _shake(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> Any:
        url = f"ws://{self._requests.host}:{self._requests.port}{self._path}/events"
        protocol = ClientProtocol(parse_uri(url), subprotocols=[Subprotocol("mcp.v1")], max_size=LIMIT)
        request = protocol.connect()
        request.headers["Last-Event-ID"] = str(self._cursor)
        request.headers["Mcp-Client"] = self._process
        protocol.send_request(request)
        decoder = BlockDecoder(LIMIT)

        def flush() -> None:
            for data in protocol.data_to_send():
                writer.write(data)

        def acknowledge() -> None:
            ack = encode_block("cursor-ack", json.dumps({"cursor": str(self._cursor)}).encode())
            protocol.send_text(ack)

        async def more() -> list[Any]:
            data = await reader.read(64 * 1024)
            if not data:
                raise EOFError("the connection has ended")
            protocol.receive_data(data)
            return protocol.events_received()

        def take(frame: Frame) -> None:
            for block in decoder.feed(bytes(frame.data)):
                if block.event == "probe":
                    protocol.send_text(encode_block("probe-ack", block.data or b"{}"))
                elif self.take(block, acknowledge):
                    acknowledge()

        flush()
        came: list[Any] = []
        while not came:
            came = await more()
        response, *frames = came
        assert isinstance(response, Response)
        if protocol.handshake_exc is not None:
            raise Refused(f"{response.status_code} {(response.body or b'').decode(errors='replace')}")

        async def read() -> None:
            waiting = frames
            while True:
                for frame in waiting:
                    if isinstance(frame, Frame):
                        take(frame)
                flush()
                waiting = await more()

        return read

    # Events -------------------------------------------------------------------------------------------

    def take(self, block: Block, acknowledge: Callable[[], None] | None = None) -> bool:
        """Process a block; whether it was an event of the log. The first of a connection says it is there."""
        if not self.back.is_set():
            self.back.set()
            if acknowledge is not None:
                acknowledge()
        if block.id is None or not block.data:
            return False
        id = parse_event_id(block.id)
        if (id.seq, id.link) != (
            self._cursor.seq + 1,
            link_after(self._cursor.link, id.stream, block.event, block.data),
        ):
            self.wrong.append(f"event {id} came after {self._cursor}")
        self._cursor = id
        message = message_of(block)
        if message is not None and block.event == "message":
            self.ledger.take(message)
        self.changed()
        return True
