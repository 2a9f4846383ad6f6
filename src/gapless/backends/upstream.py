"""The wire to an MCP server behind a URL: one HTTP client per session, and what became of a request."""

from __future__ import annotations

import asyncio
import random
import re
import socket
import ssl
from collections.abc import AsyncGenerator, Mapping
from contextlib import AbstractAsyncContextManager
from typing import Any, Final
from urllib.parse import urlsplit, urlunsplit
from urllib.request import getproxies, proxy_bypass

import httpx2

from gapless.errors import TooLargeError, UsageError
from gapless.protocol.block import BLOCK_OVERHEAD, Block, BlockDecoder
from gapless.protocol.media import JSON, STREAM

__all__ = [
    "Headway",
    "Place",
    "Upstream",
    "body",
    "checked_headers",
    "checked_url",
    "messages",
    "shown",
]

_CONNECTING: Final = 5.0
_TRIES: Final = 2
"""Connections that are tried again, after 0 s and 0.5 s, before a request is given up as not sent."""
_WRITING: Final = 30.0
_KEPT_ALIVE: Final = 2.0
"""Seconds: a server that closes idle connections would else close one just as a request goes out on it."""
_PROBED: Final = {"TCP_KEEPIDLE": 15, "TCP_KEEPINTVL": 5, "TCP_KEEPCNT": 3}
"""A call may take as long as it likes, but not on a connection whose other end is gone; of Linux, these."""
_RETRY: Final = 1.0
"""Seconds before a stream is asked for again, where the server has not said how many: the official SDK's."""
_LONGEST_RETRY: Final = 60.0

_OURS: Final = frozenset(
    {
        *("accept", "accept-encoding", "connection", "content-length", "content-type", "host"),
        *("last-event-id", "mcp-method", "mcp-name", "mcp-protocol-version", "mcp-session-id"),
        *("te", "trailer", "transfer-encoding", "upgrade"),
    }
)
_NAME: Final = re.compile(r"[!#$%&'*+.^_`|~0-9A-Za-z-]+")
_VALUE: Final = re.compile(r"[\x21-\x7e](?:[\t\x20-\x7e]*[\x21-\x7e])?")


def checked_url(url: str) -> str:
    """The URL of an upstream server, without a fragment.

    Raises:
        UsageError: it is none, or holds a password.
    """
    try:
        parts = urlsplit(url)
        whole = parts.scheme in ("http", "https") and parts.hostname and parts.port != 0
    except ValueError:
        raise UsageError("an upstream URL that is none", hint="write https://host/mcp") from None
    if not whole:
        raise UsageError(f"{shown(url)!r} is no URL of a server", hint="write https://host/mcp")
    if parts.username is not None:
        hint = "send an Authorization header instead: --upstream-header, or headers= in code"
        raise UsageError("an upstream URL with a user or password in it", hint=hint)
    return urlunsplit(parts._replace(fragment=""))


def checked_headers(headers: Mapping[str, str]) -> dict[str, str]:
    """Headers that may go with every request to an upstream server. Values are never shown.

    Raises:
        UsageError: no name of a header, no value of one, or one that the transport sets itself.
    """
    for name, value in headers.items():
        if not _NAME.fullmatch(name):
            raise UsageError(f"{name!r} is no name of a header", hint="write 'Name: value'")
        if name.lower() in _OURS:
            raise UsageError(f"the header {name} is not yours to set", hint="leave it out")
        if not _VALUE.fullmatch(value):
            raise UsageError(
                f"the value of the header {name} is empty or holds what no header may", hint="use ASCII"
            )
    return dict(headers)


def shown(url: str) -> str:
    """A URL as logs and errors show it: without what may be secret in it."""
    try:
        parts = urlsplit(url)
        host = parts.netloc.rpartition("@")[2]
    except ValueError:
        return "a URL that is none"
    return urlunsplit((parts.scheme, host, parts.path, "", ""))


class Headway:
    """How far a request has come.

    Attributes:
        begun: some of it may have been written; until then it certainly was not sent.
        out: set once all of it is written, or nothing more will be.
    """

    __slots__ = ("begun", "out")

    def __init__(self) -> None:
        self.begun = False
        self.out = asyncio.Event()

    async def trace(self, name: str, _: dict[str, Any]) -> None:
        """What httpx2 says of a request as it goes."""
        if name.endswith("send_request_headers.started"):
            self.begun = True
        elif name.endswith("send_request_body.complete"):
            self.out.set()


class Upstream:
    """One session's HTTP client. Cookies are kept, for they are what a balancer knows a session by.

    An answer may take as long as its connection lives: callers bound what is to come sooner. Redirects
    are not followed. Proxies are those of the environment.

    Attributes:
        name: the server, as logs and errors name it.
        session: what the server calls the session, if it calls it anything.
        version: the revision that is spoken, once that is known.
    """

    def __init__(self, url: str, headers: Mapping[str, str], tls: ssl.SSLContext) -> None:
        self.name: Final = f"the MCP server at {shown(url)}"
        self.session: str | None = None
        self.version: str | None = None
        self._url = url
        parts = urlsplit(url)
        assert parts.hostname is not None
        proxy = None if proxy_bypass(parts.hostname) else getproxies().get(parts.scheme)
        probed = [(getattr(socket, name), value) for name, value in _PROBED.items() if hasattr(socket, name)]
        limits = httpx2.Limits(max_connections=None, keepalive_expiry=_KEPT_ALIVE)
        self._client = httpx2.AsyncClient(
            transport=httpx2.AsyncHTTPTransport(
                verify=tls,
                limits=limits,
                retries=_TRIES,
                proxy=proxy,
                socket_options=[
                    (socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1),
                    *((socket.IPPROTO_TCP, option, value) for option, value in probed),
                ],
            ),
            headers={
                **headers,
                "Accept": f"{JSON}, {STREAM}",
                # So that what is read at once is bounded, and nobody holds events back to compress them.
                "Accept-Encoding": "identity",
            },
            timeout=httpx2.Timeout(None, connect=_CONNECTING, write=_WRITING),
        )

    def headers(self) -> dict[str, str]:
        """What goes with every message after the first."""
        headers: dict[str, str] = {}
        if self.session is not None:
            headers["Mcp-Session-Id"] = self.session
        if self.version is not None:
            headers["MCP-Protocol-Version"] = self.version
        return headers

    def open(
        self, method: str, headers: Mapping[str, str], data: bytes = b"", headway: Headway | None = None
    ) -> AbstractAsyncContextManager[httpx2.Response]:
        """A request; entered when the response's headers are there, left when the response is done with.

        Raises:
            httpx2.HTTPError: there is no response, or no more of it.
        """
        return self._client.stream(
            method,
            self._url,
            headers={**headers, **({"Content-Type": JSON} if data else {})},
            content=data or None,
            extensions={} if headway is None else {"trace": headway.trace},
        )

    async def close(self) -> None:
        """Close what is still open."""
        await self._client.aclose()


async def body(response: httpx2.Response, limit: int) -> bytes:
    """A whole body.

    Raises:
        TooLargeError: it is above the limit. httpx2.HTTPError: it breaks off.
    """
    data = bytearray()
    async for piece in response.aiter_bytes():
        data += piece
        if len(data) > limit:
            raise TooLargeError(f"an answer above the limit of {limit} bytes")
    return bytes(data)


class Place:
    """Where in an event stream we are, and how to go on if it ends.

    Attributes:
        id: the last event's ID, if the server gives any.
        fruitless: connections in a row that brought neither a message nor a new ID.
    """

    __slots__ = ("_retry", "fruitless", "id")

    def __init__(self) -> None:
        self.id: str | None = None
        self.fruitless = 0
        self._retry = _RETRY

    def note(self, block: Block) -> None:
        """A block has come."""
        if block.data or (block.id and block.id != self.id):
            self.fruitless = 0
        if block.id is not None:
            self.id = block.id if block.id and _VALUE.fullmatch(block.id) else None
        if block.retry is not None:
            self._retry = min(block.retry / 1000, _LONGEST_RETRY)

    def pause(self, longest: float) -> float:
        """Seconds before the next connection: what the server has asked for, and more after failures."""
        backoff = min(0.25 * 2 ** min(self.fruitless, 10), longest)
        return max(self._retry, backoff) * random.uniform(1, 1.25)


async def messages(response: httpx2.Response, place: Place, limit: int) -> AsyncGenerator[bytes]:
    """The messages of an event stream, to its end; `place` is kept up.

    Raises:
        TooLargeError: one above the limit; what follows it is lost.
        MalformedError: the stream is none.
        httpx2.HTTPError: it breaks off.
    """
    decoder = BlockDecoder(limit + BLOCK_OVERHEAD)
    async for piece in response.aiter_bytes():
        # In parts that hold no more than one block's beginning, so that no block before it is lost with it.
        for start in range(0, len(piece), limit):
            for block in decoder.feed(piece[start : start + limit]):
                place.note(block)
                if block.event == "message" and block.data:
                    yield block.data
