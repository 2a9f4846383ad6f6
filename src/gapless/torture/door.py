"""A session of the session view, by hand: whatever a client might say, well-behaved or not.

It believes nothing and checks nothing itself: it shows an experiment what came over the wire.
"""

from __future__ import annotations

import asyncio
import secrets
from collections.abc import AsyncGenerator
from contextlib import aclosing, asynccontextmanager, suppress
from dataclasses import dataclass
from itertools import pairwise
from typing import Any, Final, Self
from urllib.parse import quote, urlencode, urlsplit

import httpx2
import msgspec
from websockets.asyncio.client import ClientConnection, connect
from websockets.exceptions import ConnectionClosed, InvalidHandshake, InvalidStatus, InvalidURI
from websockets.typing import Subprotocol

from gapless.errors import MalformedError, TargetError, TooLargeError
from gapless.protocol.block import Block, BlockDecoder, encode_block
from gapless.protocol.refusal import read_refusal, read_refusal_error
from gapless.torture.ladder import INITIALIZE, INITIALIZED, Ledger, as_object
from gapless.torture.reading import (
    ANSWER,
    ASKED,
    IDLE,
    LIMIT,
    Answer,
    http_client,
    json_object,
    message_of,
    sequence_of,
)
from gapless.torture.trial import Trace

__all__ = ["DoorSession", "Frames", "Knocked", "reason_of"]

_PROTOCOL: Final = "mcp.v1"


def reason_of(body: dict[str, Any]) -> str:
    """The reason in the JSON of a refusal, if it has one."""
    refusal = read_refusal_error(body.get("error"))
    return "" if refusal is None else refusal.reason.value


@dataclass(frozen=True, slots=True)
class Knocked:
    """What a handshake came to: a socket, or a status with its reason."""

    status: int
    reason: str
    echo: int | None
    """`X-MCP-Resume-Cursor` of the 101."""
    frames: Frames | None


class Frames:
    """A socket's blocks, one at a time."""

    def __init__(self, socket: ClientConnection) -> None:
        self._socket = socket
        self._blocks: list[Block] = []
        self._decoder = BlockDecoder(LIMIT)

    async def next(self, seconds: float = IDLE) -> Block | None:
        """The next block but keep-alives; a probe is answered. `None` if the socket closed, or is silent."""
        try:
            async with asyncio.timeout(seconds):
                while True:
                    while not self._blocks:
                        frame = await self._socket.recv()
                        self._blocks += self._decoder.feed(
                            frame.encode() if isinstance(frame, str) else frame
                        )
                    block = self._blocks.pop(0)
                    if block.event == "probe":
                        await self.send(encode_block("probe-ack", block.data or b"{}"))
                    elif block.event != "keepalive":
                        return block
        except (ConnectionClosed, TimeoutError, MalformedError, TooLargeError):
            return None

    async def ack(self, cursor: str) -> None:
        """State a cursor."""
        await self.send(encode_block("cursor-ack", msgspec.json.encode({"cursor": cursor})))

    async def send(self, block: bytes) -> None:
        """Write one block."""
        with suppress(ConnectionClosed):  # whoever reads next finds out
            await self._socket.send(block.decode())

    def drop(self) -> None:
        """Reset the connection."""
        self._socket.transport.abort()


class DoorSession:
    """One session, and what was received on it.

    Attributes:
        cursor: the ID of the last event processed, as the server gave it.
        token: names the session.
        limits, timers: as the server advertises them.
        again: numbers of events that came a second time.
        refused: what the latest request for events that was refused was answered.
    """

    def __init__(self, url: str, trace: Trace) -> None:
        self.url = url
        self.trace = trace
        self.ledger = Ledger()
        self.cursor = "0"
        self.token = ""
        self.limits: dict[str, Any] = {}
        self.timers: dict[str, Any] = {}
        self.process = secrets.token_urlsafe(8)
        self.again: list[int] = []
        self.refused = ""
        self._came: set[int] = set()
        self._frames: list[Frames] = []
        self._sent = 0
        self._http = http_client()

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, *exc: object) -> None:
        for frames in self._frames:
            frames.drop()
        if self.token:
            await self.request("DELETE", "")
        await self._http.aclose()

    @property
    def seq(self) -> int:
        """The number of the last event processed."""
        return sequence_of(self.cursor) or 0

    @property
    def skipped(self) -> list[tuple[int, int]]:
        """First and last number of each range of events that never came, though a later one did."""
        return [(low + 1, high - 1) for low, high in pairwise(sorted(self._came)) if high > low + 1]

    def _url(self, part: str) -> str:
        parts = (self.url.rstrip("/"), "session", quote(self.token, safe=""), part)
        return "/".join(filter(None, parts))

    async def request(
        self, method: str, part: str, body: Any = None, **headers: str
    ) -> tuple[int, dict[str, Any]]:
        """One request: its status and its JSON object; status 0 if the connection broke or nothing came."""
        sent = {"Mcp-Client": self.process, "Content-Type": "application/json"}
        sent |= {name.replace("_", "-"): value for name, value in headers.items()}
        content = b"" if body is None else msgspec.json.encode(body)
        try:
            async with asyncio.timeout(ANSWER):
                response = await self._http.request(method, self._url(part), content=content, headers=sent)
        except (httpx2.HTTPError, TimeoutError) as error:
            self.trace.note("client", f"{method} {part}: {type(error).__name__}")
            return 0, {}
        self.trace.note("client", f"{method} {part}: {response.status_code}")
        return response.status_code, json_object(response.content) or {}

    async def open(self) -> None:
        """Open a session and shake hands.

        Raises:
            TargetError: there is no session view here.
        """
        status, body = await self.request("POST", "")
        if status != 201 or not {"session", "cursor"} <= body.keys():
            raise TargetError(f"{self._url('')} is answered {status}: it has no session view")
        self.token, self.cursor = str(body["session"]), str(body["cursor"])
        self._came.add(self.seq)
        self.limits, self.timers = as_object(body.get("limits")), as_object(body.get("timers"))
        await self.ask(INITIALIZE)
        await self.post(INITIALIZED)

    async def ask(self, message: dict[str, Any]) -> dict[str, Any]:
        """A request and its answer on the event stream, without faults in between.

        Raises:
            TargetError: there is none.
        """
        what = f"{message['method']} in the session view"
        try:
            async with (
                asyncio.timeout(ASKED),
                self.events() as answer,
                aclosing(answer.blocks(ASKED)) as blocks,
            ):
                await self.post(message)
                async for block in blocks:
                    found = message_of(block) if self.take(block) else None
                    if found is not None and found.get("id") == message["id"]:
                        return found
        except (httpx2.HTTPError, TimeoutError) as error:
            raise TargetError(f"{what} is not answered: {str(error) or type(error).__name__}") from None
        raise TargetError(f"{what} is not answered")

    async def post(self, message: dict[str, Any]) -> tuple[int, dict[str, Any]]:
        """Send the next message; again under its number, if the connection broke."""
        self._sent += 1
        for _ in range(5):
            status, body = await self.request("POST", "messages", message, Mcp_Message_Number=str(self._sent))
            if status:
                return status, body
        return 0, {}

    @asynccontextmanager
    async def events(self, cursor: str | None = "") -> AsyncGenerator[Answer]:
        """The event stream after one's own cursor, or after the one given; `None` states none.

        Raises:
            httpx2.HTTPError: the connection broke.
            TimeoutError: no answer began within 5 s.
        """
        headers = {"Accept": "text/event-stream", "Mcp-Client": self.process}
        stated = self.cursor if cursor == "" else cursor
        if stated is not None:
            headers["Last-Event-ID"] = stated
        encoded = httpx2.Headers(headers, encoding="utf-8")  # IDs are what the server likes
        request = self._http.build_request("GET", self._url("events"), headers=encoded)
        async with asyncio.timeout(ANSWER):
            response = await self._http.send(request, stream=True)
        self.trace.note("client", f"GET events after {stated}: {response.status_code}")
        async with aclosing(response):
            yield Answer(response)

    async def upgrade(self, cursor: str, nonce: str) -> tuple[int, dict[str, Any]]:
        """Ask for the door in band."""
        body = {"cursor": cursor, "protocol": _PROTOCOL, "negotiation": nonce}
        return await self.request("POST", "upgrade", body)

    async def knock(self, cursor: str, ticket: str | None = None) -> Knocked:
        """The handshake, in one step or with a ticket."""
        url = self._url("events").replace("http", "ws", 1)
        headers = {"Mcp-Client": self.process}
        if ticket is None:
            headers["Last-Event-ID"] = cursor.encode().decode("latin-1")  # as it goes over the wire
        else:
            url += "?" + urlencode({"ticket": ticket, "cursor": cursor})
        try:
            socket = await connect(
                url,
                subprotocols=[Subprotocol(_PROTOCOL)],
                additional_headers=headers,
                compression=None,
                open_timeout=ANSWER,
                ping_interval=None,
                max_size=LIMIT,
                proxy=None,
            )
        except InvalidStatus as error:
            refusal = read_refusal(bytes(error.response.body or b""))
            reason = "" if refusal is None else refusal.reason.value
            self.trace.note("client", f"handshake: {error.response.status_code} {reason}")
            return Knocked(error.response.status_code, reason, None, None)
        except (ConnectionClosed, InvalidHandshake, InvalidURI, OSError, TimeoutError, EOFError) as error:
            self.trace.note("client", f"handshake: {type(error).__name__}")
            return Knocked(0, "", None, None)
        assert socket.response is not None
        self._frames.append(Frames(socket))
        echo = ", ".join(socket.response.headers.get_all("X-MCP-Resume-Cursor"))
        self.trace.note("client", f"101 with cursor {echo or '(none)'} at {urlsplit(url).path[-12:]}")
        return Knocked(101, "", sequence_of(echo), self._frames[-1])

    def take(self, block: Block) -> bool:
        """Process a block; whether it was an event of the log."""
        if block.id is None or not block.data:
            self.trace.note("client", f"{block.event} {(block.data or b'').decode(errors='replace')}")
            return False
        number = sequence_of(block.id)
        if number is not None:
            if number in self._came:
                self.again.append(number)
            self._came.add(number)
        self.cursor = block.id
        message = message_of(block)
        self.trace.note("event", f"{block.id} {block.event}")
        if message is not None and block.event == "message":
            self.ledger.take(message)
        return True
