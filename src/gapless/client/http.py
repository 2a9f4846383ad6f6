"""The client's plain requests: open, messages, negotiate, ack, delete."""

from __future__ import annotations

import re
from typing import Any, Final
from urllib.parse import quote

import httpx2
import msgspec

from gapless.client.network import TROUBLE
from gapless.errors import MalformedError
from gapless.protocol.cursor import EventId, parse_event_id
from gapless.protocol.media import JSON, STREAM
from gapless.protocol.moves import Failed, Input, Offered, Opened, Received, Refused
from gapless.protocol.outgoing import Kept, encode_messages
from gapless.protocol.refusal import read_refusal

__all__ = ["SUBPROTOCOL", "Endpoints", "Http", "decimal", "refused"]

SUBPROTOCOL: Final = "mcp.v1"
_BODY_MOST: Final = 64 * 1024
_DECIMAL: Final = re.compile(r"[0-9]{1,18}")


class _Timers(msgspec.Struct):
    keepalive: float = 15.0


class _Opened(msgspec.Struct):
    """The 201, as far as the client reads it; what else is in it is for others (§5)."""

    session: str
    cursor: str
    limits: dict[str, Any] = {}
    timers: _Timers = msgspec.field(default_factory=_Timers)


class _Received(msgspec.Struct):
    received: int


class Endpoints:
    """The URLs of one session below the server's base URL (§5)."""

    def __init__(self, url: str) -> None:
        self.base = url.rstrip("/")

    @property
    def open(self) -> str:
        """Where sessions are opened."""
        return f"{self.base}/session"

    def session(self, token: str, part: str = "") -> str:
        """A session's own URL, or one of its parts."""
        return f"{self.base}/session/{quote(token, safe='')}" + (f"/{part}" if part else "")


def decimal(text: str | None) -> int | None:
    """A header's plain decimal number, of at most 18 digits; `None` for anything else."""
    return int(text) if text is not None and _DECIMAL.fullmatch(text) else None


def refused(attempt: int, status: int, body: bytes, retry_after: str | None) -> Refused:
    """An error response as an input."""
    seconds = decimal(retry_after)
    return Refused(attempt, status, read_refusal(body), None if seconds is None else min(seconds, 60.0))


class Http:
    """Requests that have one answer, each turned into the input that the machine waits for."""

    def __init__(self, client: httpx2.AsyncClient, endpoints: Endpoints, process: str) -> None:
        self._client = client
        self._endpoints = endpoints
        self._process = process

    async def _request(
        self, attempt: int, method: str, url: str, content: bytes = b"", headers: dict[str, str] | None = None
    ) -> httpx2.Response | Failed:
        all_headers = {"Mcp-Client": self._process, **(headers or {})}
        try:
            return await self._client.request(method, url, content=content, headers=all_headers)
        except TROUBLE as error:
            return Failed(attempt, f"{method} {url.rpartition('/')[2]}: {str(error) or type(error).__name__}")

    def _error(self, attempt: int, response: httpx2.Response) -> Refused:
        return refused(
            attempt, response.status_code, response.content[:_BODY_MOST], response.headers.get("retry-after")
        )

    async def open(self, attempt: int) -> Input:
        """`POST /mcp/session`."""
        response = await self._request(attempt, "POST", self._endpoints.open)
        if isinstance(response, Failed):
            return response
        if response.status_code != 201:
            return self._error(attempt, response)
        try:
            body = msgspec.json.decode(response.content, type=_Opened)
            cursor = parse_event_id(body.cursor)
        except (msgspec.DecodeError, UnicodeDecodeError, MalformedError) as error:
            return Failed(attempt, f"the server's 201 makes no sense: {error}")
        return Opened(attempt, body.session, cursor, body.limits, {"keepalive": body.timers.keepalive})

    async def post(self, attempt: int, token: str, messages: tuple[Kept, ...]) -> Input:
        """`POST …/messages`: one message as JSON, several as blocks (L6)."""
        if len(messages) == 1:
            content = messages[0].data
            headers = {"Content-Type": JSON, "Mcp-Message-Number": str(messages[0].number)}
        else:
            content, headers = encode_messages(list(messages)), {"Content-Type": STREAM}
        response = await self._request(
            attempt, "POST", self._endpoints.session(token, "messages"), content, headers
        )
        if isinstance(response, Failed):
            return response
        if response.status_code != 202:
            return self._error(attempt, response)
        try:
            return Received(attempt, msgspec.json.decode(response.content, type=_Received).received)
        except (msgspec.DecodeError, UnicodeDecodeError) as error:
            return Failed(attempt, f"the server's 202 makes no sense: {error}")

    async def negotiate(self, attempt: int, token: str, cursor: EventId, nonce: str) -> Input:
        """`POST …/upgrade`, with the client's own cursor in the body."""
        content = msgspec.json.encode({"cursor": str(cursor), "protocol": SUBPROTOCOL, "negotiation": nonce})
        response = await self._request(
            attempt,
            "POST",
            self._endpoints.session(token, "upgrade"),
            content,
            {"Content-Type": JSON},
        )
        if isinstance(response, Failed):
            return response
        if response.status_code != 200:
            return self._error(attempt, response)
        try:
            ticket = msgspec.json.decode(response.content, type=dict[str, Any]).get("ticket")
        except (msgspec.DecodeError, UnicodeDecodeError) as error:
            return Failed(attempt, f"the server's acceptance makes no sense: {error}")
        return Offered(attempt, ticket if isinstance(ticket, str) else None)

    async def ack(self, token: str, cursor: EventId) -> None:
        """`POST …/ack`; whatever the answer, the next one says more."""
        content = msgspec.json.encode({"cursor": str(cursor)})
        await self._request(0, "POST", self._endpoints.session(token, "ack"), content, {"Content-Type": JSON})

    async def delete(self, token: str) -> None:
        """`DELETE` the session; if that fails it expires."""
        await self._request(0, "DELETE", self._endpoints.session(token))
